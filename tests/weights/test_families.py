"""Every family (tests/families_table.py) against transformers, and conversions of its weights."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from cases import rows, texts
from conversions import model_of, require_same, run
from families_table import (
    CASES,
    SEQ_LEN,
    batch,
    close,
    random_model,
    set_fields,
    tensors_of,
    to_transformers,
    with_another,
)
from held import Held
from one_line import one_line
from safetensors.torch import load_file, save_file

from harness.checkpoint.catalog import open_checkpoint
from harness.config.model import FAMILIES
from harness.model.decoder import Decoder
from harness.model.spec import is_buffer, parameter_shapes, tensor_shapes
from harness.util.errors import ConfigError, UserError
from harness.weights.config_json import check_hf_config, hf_config, relevant
from harness.weights.dcp import DistributedSource
from harness.weights.hf_tensors import HuggingFaceNames, fill, our_tensors
from harness.weights.huggingface import HuggingFaceSource, write_huggingface
from harness.weights.source import cast

# transformers does not load the block of multi-token prediction.
WITH_MTP = "deepseek_v3_mtp"
CONVERTED = {**CASES, WITH_MTP: set_fields(CASES["deepseek_v3"], mtp__depth=1)}


# -- transformers ----


class Pair(NamedTuple):
    """A decoder, the model of transformers with its weights, and the files it was loaded from."""

    model: Decoder
    theirs: Any
    files: Path


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    model, files = random_model(CASES[request.param]), tmp_path_factory.mktemp(request.param)
    return Pair(model, to_transformers(model, files), files)


def test_logits_and_gradients(pair):
    model, theirs, _ = pair
    config = model.config
    assert type(theirs).__name__ == FAMILIES[config.family].architecture
    assert config.tied_embeddings == (theirs.lm_head.weight is theirs.get_input_embeddings().weight)
    inputs, labels = batch(config)
    logits, their_logits = model(inputs), theirs(inputs).logits
    assert their_logits.std() > 0.5
    close(logits, their_logits)

    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    F.cross_entropy(their_logits.flatten(0, 1), labels.flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    stored = as_stored({**dict(theirs.named_buffers()), **gradients}, config.family)
    own = dict(model.named_parameters())
    shapes = [(name, tuple(parameter.shape)) for name, parameter in own.items()]
    assert shapes == list(parameter_shapes(config).items())
    compared = 0
    for name, gradient in from_theirs(config, stored):
        if is_buffer(name):
            continue
        grad = own[name].grad
        assert grad is not None and gradient.abs().max() > 0, name
        close(grad, gradient, tolerance=5e-5, name=name)
        compared += 1
    assert compared == len(own) == len({id(p) for p in model.parameters()})


def as_stored(theirs, family=""):
    """Tensors of transformers' modules, which stack and fuse experts that its files keep one by one."""
    if family == "kimi_linear":
        return _of_kimi_linear(theirs)
    if family == "mixtral":
        return {_of_mixtral(name): tensor for name, tensor in as_stored(theirs).items()}
    stored = {}
    for name, tensor in theirs.items():
        prefix, _, last = name.rpartition("mlp.experts.")
        stays = tensor.ndim != 3 or f"{prefix}mlp.router.weight" in theirs
        if not prefix or stays or family == "qwen3_5_moe":
            stored[name] = tensor
            continue
        for expert, own in enumerate(tensor):
            parts = own.chunk(2) if last == "gate_up_proj" else [own]
            names = ["gate_proj", "up_proj"] if last == "gate_up_proj" else ["down_proj"]
            for each, part in zip(names, parts, strict=True):
                stored[f"{prefix}mlp.experts.{expert}.{each}.weight"] = part
    return stored


def _of_kimi_linear(theirs):
    """transformers has one convolution, and a module for decays."""
    stored = {}
    for name, tensor in as_stored(theirs, "mixtral").items():
        name = name.replace("forget_gate.", "").replace(
            ".mlp.shared_experts", ".block_sparse_moe.shared_experts"
        )
        if name.endswith("self_attn.conv1d.weight"):
            for each, part in zip("qkv", tensor.chunk(3), strict=True):
                stored[name.replace("conv1d", f"{each}_conv1d")] = part
        else:
            stored[name] = tensor
    return stored


def _of_mixtral(name):
    """The name in Mixtral's files of a tensor that other mixtures have too."""
    for theirs, own in {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}.items():
        name = re.sub(rf"mlp\.experts\.(\d+)\.{theirs}", rf"mlp.experts.\1.{own}", name)
    return re.sub(r"\.mlp\.(experts|gate)\.", r".block_sparse_moe.\1.", name)


