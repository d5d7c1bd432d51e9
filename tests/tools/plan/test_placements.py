"""What training builds on a rank of a fake process group, against the parameters and memory of the plan."""

from collections import Counter
from itertools import chain

import pytest
import torch
from cases import texts
from fake_world import fake_process_group
from torch.distributed.tensor import DTensor

from harness.compose.composer import compose_job
from harness.config.optimizer import KINDS
from harness.model.spec import parameter_shapes, tensors
from harness.optimizer.build import build_optimizer
from harness.optimizer.settings import exchanges, kind_of
from harness.parallelism.loss import TokenLoss
from harness.parallelism.materialize import allocate
from harness.parallelism.mesh import build_mesh, stage_group
from harness.parallelism.parallelize import build_on_meta
from harness.parallelism.pipeline import build_schedule
from harness.precision.swap import plain
from harness.tools.plan.memory import rank_memory
from harness.tools.plan.parameters import parameters_of

CPU = torch.device("cpu")
SMALL = (
    "data=synthetic",
    "tokenizer=bytes",
    "training.seq_len=64",
    "training.global_batch_size=24",
)


def check_rank(job, planned, names):
    """Compare what the first rank of a stage builds; tests/parallelism/test_all_sizes.py has the others."""
    held = parameters_of(job, planned.pp_rank)
    mesh = build_mesh(job.parallelism, CPU, has_experts=job.model.moe.enabled)
    parts = build_on_meta(job, mesh, CPU)
    named = [pair for part in parts for pair in part.named_parameters()]
    names.update(name for name, _ in named)
    by_name = {}
    for name, module in chain.from_iterable(stage.items() for stage in held.modules.values()):
        # Equal blocks share the module of the first.
        by_name |= {t.name.replace(module.name, name, 1): t for t in module.tensors}
    for name, parameter in named:
        tensor, local = by_name[name], parameter
        if isinstance(parameter, DTensor):
            local = parameter.to_local()
        built = (str(parameter.dtype), tuple(parameter.shape), tuple(local.shape))
        assert built == (
            f"torch.{job.precision.master_dtype}",
            tensor.spec.shape,
            tensor.sharded,
        ), name
    stages = planned.stages
    if job.parallelism.pp > 1:
        schedule = build_schedule(job, mesh, parts, TokenLoss(job.model.vocab_size, None), CPU)
        stages = tuple(
            each.stage_index for each in getattr(schedule, "_stages", None) or [schedule._stage]
        )
    assert stages == planned.stages
    buffers = sum(local_bytes(buffer) for part in parts for buffer in part.buffers())
    parameters = sum(local_bytes(parameter) for _, parameter in named)
    assert parameters == held.parameter_bytes <= planned.kinds["parameters"] <= parameters + buffers
    group = stage_group(mesh) if exchanges(job.optimizer, tensors(job.model).values()) else None
    check_state(job, parts, planned, group)


def check_state(job, parts, planned, group):
    """Let the optimizer create its state, from gradients as FSDP produces them."""
    for part in parts:
        allocate(part, CPU, CPU)
    named, specs = [pair for part in parts for pair in part.named_parameters()], tensors(job.model)
    optimizer = build_optimizer(job.optimizer, named, specs, group)
    for _, parameter in named:
        parameter.grad = torch.zeros_like(plain(parameter))
    optimizer.step()
    size, dtype = 0, getattr(torch, job.optimizer.state_dtype or "float32")
    for name, parameter in named:
        state = optimizer.state[parameter]
        size += sum(map(local_bytes, state.values()))
        for key in KINDS[kind_of(job.optimizer, specs[name])].state:
            assert (state[key].dtype, place(state[key])) == (dtype, place(parameter)), (name, key)
    assert size == planned.kinds["optimizer"]


def place(tensor):
    if not isinstance(tensor, DTensor):
        return tensor.shape
    return tensor.shape, tensor.placements, tensor.device_mesh, tensor.to_local().shape


def local_bytes(tensor):
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


@pytest.mark.parametrize(
    ("model", "degrees", "typed"),
    texts("""
        llama3_tiny        dp_shard=2 tp=2 pp=2  ""
        llama3_tiny        dp_shard=3 cp=2 dp_replicate=1  model.vocab_size=257
        llama3_tiny        pp=2 dp_shard=2 pp_schedule=Interleaved1F1B  model.n_layers=6
        llama3_tiny        dp_replicate=2 dp_shard=2 tp=2  optimizer=muon
        llama3_tiny        dp_shard=2  optimizer.state_dtype=bfloat16
        qwen3_moe_debug    dp_shard=2 tp=2 pp=2 ep=2 expert_tensor_parallel=true  ""
        deepseek_v3_debug  dp_shard=4 tp=2 ep=8  training.global_batch_size=32
        gpt_oss_debug      dp_shard=8 ep=2  precision=bf16_full
        llama3_debug       dp_shard=8  precision=float8_rowwise precision.emulate=true
        flux_debug         dp_shard=4  data=latents_synthetic training.seq_len=80 optimizer.ema_decay=0.9
    """),
)
def test_what_is_built_is_what_is_planned(model, degrees, typed):
    layout = [f"parallelism.{degree}" for degree in degrees.split()]
    job = compose_job([f"model={model}", *SMALL, *layout, *typed.split()])
    names = Counter[str]()
    for planned in rank_memory(job):
        in_stage = job.world_size // job.parallelism.pp
        with fake_process_group(planned.pp_rank * in_stage, job.world_size):
            check_rank(job, planned, names)
    assert names == Counter(parameter_shapes(job.model).keys()), "every parameter is in one stage"
