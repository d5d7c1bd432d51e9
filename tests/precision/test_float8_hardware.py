"""A job whose hardware does not support its format is refused, before it starts if the hardware is known."""

from __future__ import annotations

import pytest
import torch

from harness.compose.composer import compose_job
from harness.config.job import Job
from harness.config.precision import PrecisionConfig
from harness.precision.linears import require_device
from harness.util.errors import ConfigError

SLURM = ["cluster=slurm", "cluster.ranks_per_node=8"]


def compose(*overrides: str) -> Job:
    return compose_job(list(overrides))


pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["precision=float8_rowwise"], "a CPU does not multiply in float8; would work: H100"),
        (["precision=mxfp8", "cluster.device=cpu"], "a CPU does not multiply in mxfp8; would work: B200"),
        (["precision=mxfp8", "cluster=slurm_h100"], "H100 SXM does not multiply in mxfp8"),
        (
            ["precision=float8_tensorwise", *SLURM, "cluster.accelerator=A100 SXM 80GB"],
            "A100 SXM 80GB does not multiply in float8",
        ),
        (
            ["precision=float8_tensorwise", *SLURM, "cluster.gpu_type=A100"],
            "cluster.gpu_type=A100 does not multiply in float8",
        ),
    ],
)
def test_refused(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=r"^precision\.linear=") as refused:
        compose(*overrides)
    assert says in str(refused.value)
    assert "precision.emulate=true" in str(refused.value)
    compose(*overrides, "precision.emulate=true")


@pytest.mark.parametrize(
    "overrides",
    [
        ["precision=float8_rowwise", "cluster=slurm_h100"],
        ["precision=mxfp8", *SLURM, "cluster.accelerator=B200"],
        ["precision=float8_rowwise_hp", *SLURM, "cluster.gpu_type=h200"],
        # Unknown hardware: ranks check it.
        ["precision=mxfp8", *SLURM],
        ["precision=mxfp8", *SLURM, "cluster.gpu_type=large"],
    ],
)
def test_accepted(overrides: list[str]) -> None:
    compose(*overrides)


def test_an_unknown_gpu_of_this_machine_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    compose("precision=mxfp8")


def some_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None) -> torch.device:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    return torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("linear", "capability", "hip", "able"),
    [
        ("float8_rowwise", (8, 0), None, False),
        ("float8_rowwise", (8, 9), None, True),
        ("float8_tensorwise", (9, 0), None, True),
        ("mxfp8", (9, 0), None, False),
        ("mxfp8", (10, 0), None, True),
        ("float8_rowwise", (9, 0), "6.2", False),
        ("float8_rowwise", (9, 4), "6.2", True),
        ("mxfp8", (9, 4), "6.2", False),
        ("none", (7, 0), None, True),
    ],
)
def test_a_rank_checks_its_device(
    linear: str, capability: tuple[int, int], hip: str | None, able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = some_gpu(monkeypatch, capability, hip)
    if able:
        require_device(PrecisionConfig(linear=linear), device, experts=False)
    else:
        with pytest.raises(ConfigError, match="Some GPU does not multiply in"):
            require_device(PrecisionConfig(linear=linear), device, experts=False)
        require_device(PrecisionConfig(linear=linear, emulate=True), device, experts=True)


def test_a_rank_on_a_cpu_refuses_in_the_same_words() -> None:
    with pytest.raises(ConfigError, match="a CPU does not multiply in float8"):
        require_device(PrecisionConfig(linear="float8_rowwise"), torch.device("cpu"), experts=False)


MIXTURE = ["model=qwen3_moe_debug", "model.dim=128", "model.moe.hidden_dim=128", "precision=float8_rowwise"]


def test_hardware_without_grouped_products_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="L40S does not multiply groups of rows in float8, as exp"
    ) as refused:
        compose(*MIXTURE, *SLURM, "cluster.accelerator=L40S")
    works = refused.value.works.split(", or ")
    assert "L40S" not in works[0] and "H100" in works[0]
    assert works[1] == "precision.filter_fqns=[output,moe.experts]"
    for instead in ("cluster.accelerator=H100 SXM", works[1], "precision.emulate=true", "precision=bf16"):
        compose(*MIXTURE, *SLURM, "cluster.accelerator=L40S", instead)


@pytest.mark.parametrize(
    ("linear", "capability", "hip", "able"),
    [
        ("float8_rowwise", (8, 9), None, False),
        ("float8_rowwise", (9, 0), None, True),
        ("float8_rowwise", (10, 3), None, True),
        ("float8_rowwise", (12, 0), None, False),
        ("float8_rowwise", (9, 4), "6.2", True),
        ("mxfp8", (10, 0), None, True),
        ("mxfp8", (12, 0), None, False),
    ],
)
def test_a_rank_checks_its_device_for_experts(
    linear: str, capability: tuple[int, int], hip: str | None, able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = some_gpu(monkeypatch, capability, hip)
    require_device(PrecisionConfig(linear=linear), device, experts=False)
    if able:
        require_device(PrecisionConfig(linear=linear), device, experts=True)
    else:
        with pytest.raises(ConfigError, match="Some GPU does not multiply groups of rows in"):
            require_device(PrecisionConfig(linear=linear), device, experts=True)


def test_mfu_of_float8_is_against_the_bfloat16_peak_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.train.trainer import device_peak

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    device = torch.device("cuda", 0)
    plain = device_peak(compose("precision=bf16"), device)
    float8 = device_peak(compose("precision=float8_rowwise", "precision.emulate=true"), device)
    assert float8.flops == plain.flops == 989.4e12
    assert "measured against the bfloat16 peak" in float8.origin
    assert "measured against" not in plain.origin