def from_theirs(model, theirs):
    """All our tensors, made from theirs in memory."""
    shapes = tensor_shapes(model)
    for name, pieces in our_tensors(model).items():
        out = torch.empty(shapes[name], dtype=theirs[pieces[0].theirs].dtype)
        fill(
            out,
            pieces,
            shapes[name],
            list(map(range, shapes[name])),
            lambda key, part: theirs[key][part],
        )
        yield name, out


def test_files_of_transformers_are_read(pair, tmp_path):
    """Its config.json and tensors, which are not arranged as ours are."""
    config = pair.model.config
    if config.family == "kimi_linear" and config.moe.first_dense_layers:
        pytest.skip("transformers 5.23 writes a dense feed-forward by the name of a mixture")
    pair.theirs.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours, theirs = (
        json.loads((each / "config.json").read_text()) for each in (pair.files, tmp_path)
    )
    assert ours != theirs
    source = HuggingFaceSource(tmp_path, pair.model.config)
    require_same(source, tensors_of(pair.model))
    for name in source.tensors:
        read = source.read(name)
        assert read.is_contiguous() and read.untyped_storage().nbytes() == read.nbytes


@pytest.mark.parametrize("case", CASES)
def test_every_field_is_compared(case):
    """A field that was left out would let another model's weights in."""
    config = CASES[case]
    found = hf_config(config, "float32")
    check_hf_config(config, found)
    for field, _ in relevant(config):
        if field == "moe.balance_coeff" and config.moe.balance_coeff:
            continue  # only affects training
        with pytest.raises(UserError) as caught:
            check_hf_config(with_another(config, field), found)
        # Llama 4 lists the layers that have experts.
        listed = config.family == "llama4" and field == "moe.first_dense_layers"
        named = "moe.every_nth_layer" if listed else field
        before = "" if config.family == "llama" else "(.*; )?"
        assert re.match(rf"{before}model\.{re.escape(named)}=.+?: ", str(caught.value)), str(
            caught.value
        )
        assert "\n" not in str(caught.value)


# -- conversions ----


def random_tensors(model, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(shape, generator=generator).to(
            torch.float32 if is_buffer(name) else dtype
        )
        for name, shape in tensor_shapes(model).items()
    }


def write(folder, tensors, model):
    write_huggingface(Held(tensors), model, None, folder)


# One row of each family, and rows with other tensors.
FEW = (
    *(
        "llama",
        "llama_tied",
        "llama_biases_linear",
        "qwen2",
        "mistral",
        "mixtral",
        "qwen3",
        "qwen3_moe",
    ),
    *(
        "deepseek_v2",
        "deepseek_v2_groups",
        "deepseek_v3",
        "deepseek_v3_plain",
        WITH_MTP,
        "gpt_oss",
        "llama4",
        "olmo3",
        "gemma3",
        "glm4",
        "glm4_moe",
        "phi3",
        "qwen3_5_moe",
        "kimi_linear",
    ),
)
ROWS = [*((case, torch.bfloat16) for case in FEW), ("llama", torch.float32)]


@pytest.mark.parametrize(("case", "dtype"), ROWS)
def test_there_and_back(case, dtype, tmp_path):
    """Hugging Face's files to DCP and back, and to torch's."""
    model = CONVERTED[case]
    tensors = random_tensors(model, dtype)
    write_huggingface(Held(tensors), model, None, tmp_path / "hf", 1e-4)
    overrides = ["model=from_config", f"model.mtp.depth={model.mtp.depth}"]
    run(tmp_path / "hf", tmp_path / "step-0", *overrides)
    checkpoint = open_checkpoint(str(tmp_path / "step-0"))
    assert (checkpoint.step, checkpoint.holds, checkpoint.job) == (0, "model", None)
    assert checkpoint.manifest["tokenizer"] is None  # not given
    require_same(DistributedSource(checkpoint.path, checkpoint.manifest, model), tensors)
    # Also with torch's reader.
    state = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    dcp.load(state, checkpoint_id=tmp_path / "step-0", no_dist=True)
    require_same(state, tensors)

    run(tmp_path / "step-0", tmp_path / "back", "convert.format=hf", "convert.max_shard_gb=0.0001")
    require_same(HuggingFaceSource(tmp_path / "back", model), tensors)
    files = sorted(file.name for file in (tmp_path / "hf").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "back").iterdir()) and len(files) > 3
    for name in files:
        assert (tmp_path / "hf" / name).read_bytes() == (tmp_path / "back" / name).read_bytes(), (
            name
        )

    run(tmp_path / "step-0", tmp_path / "model.pt", "convert.format=torch", "convert.dtype=float32")
    for mmap in (False, True):
        state = torch.load(tmp_path / "model.pt", weights_only=True, mmap=mmap)
        expected = {name: tensor.float() for name, tensor in tensors.items()}
        require_same({name: state[name] for name in tensors}, expected)
        Decoder(model, SEQ_LEN).load_state_dict(state)


