"""How each tensor is updated, from its description and the config (no torch).

``tensor_settings`` is the one place that decides: the optimizer's parameter groups, the plan and
the rules of a job read it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.config.fields import check_rules, from_dict, numerics
from harness.config.model import ModelConfig
from harness.config.optimizer import (
    BETA_RULE,
    BLOCK,
    EIGHT_BIT,
    KINDS,
    LARGEST_BFLOAT16_BETA,
    LR_SCALES,
    OptimizerConfig,
)
from harness.config.parallelism import ParallelismConfig
from harness.model.architecture import architecture_of, block_of
from harness.model.decoder_architecture import DecoderArchitecture, PreNorm
from harness.model.spec import TensorSpec
from harness.util.errors import ConfigError


@dataclass(frozen=True)
class OptimizerGroup:
    """One element of ``optimizer.groups``: settings of the tensors whose name matches. null: unchanged."""

    match: str = numerics(nonempty=True, works="layers")
    """Python regular expression, searched in the tensor's full name (``re.search``)."""
    lr_factor: float | None = numerics(None, least=0)
    """Factor of the learning rate."""
    weight_decay: float | None = numerics(None, least=0)
    """In place of optimizer.weight_decay."""
    betas: list[float] | None = numerics(None, least=0, below=1)
    """In place of optimizer.beta1 and beta2."""
    kind: str | None = numerics(None, choices=KINDS)
    """In place of optimizer.kind."""


@dataclass(frozen=True)
class TensorSettings:
    """How one tensor is updated."""

    kind: str
    lr_factor: float
    """Factor of the learning rate."""
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    """Added to the root of the second moment (AdamW, Adam)."""


def tensor_settings(config: OptimizerConfig, tensor: TensorSpec) -> TensorSettings:
    """Return the settings of a tensor: those of its role, changed by the groups that match its name.

    Of several groups that set the same field the last one applies. ``lr_factor`` of a group
    multiplies the factor of the tensor's role. Weight decay is divided by the factor of the role:
    per step a matrix shrinks by the same fraction at every width (arXiv:2405.13698;
    arXiv:2505.01618, table 1).
    """
    kind = kind_of(config, tensor)
    settings = role = TensorSettings(
        kind=kind,
        lr_factor=_mup_factor(config, kind, tensor),
        weight_decay=0.0 if tensor.is_vector else config.weight_decay,
        betas=(config.beta1, config.beta2),
        # The gradients of all tensors are inversely proportional to the width (arXiv:2505.01618,
        # table 1).
        eps=config.eps / tensor.widths.stream,
    )
    for group in config.groups:
        if not re.search(group["match"], tensor.name):
            continue
        if (factor := group.get("lr_factor")) is not None:
            settings = replace(settings, lr_factor=role.lr_factor * factor)
        if (decay := group.get("weight_decay")) is not None:
            settings = replace(settings, weight_decay=float(decay))
        if (betas := group.get("betas")) is not None:
            settings = replace(settings, betas=tuple(betas))
    return replace(settings, weight_decay=settings.weight_decay / role.lr_factor)


def kind_of(config: OptimizerConfig, tensor: TensorSpec) -> str:
    """Return the kind of optimizer that updates a tensor."""
    for group in reversed(config.groups):
        if (kind := group.get("kind")) and re.search(group["match"], tensor.name):
            return kind
    others = KINDS[config.kind].others
    return config.kind if others is None or tensor.is_hidden_matrix else others


def _mup_factor(config: OptimizerConfig, kind: str, tensor: TensorSpec) -> float:
    """muP's factor of a tensor's learning rate; 1 without muP, and for tensors that are no hidden matrices.

    Adam and Lion: 1 / inputs (arXiv:2203.03466, table 8). Muon: the spectral norm of an update is
    proportional to sqrt(outputs / inputs) (arXiv:2310.17813, condition 1); its ``lr_scale`` is
    taken into account. Widths are divided by the base model's.
    """
    widths = tensor.widths
    if not tensor.is_hidden_matrix:
        return 1.0
    if KINDS[kind].mup == "entries":
        return 1 / widths.inputs
    scale = LR_SCALES[config.lr_scale]
    outputs = tensor.outputs
    inputs = tensor.inputs
    own = scale(outputs, inputs)
    base = scale(outputs / widths.outputs, inputs / widths.inputs)
    return (widths.outputs / widths.inputs) ** 0.5 * base / own


def in_blocks(shape: Sequence[int]) -> bool:
    """Whether the 8-bit state of a tensor has codes: on every layout the same tensors have."""
    return len(shape) > 1 and shape[-1] % BLOCK == 0


def check_blocks(
    config: OptimizerConfig, tensors: Iterable[TensorSpec], layout: ParallelismConfig
) -> None:
    """Check that tensor parallelism cuts no block of 8-bit state."""
    for tensor in tensors if config.state_dtype == EIGHT_BIT else ():
        splits = layout.splits_experts if tensor.is_expert else layout.tp > 1
        of_row = splits and tensor.split_dim == len(tensor.shape) - 1
        if of_row and in_blocks(tensor.shape) and tensor.shape[-1] % (BLOCK * layout.tp):
            rule = f"parallelism.tp={layout.tp} cuts blocks of {BLOCK} values of {tensor.name}"
            raise ConfigError(
                "optimizer.state_dtype", EIGHT_BIT, rule, "bfloat16, or a smaller parallelism.tp"
            )


