"""Activation checkpointing of blocks: whole, every n-th, or all but chosen operations.

Only the inside of a block's forward is recomputed: what FSDP does around a block stays outside and is not
done again. The model has no dropout, so no random state has to be put back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from harness.model.decoder import Decoder
from harness.parallelism.block_config import ActivationCheckpointConfig, CompileConfig
from harness.parallelism.config import ParallelismConfig

# A choice made twice could be made differently; and what the host has waited for once, it need not again.
CHOICES = {"aten.topk.default", "harness.on_host.default"}
# Where experts are a group of FSDP's with hooks of its own, torch's annotations for profilers are operations
# inside a block, and recomputing it there are others: parameters have been gathered before.
SAC_IGNORED_OPS |= {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}
# Operations by name: some exist only once the module that registers them has been imported.
KEPT = {
    # Attention costs the most to recompute and its result is small.
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_fused_attention_overrideable.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "torch_attn._varlen_attn.default",
    "flex_attention",
    "harness.ring_attention.default",
    # Collectives whose results are no larger than what they take; an all-gather's is as many times larger as
    # there are ranks, so it is gathered again (arXiv:2205.05198, section 4.2.2).
    "_c10d_functional.reduce_scatter_tensor.default",
    "_c10d_functional.all_reduce.default",
    "_c10d_functional.all_to_all_single.default",
    *CHOICES,
    # Float8's scales: a scalar that took a pass over the whole tensor (torchtitan keeps it too).
    "aten.max.default",
}
MATMULS = {
    *("aten.mm.default", "aten.addmm.default", "aten._scaled_mm.default"),
    *("aten._grouped_mm.default", "aten._scaled_grouped_mm.default", "harness.grouped_product.default"),
}


def apply_activation_checkpoint(
    part: Decoder, config: ActivationCheckpointConfig, *, splits_backward: bool = False
) -> None:
    """Makes the blocks of a model part recompute their activations in backward, in place.

    Args:
        part: the model part.
        config: what is recomputed.
        splits_backward: whether the pipeline takes gradients in two passes. Nothing can be kept for both, so
            experts are then chosen again, by the same operations on the same numbers.
    """
    if config.mode in ("none", "memory_budget"):
        return
    for layer, block in part.blocks.items():
        # By the layer's number in the whole model: the same blocks whatever the pipeline holds.
        if config.mode == "selective_layer" and layer % config.every_nth_layer:
            continue
        options: dict[str, Any] = {}
        if config.mode == "selective_op":
            options["context_fn"] = partial(_selective_contexts, KEPT, config.save_every_nth_matmul)
        elif block.moe is not None and not splits_backward:
            options["context_fn"] = partial(_selective_contexts, CHOICES, 0)
        block.forward = _recomputed(block.forward, options)  # type: ignore[method-assign]


def recomputes_outside(
    config: ActivationCheckpointConfig, compiler: CompileConfig, layout: ParallelismConfig
) -> bool:
    """Whether whole blocks are recomputed around the compiled code and not inside of it.

    Inside, recomputed DTensor operations need their mesh, which torch 2.13 counts among the tensors to save,
    and refuses: "expected all tensors_saved_with_vc_check to be Tensors" (runtime_wrappers.py).
    """
    return compiler.blocks and layout.tp > 1 and config.mode in ("full", "selective_layer")


def _recomputed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)

    return recomputed


def _selective_contexts(kept: set[str], every_nth_matmul: int) -> Any:
    seen: Counter[bool] = Counter()

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(operation)
        if name in MATMULS:
            seen[context.is_recompute] += 1
            keep = every_nth_matmul > 0 and seen[context.is_recompute] % every_nth_matmul == 0
        else:
            keep = name in kept
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