@pytest.mark.parametrize("case", FEW)
def test_parts_of_tensors(case, tmp_path):
    """Ranks read some rows, columns and experts, or nothing."""
    tensors = random_tensors(CONVERTED[case])
    write(tmp_path, tensors, CONVERTED[case])
    source = HuggingFaceSource(tmp_path, CONVERTED[case])
    require_parts(source, tensors)


def require_parts(source, tensors):
    """Fail unless parts of tensors are read as they are."""
    for name, tensor in tensors.items():
        for cut in (range(1), range(1, 3), range(2, 2)):
            ranges = [
                range(size)[cut.start * size // 4 : cut.stop * size // 4] for size in tensor.shape
            ]
            part = tensor[tuple(slice(each.start, each.stop) for each in ranges)]
            out = torch.full(part.shape, torch.nan, dtype=part.dtype)
            source.fill(name, out, ranges)
            assert torch.equal(out, part), name


@pytest.mark.parametrize("case", FEW)
def test_each_tensor_is_read_once(case):
    """Stacked experts are not read again for every expert, and at most three tensors are cached."""
    model = CONVERTED[case]
    source = Held(random_tensors(model))
    renamed = HuggingFaceNames(cast(source, torch.float32), model)
    for name in renamed.tensors:
        tensor = renamed.read(name)
        assert tensor.is_contiguous() and tuple(tensor.shape) == renamed.tensors[name].shape
        assert len(renamed._cache) <= 3
    assert (
        len(source.reads)
        == len(source.tensors) + len(FAMILIES[model.family].mtp_copies) * model.mtp.depth
    )
    assert set(source.reads) == set(source.tensors)


def test_balancing_biases_are_never_cast(tmp_path):
    model = CASES["deepseek_v3"]
    tensors = random_tensors(model, torch.float32)
    write_huggingface(cast(Held(tensors), torch.bfloat16), model, None, tmp_path / "hf")
    expected = {
        name: tensor if is_buffer(name) else tensor.bfloat16() for name, tensor in tensors.items()
    }
    require_same(HuggingFaceSource(tmp_path / "hf", model), expected)
    assert any(is_buffer(name) for name in tensors)
    # A file with them in another dtype.
    rounded = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    write(tmp_path / "rounded", rounded, model)
    bias = HuggingFaceSource(tmp_path / "rounded", model).read("layers.1.moe.balance_bias")
    assert bias.dtype == torch.float32
    assert torch.equal(bias, rounded["layers.1.moe.balance_bias"].float())


# -- files with more than the text model, or less ----


def change_config(folder, change):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(change(content)))


def written(folder, case):
    """A folder with random weights: the model, our tensors, theirs, and the file that has them."""
    model = CONVERTED[case]
    tensors = random_tensors(model)
    write(folder, tensors, model)
    return model, tensors, load_file(folder / "model.safetensors"), folder / "model.safetensors"


def test_the_text_model_of_a_multimodal_file(tmp_path):
    model, tensors, stored, file = written(tmp_path, "llama4")
    nested = {f"language_model.{name}": tensor for name, tensor in stored.items()}
    nested["vision_model.class_embedding"] = torch.zeros(3)
    nested["multi_modal_projector.linear_1.weight"] = torch.zeros(2, 2)
    save_file(nested, file)
    change_config(
        tmp_path, lambda own: {"model_type": "llama4", "text_config": own, "vision_config": {}}
    )
    require_same(HuggingFaceSource(tmp_path, model), tensors)
    # As in the released files.
    released = {"no_rope_layers": [], "attn_temperature_tuning": 4}
    change_config(
        tmp_path, lambda full: {**full, "text_config": {**full["text_config"], **released}}
    )
    require_same(HuggingFaceSource(tmp_path, model), tensors)


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_model_inside_of_another_model(case, tmp_path):
    model, tensors, stored, file = written(tmp_path, case)
    inside = {name.replace("model.", "model.language_model.", 1): t for name, t in stored.items()}
    others = {
        "model.visual.patch_embed.proj.bias": torch.zeros(3),
        "mtp.fc.weight": torch.zeros(2, 2),
    }
    save_file({**inside, **others}, file)
    sections = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}

    def nested(own):
        rope = {**own["rope_parameters"], **sections}
        more = {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1}
        return {"model_type": case, "text_config": {**own, **more, "rope_parameters": rope}}

    change_config(tmp_path, nested)
    require_same(HuggingFaceSource(tmp_path, model), tensors)


