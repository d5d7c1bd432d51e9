"""A second witness: spmd_types follows which ranks have equal, partial or different values.

It refuses a gradient that lacks a sum before it is computed. It types plain tensors and the boundaries of
DTensors, not pipelines (of which it does not know the sends) and not what has no type.
"""

import re
from unittest.mock import patch

import planted
import pytest
from layouts import layout

pytest.importorskip("spmd_types")
pytestmark = pytest.mark.thorough


def typed_step(job_json):
    """Compute the gradients of one step; return what the checker of types says."""
    import spmd_types as spmd
    from spmd_types.checker import typecheck

    from harness.model.spec import Split
    from harness.parallelism.loss import TokenLoss
    from harness.parallelism.tensor_styles import PlainNorm
    from harness.tools.parity.first_wrong import start

    engine, loader = start(job_json)
    mesh, run, of_tokens = (
        engine.mesh.device_mesh,
        engine.executor.forward_backward,
        TokenLoss.__call__,
    )
    norm = PlainNorm.forward
    names = [name for name in mesh.mesh_dim_names or () if mesh[name].size() > 1]
    groups = {name: mesh.get_group(name) for name in names}

    def partial_loss(self, *arguments):
        """Ranks with other tokens have parts of the loss."""
        loss = of_tokens(self, *arguments)
        for group in groups.values():
            if spmd.maybe_get_axis_local_type(loss, group) is spmd.V:
                loss = spmd.reinterpret(loss, group, src=spmd.V, dst=spmd.P)
        return loss

    def typed_norm(self, x):
        """What comes from FSDP's hooks or a mixture has no type, and a product of it that of the weight."""
        if "tp" in groups and spmd.maybe_get_axis_local_type(x, groups["tp"]) is None:
            of_all = self.split is Split.WHOLE or (
                self.split is Split.NORM and self.stream.is_replicate()
            )
            spmd.assert_type(x, {groups["tp"]: spmd.R if of_all else spmd.V})
        return norm(self, x)

    def typed(batch, *, last):
        with spmd.set_current_mesh(mesh), typecheck(strict_mode="permissive"):
            for each in (batch.inputs_BT, batch.labels_BT):
                spmd.assert_type(
                    each, {g: spmd.R if n == "tp" else spmd.V for n, g in groups.items()}
                )
            return run(batch, last=last)

    with (
        patch.object(TokenLoss, "__call__", partial_loss),
        patch.object(PlainNorm, "forward", typed_norm),
        patch.object(engine.executor, "forward_backward", typed),
    ):
        try:
            engine.gradients(loader.next())
        except spmd.SpmdTypeError as error:
            return str(error)
    return ""


DENSE, EXPERTS, SINKS, LATENT = (
    "qwen3_debug",
    "qwen3_moe_debug",
    "gpt_oss_debug",
    "deepseek_v3_debug",
)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        *(
            (name, DENSE)
            for name in ("tp", "tp_no_sequence", "tp_no_loss_parallel", "fsdp_tp", "tp_cp", "cp")
        ),
        *(
            (name, EXPERTS)
            for name in ("tp", "tp_ep", "tp_experts", "fsdp_tp_ep_experts", "ep", "cp_ep")
        ),
        *((name, SINKS) for name in ("tp", "tp_experts")),
        *((name, LATENT) for name in ("tp", "tp_cp_ulysses", "fsdp_tp_ep")),
    ],
)
def test_layouts_are_well_typed(pool, name, model):
    job = layout(name, f"model={model}")
    assert set(pool.run(job.world_size, typed_step, job.to_json())) == {""}


@pytest.mark.parametrize(
    ("plant", "name", "model", "says"),
    [
        (planted.head_norms_not_summed, "tp", DENSE, "Invariant type .* cannot mix"),
        (planted.router_gradients_not_summed, "tp", EXPERTS, "Invariant type .* cannot mix"),
        (
            planted.gathered_logits_as_shards,
            "tp_no_loss_parallel",
            DENSE,
            "tensor has .*I, expected .*V",
        ),
    ],
)
def test_planted_errors_are_ill_typed(pool, plant, name, model, says):
    job = layout(name, f"model={model}")
    for error in planted.PlantedPool(pool, plant).run(job.world_size, typed_step, job.to_json()):
        assert re.search(says, error)
