"""The Llama family as Hugging Face keeps it: names, shapes and config.json (no torch).

Weights go back and forth unchanged, because ``harness.model.rope`` rotates the pairs that transformers does.
Names and the meaning of config.json's fields are those of transformers' models/llama (4.56 to 5.x).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.errors import ConfigError, UserError, divisors
from harness.model.config import ModelConfig

MODEL_TYPE = "llama"

_OUTSIDE = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_BLOCK_NAME = re.compile(r"layers\.(\d+)\.(.+)\.weight")

# Older files keep these beside the parameters; whoever runs the model computes them.
_BUFFER = ".rotary_emb.inv_freq"
_SHOWN = 3  # names of a kind in one line of error; the count says how many there are

# What LlamaConfig takes for a field that config.json leaves out.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
# What our decoder does and config.json may ask to be done otherwise.
_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
# Fields of RopeConfig that only scaling=llama3 reads.
_STRETCHING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position": "original_max_position_embeddings",
}


def hf_name(name: str) -> str:
    """Hugging Face's name of one of our parameters, ``layers.3.attention.wq.weight`` say.

    Raises:
        ValueError: the decoder has no parameter of that name.
    """
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    match = _BLOCK_NAME.fullmatch(name)
    if match is None or match[2] not in _OF_BLOCK:
        raise ValueError(f"no parameter of a decoder is called {name!r}")
    return f"model.layers.{match[1]}.{_OF_BLOCK[match[2]]}.weight"


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's name and shape, in the decoder's order, without building it.

    Matrices are [output width, input width]. A tied output projection is not listed: it is the table.
    """
    table = (config.vocab_size, config.dim)
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": table}
    for layer in range(config.n_layers):
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in _block_shapes(config).items()}
    shapes["norm.weight"] = (config.dim,)
    if not config.tied_embeddings:
        shapes["output.weight"] = table
    return shapes


def _block_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    dim, hidden = config.dim, config.ffn_hidden_dim
    q_width, kv_width = config.n_heads * config.head_width, config.n_kv_heads * config.head_width
    return {
        "attention_norm": (dim,),
        "attention.wq": (q_width, dim),
        "attention.wk": (kv_width, dim),
        "attention.wv": (kv_width, dim),
        "attention.wo": (dim, q_width),
        "ffn_norm": (dim,),
        "feed_forward.w1": (hidden, dim),
        "feed_forward.w2": (dim, hidden),
        "feed_forward.w3": (hidden, dim),
    }


def hf_config(config: ModelConfig, *, dtype: str, bos_id: int | None, eos_id: int | None) -> dict[str, Any]:
    """The content of config.json with which transformers builds the same model.

    Rotation and number format are said twice: 4.x reads ``rope_theta``, ``rope_scaling`` and ``torch_dtype``,
    5.x writes ``rope_parameters`` and ``dtype``. Each ignores, or reads and agrees with, what is the other's.

    Args:
        config: the model's numbers.
        dtype: format of the stored weights as torch calls it, e.g. ``bfloat16``.
        bos_id: id of the token that begins a document, None where there is none.
        eos_id: id of the token that ends a document, None where there is none.

    Raises:
        ConfigError: a model that transformers 5 refuses, whose heads do not divide the width.
    """
    if config.dim % config.n_heads:
        rule = (
            f"transformers' LlamaConfig wants it to divide model.dim={config.dim}, whatever model.head_dim is"
        )
        raise ConfigError("model.n_heads", config.n_heads, rule, divisors(config.dim))
    theta = float(config.rope.theta)
    scaling = _hf_scaling(config)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": MODEL_TYPE,
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_hidden_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_width,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": theta},
        "tie_word_embeddings": config.tied_embeddings,
        **_FIXED,
        "attention_dropout": 0.0,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "torch_dtype": dtype,
        "dtype": dtype,
    }


def _hf_scaling(config: ModelConfig) -> dict[str, Any] | None:
    rope = config.rope
    if rope.scaling == "none":
        return None
    # Floats, because transformers warns of a factor that is an integer.
    return {
        "rope_type": rope.scaling,
        "factor": float(rope.factor),
        "low_freq_factor": float(rope.low_freq_factor),
        "high_freq_factor": float(rope.high_freq_factor),
        "original_max_position_embeddings": rope.original_max_position,
    }


@dataclass(frozen=True)
class _Fact:
    """One thing that both sides say: our field and value, their field and value."""

    field: str
    value: object
    hf_field: str
    hf_value: object

    @property
    def differs(self) -> bool:
        return self.value != self.hf_value

    def __str__(self) -> str:
        return f"{self.field}={_typed(self.value)}: config.json has {self.hf_field} {_typed(self.hf_value)}"