def test_blocks_that_predict_another_token_are_skipped(tmp_path):
    model, tensors, stored, file = written(tmp_path, "deepseek_v3")
    save_file({**stored, "model.layers.4.eh_proj.weight": torch.zeros(2)}, file)
    change_config(tmp_path, lambda own: {**own, "num_nextn_predict_layers": 1})
    require_same(HuggingFaceSource(tmp_path, model), tensors)
    save_file({**stored, "model.layers.5.eh_proj.weight": torch.zeros(2)}, file)
    with one_line(UserError, r"1 unexpected \(model\.layers\.5\.eh_proj\.weight\)"):
        HuggingFaceSource(tmp_path, model)


def test_the_block_of_multi_token_prediction_has_the_released_models_names(tmp_path):
    plain = CASES["deepseek_v3"]
    model, tensors, stored, file = written(tmp_path, WITH_MTP)
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    for ours, theirs in rows("""
        mtp.embedding_norm.weight        enorm.weight
        mtp.hidden_norm.weight           hnorm.weight
        mtp.proj.weight                  eh_proj.weight
        mtp.norm.weight                  shared_head.norm.weight
        mtp.block.attention_norm.weight  input_layernorm.weight
        mtp.block.moe.balance_bias       mlp.gate.e_score_correction_bias
        tok_embeddings.weight            embed_tokens.weight
        output.weight                    shared_head.head.weight
    """):
        assert torch.equal(stored[f"model.layers.4.{theirs}"], tensors[ours]), ours
    # A model without the block can read the same files; the model with it needs files that have it.
    require_same(
        HuggingFaceSource(tmp_path, plain), {name: tensors[name] for name in tensor_shapes(plain)}
    )
    write(tmp_path / "plain", tensors, plain)
    with one_line(UserError, r"model\.mtp\.depth=1: config\.json has num_nextn_predict_layers 0"):
        HuggingFaceSource(tmp_path / "plain", model)
    # Copies may be missing, but must not differ.
    copies = ("model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight")
    save_file({name: tensor for name, tensor in stored.items() if name not in copies}, file)
    require_same(HuggingFaceSource(tmp_path, model), tensors)
    save_file({**stored, copies[1]: stored[copies[1]] + 1}, file)
    differs = r"shared_head\.head\.weight differs from lm_head\.weight.*model\.mtp\.depth=0"
    with one_line(UserError, differs):
        HuggingFaceSource(tmp_path, model).read("output.weight")
    save_file({name: tensor for name, tensor in stored.items() if "eh_proj" not in name}, file)
    with one_line(UserError, r"missing \(model\.layers\.4\.eh_proj\.weight\)"):
        HuggingFaceSource(tmp_path, model)


@pytest.mark.parametrize(
    ("overrides", "says"),
    texts("""
        llama4_debug model.moe.balance_coeff=0.001  have no place for layers.1.moe.balance_bias; would work: 0
        llama3_tiny model.attention.sinks=true  cannot store it; would work: false, model.family=gpt_oss
        deepseek_v3_debug model.moe.balance_coeff=0.0  have balancing biases
        deepseek_v2_debug model.mtp.depth=1  cannot store it; would work: 0, model.family=deepseek_v3
        llama3_tiny model.family=qwen3_moe model.moe.num_experts=0  have experts
        gemma3_debug model.embedding_multiplier=2.0  times the root of model.dim; would work: 8.0
        gemma3_debug model.attention.scale=0.3  divide scores by the root of an integer
        olmo3_debug model.rope.local_theta=null  have a base of rotation for local layers; would work: 500000
        llama3_tiny model.rope.rotated_fraction=0.5  cannot store it; would work: 1.0, model.family=glm4
        llama3_tiny model.n_kv_heads=3 model.head_dim=16 model.n_heads=6  divide model.dim=64 here, whatever
    """),
)
def test_models_that_a_familys_files_cannot_store(overrides, says, tmp_path):
    model = model_of(*f"model={overrides}".split())
    with pytest.raises(ConfigError) as caught:
        write(tmp_path, random_tensors(model), model)
    assert str(caught.value).startswith(f"{overrides.split()[-1]}: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
