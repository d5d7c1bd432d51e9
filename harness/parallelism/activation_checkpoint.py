"""Activation checkpointing: of every block, of every n-th block, or selective by operation.

Only the inside of a block's forward is recomputed. FSDP's hooks are outside and run once. The model
has no dropout, so no random state is restored.
"""

from collections import Counter, deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from harness.config.parallelism import ParallelismConfig
from harness.config.training import ActivationCheckpointConfig, CompileConfig
from harness.model.part import ModelPart

# Always saved. topk: recomputed routing could choose other experts. sort: many kernels for few
# bytes, the order of rows. on_host: the host would wait again for values that it already has.
ALWAYS_SAVED = {"aten.topk.default", "aten.sort.stable", "harness.on_host.default"}
# Where experts are an FSDP group with its own hooks, torch's profiler annotations are operations
# inside a block. Recomputation records different ones, because parameters are already gathered
# then.
SAC_IGNORED_OPS |= {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}
# Operations by name: some exist only once the module that registers them has been imported.
SAVED = {
    # Attention costs the most to recompute and its result is small.
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_fused_attention_overrideable.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "torch_attn._varlen_attn.default",
    "flex_attention",
    "harness.ring_attention.default",
    # Collectives whose outputs are no larger than their inputs. An all-gather's output is larger by
    # the number of ranks, so it is repeated (arXiv:2205.05198, section 4.2.2).
    "_c10d_functional.reduce_scatter_tensor.default",
    "_c10d_functional.all_reduce.default",
    "_c10d_functional.all_to_all_single.default",
    *ALWAYS_SAVED,
    # Float8 scales: a scalar computed by a pass over the full tensor (torchtitan saves it too).
    "aten.max.default",
}
MATMULS = {
    "aten.mm.default",
    "aten.addmm.default",
    "aten._scaled_mm.default",
    "aten._grouped_mm.default",
    "aten._scaled_grouped_mm.default",
    "harness.grouped_product.default",
}


def apply_activation_checkpoint(
    part: ModelPart,
    config: ActivationCheckpointConfig,
    *,
    splits_backward: bool = False,
    in_pieces: bool = False,
) -> None:
    """Make the blocks of a model part recompute their activations in backward, in place.

    Args:
        splits_backward: whether the pipeline takes gradients in two passes. The first one
            recomputes, and the tensors are kept for the second.
        in_pieces: whether blocks with experts are compiled in pieces. Operations are saved by the
            compiler in the first half, and one by one between the pieces of the second.
    """
    if config.mode in ("none", "memory_budget"):
        return
    for layer, block in part.blocks.items():
        # By the layer's number in the full model: the same blocks for any pipeline split.
        if not config.covers(layer):
            continue
        options: dict[str, Any] = {}
        parts = ["forward"]
        if config.mode == "selective_op":
            parts = ["attend", "feed"] if in_pieces and block.moe is not None else parts
            options["context_fn"] = partial(
                _selective_contexts, SAVED, config.save_every_nth_matmul
            )
        elif block.moe is not None:
            options["context_fn"] = partial(_selective_contexts, ALWAYS_SAVED, 0)
        for name in parts:
            setattr(block, name, _checkpointed(getattr(block, name), splits_backward, options))


def wraps_compiled_blocks(
    config: ActivationCheckpointConfig, compiler: CompileConfig, layout: ParallelismConfig
) -> bool:
    """Whether checkpointing wraps the compiled block instead of being compiled with it.

    Inside the graph, recomputed DTensor operations need their mesh. torch 2.13 counts the mesh
    among the tensors to save and fails: "expected all tensors_saved_with_vc_check to be Tensors"
    (runtime_wrappers.py).
    """
    has_meshes = layout.tp > 1 or layout.fixes_messages
    return compiler.blocks and has_meshes and config.mode in ("full", "selective_layer")


def _checkpointed(
    forward: Callable[..., Any], splits_backward: bool, options: dict[str, Any]
) -> Any:
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        # The compiler knows torch's function, and recomputes inside of a graph.
        if splits_backward and not torch.compiler.is_compiling():
            contexts = options["context_fn"]() if options else (nullcontext(), nullcontext())
            return _recomputed_once(partial(forward, *args, **kwargs), *contexts)
        return checkpoint(
            forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs
        )

    return checkpointed


class _Saved:
    """The place of a saved tensor in the autograd graph, empty until the tensor has been recomputed."""

    tensor: Tensor | None = None


class _AllRecomputed(Exception):
    """Ends a recomputation: what follows the last saved tensor is not needed."""


def _recomputed_once(forward: Callable[[], Any], saving: Any, recomputing: Any) -> Any:
    """Call ``forward``; recompute it when backward reads the first of its tensors, and keep all of them.

    torch's ``checkpoint`` recomputes again for every call of autograd, which a split backward pass
    makes for the inputs and then for each group of weights.

    Args:
        saving: context manager of the call.
        recomputing: context manager of the recomputation.
    """
    places: list[ref[_Saved]] = []

    def pack(_tensor: Tensor) -> _Saved:
        place = _Saved()
        places.append(ref(place))
        return place

    def unpack(place: _Saved) -> Any:
        if place.tensor is None:
            waiting = deque(places)

            def keep(tensor: Tensor) -> None:
                # Operations save the same tensors again, in the same order.
                found = waiting.popleft()()
                if found is not None:
                    found.tensor = tensor.detach()
                if not waiting:
                    raise _AllRecomputed

            hooks = saved_tensors_hooks(keep, lambda nothing: nothing)
            with suppress(_AllRecomputed), recomputing, torch.enable_grad(), hooks:
                forward()
        return place.tensor

    with saving, saved_tensors_hooks(pack, unpack):
        return forward()


def _selective_contexts(saved: set[str], every_nth_matmul: int) -> Any:
    seen: Counter[bool] = Counter()

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(operation)
        if name in MATMULS:
            seen[context.is_recompute] += 1
            save = every_nth_matmul > 0 and seen[context.is_recompute] % every_nth_matmul == 0
        else:
            save = name in saved
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