def _typed(value: object) -> str:
    """The value as YAML and JSON have it."""
    return value if isinstance(value, str) else json.dumps(value)


def check_hf_config(config: ModelConfig, found: Mapping[str, Any]) -> None:
    """Refuses a checkpoint of another model than ``config``, by what its config.json says.

    Reads what transformers 4.x writes (``rope_theta``, ``rope_scaling``) and what 5.x does
    (``rope_parameters``); a field that is left out has LlamaConfig's default.

    Raises:
        UserError: one line that names every field of the model that differs, or what the model cannot do.
    """
    model_type = found.get("model_type")
    if model_type != MODEL_TYPE:
        said = f"model_type {model_type}" if model_type else "no model_type"
        raise UserError(f"config.json has {said}: only checkpoints with model_type {MODEL_TYPE} are read")
    for name, ours in _FIXED.items():
        if found.get(name, ours) != ours:
            only = f"the decoder only knows {name} {_typed(ours)}"
            raise UserError(f"config.json has {name} {_typed(found[name])}: {only}")
    differing = [fact for fact in (*_facts(config, found), *_rope_facts(config, found)) if fact.differs]
    if differing:
        raise UserError("; ".join(map(str, differing)))


def _facts(config: ModelConfig, found: Mapping[str, Any]) -> list[_Fact]:
    says = {**_DEFAULTS, **{name: value for name, value in found.items() if value is not None}}
    says.setdefault("num_key_value_heads", says["num_attention_heads"])
    says.setdefault("head_dim", says["hidden_size"] // says["num_attention_heads"])
    ours = {
        "vocab_size": ("vocab_size", config.vocab_size),
        "dim": ("hidden_size", config.dim),
        "n_layers": ("num_hidden_layers", config.n_layers),
        "n_heads": ("num_attention_heads", config.n_heads),
        "n_kv_heads": ("num_key_value_heads", config.n_kv_heads),
        "head_dim": ("head_dim", config.head_width),
        "ffn_hidden_dim": ("intermediate_size", config.ffn_hidden_dim),
        "norm_eps": ("rms_norm_eps", config.norm_eps),
        "tied_embeddings": ("tie_word_embeddings", config.tied_embeddings),
        "max_seq_len": ("max_position_embeddings", config.max_seq_len),
    }
    return [
        _Fact(f"model.{name}", value, hf_field, says[hf_field]) for name, (hf_field, value) in ours.items()
    ]


def _rope_facts(config: ModelConfig, found: Mapping[str, Any]) -> list[_Fact]:
    # In this order, because transformers 5 prefers rope_scaling where a file has both.
    says = found.get("rope_scaling") or found.get("rope_parameters") or {}
    rope = config.rope
    theta = says.get("rope_theta", found.get("rope_theta", _DEFAULTS["rope_theta"]))
    kind = says.get("rope_type", says.get("type", "default"))
    scaling = "none" if kind == "default" else kind
    facts = [
        _Fact("model.rope.theta", rope.theta, "rope_theta", theta),
        _Fact("model.rope.scaling", rope.scaling, "rope_type", scaling),
    ]
    if rope.scaling == scaling == "llama3":
        longest = found.get("max_position_embeddings", _DEFAULTS["max_position_embeddings"])
        says = {"original_max_position_embeddings": longest, **says}
        facts += [
            _Fact(f"model.rope.{name}", getattr(rope, name), hf_field, says.get(hf_field))
            for name, hf_field in _STRETCHING.items()
        ]
    return facts


def check_hf_tensors(config: ModelConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses a checkpoint whose tensors are not the model's parameters.

    Tolerates two kinds that say nothing new: the output projection of a model whose embeddings are tied, and
    the rotation's inverse frequencies.

    Args:
        config: the model's numbers.
        found: name and shape of every tensor in the checkpoint.

    Raises:
        UserError: one line with the number and the first names of those missing, unexpected or misshapen.
    """
    expected = {hf_name(name): shape for name, shape in parameter_shapes(config).items()}
    optional = {"lm_head.weight": (config.vocab_size, config.dim)} if config.tied_embeddings else {}
    allowed = expected | optional
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in allowed and not name.endswith(_BUFFER)]
    misshapen = [
        f"{name} is {list(shape)} and not {list(allowed[name])}"
        for name, shape in found.items()
        if name in allowed and tuple(shape) != allowed[name]
    ]
    groups = {"missing": missing, "unexpected": unexpected, "of another shape": misshapen}
    wrong = [f"{len(names)} {what} ({_first(names)})" for what, names in groups.items() if names]
    if wrong:
        raise UserError(f"the checkpoint's tensors are not those of model={config.name}: {', '.join(wrong)}")


def _first(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join([*every[:_SHOWN], *(["..."] if len(every) > _SHOWN else [])])