def check_mup(config: OptimizerConfig, base_dim: int, tensors: Iterable[TensorSpec]) -> None:
    """Check that a rule of muP is known for the kinds of optimizers."""
    trained = [tensor for tensor in tensors if not tensor.is_buffer]
    for kind in kinds_of(config, trained):
        if KINDS[kind].mup is None:
            rule = f"no rule of muP is known for optimizer.kind={kind}"
            raise ConfigError(
                "model.mup.base_dim", base_dim, rule, "null, or optimizer=adamw, muon, lion"
            )
    settings = [tensor_settings(config, tensor) for tensor in trained]
    if any(each.kind == "adam" and each.weight_decay for each in settings):
        rule = "Adam's weight decay is a part of the gradient, for which muP has no rule"
        raise ConfigError(
            "optimizer.weight_decay", config.weight_decay, rule, "0, or optimizer=adamw"
        )


def check_qk_clip(config: OptimizerConfig, model: ModelConfig) -> None:
    """Check that scaling queries and keys of the model's attention scales its logits."""
    norm = model.attention.qk_norm
    if norm != "none":
        rule = f"scales queries and keys, and model.attention.qk_norm={norm} normalises them later"
        works = "null, or model.attention.qk_norm=none"
        raise ConfigError("optimizer.qk_clip", config.qk_clip, rule, works)
    kinds = (type(architecture_of(model)), type(block_of(model)))
    if kinds != (DecoderArchitecture, PreNorm):
        rule = f"knows the attention of model.block=pre_norm, and model={model.name} has another"
        raise ConfigError("optimizer.qk_clip", config.qk_clip, rule, "null")


def kinds_of(config: OptimizerConfig, tensors: Iterable[TensorSpec]) -> dict[str, list[TensorSpec]]:
    """Return the trained tensors by the kind that updates them."""
    found: dict[str, list[TensorSpec]] = {}
    for tensor in tensors:
        if not tensor.is_buffer:
            found.setdefault(kind_of(config, tensor), []).append(tensor)
    return found


def exchanges(config: OptimizerConfig, tensors: Iterable[TensorSpec]) -> bool:
    """Whether an optimizer exchanges pieces between ranks."""
    return any(KINDS[kind].exchanges for kind in kinds_of(config, tensors))


def check_groups(config: OptimizerConfig, tensors: Mapping[str, TensorSpec]) -> None:
    """Check ``optimizer.groups`` against the model's tensors.

    Raises:
        ConfigError: an unknown key, a value outside its range, an invalid regular expression, a
            group that matches no tensor, betas that nothing uses, or a vector for an optimizer of
            matrices.
    """
    trained = [tensor for tensor in tensors.values() if not tensor.is_buffer]
    for index, plain in enumerate(config.groups):
        at = f"optimizer.groups[{index}]"
        group = _typed(plain, at)
        matched = [tensor for tensor in trained if re.search(group.match, tensor.name)]
        if not matched:
            rule = "matches the name of no tensor"
            raise ConfigError(
                f"{at}.match", group.match, rule, f"a part of a name, such as {trained[1].name}"
            )
        used = {kind_of(config, tensor) for tensor in matched}
        if group.betas is not None and not any(KINDS[kind].has_betas for kind in used):
            rule = f"{min(used)} updates all these tensors, and has no betas"
            raise ConfigError(f"{at}.betas", group.betas, rule, "optimizer.momentum, or no betas")
        vectors = [tensor.name for tensor in matched if tensor.is_vector]
        if group.kind and KINDS[group.kind].others and vectors:
            rule = (
                f"{group.kind} updates matrices, and {group.match} matches the vector {vectors[0]}"
            )
            raise ConfigError(
                f"{at}.kind", group.kind, rule, "a pattern for matrices, such as 'w[1-3]'"
            )
        if config.state_dtype == "bfloat16" and max(group.betas or [0.0]) > LARGEST_BFLOAT16_BETA:
            works = f"at most {LARGEST_BFLOAT16_BETA}, or optimizer.state_dtype=float32"
            raise ConfigError(f"{at}.betas", group.betas, BETA_RULE, works)


def _typed(plain: dict[str, Any], at: str) -> OptimizerGroup:
    group: OptimizerGroup = from_dict(OptimizerGroup, plain, f"{at}.")
    check_rules(group, f"{at}.")
    try:
        re.compile(group.match)
    except re.error as error:
        rule = f"no regular expression: {error}"
        raise ConfigError(f"{at}.match", group.match, rule, f"{re.escape(group.match)!r}") from None
    if group.betas is not None and len(group.betas) != 2:
        raise ConfigError(f"{at}.betas", group.betas, "must be two numbers", "[0.9,0.95]")
    if all(value is None for name, value in plain.items() if name != "match"):
        works = f"{{match: {group.match}, weight_decay: 0}}"
        raise ConfigError(at, plain, "changes nothing", works)
    return group
