"""The table of accelerators: only full names match, and peaks are dense."""

import pytest
from cases import rows

from harness.util.hardware import ACCELERATORS, find_accelerator

KNOWN = rows("""
    NVIDIA A100-SXM4-40GB     A100 SXM 40GB  312     40
    NVIDIA A100-SXM4-80GB     A100 SXM 80GB  312     80
    A100-SXM4-40GB            A100 SXM 40GB  312     40
    NVIDIA H100 80GB HBM3     H100 SXM       989.4   80
    NVIDIA H100 PCIe          H100 PCIe      756     80
    NVIDIA H200               H200 SXM       989.4   141
    NVIDIA H200 NVL           H200 NVL       835.5   141
    NVIDIA B200               B200           2250    180
    NVIDIA GB200              GB200          2500    186
    AMD Instinct MI300X       MI300X         1307.4  192
    NVIDIA L40S               L40S           362.05  48
    NVIDIA GH200 480GB        GH200          989.4   96
    NVIDIA GH200 144G HBM3e   GH200 144GB    989.4   144
    NVIDIA B300 SXM6 AC       B300           2250    270
    NVIDIA GB300              GB300          2500    279
    AMD Instinct MI355X       MI355X         2516.6  288
    NVIDIA GeForce RTX 4090   RTX 4090       165.2   24
    NVIDIA RTX A6000          A6000          154.8   48
    NVIDIA L4                 L4             121     24
""")

UNKNOWN = """
cpu
Intel(R) Xeon(R) Platinum 8480C
NVIDIA A10G
NVIDIA A800-SXM4-80GB
NVIDIA H20
NVIDIA H800
NVIDIA L40
NVIDIA RTX 6000 Ada Generation
NVIDIA H100 80GB HBM3 MIG 1g.10gb
GRID A100-40C
AMD Instinct MI300A
"""


@pytest.mark.parametrize(("device_name", "name", "tflops", "gib"), KNOWN)
def test_known_device(device_name, name, tflops, gib):
    found = find_accelerator(device_name)
    assert found is not None
    assert (found.name, found.memory_gib) == (name, gib)
    assert found.peak_flops["bfloat16"] == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize("device_name", UNKNOWN.split("\n"))
def test_unknown_device_is_not_guessed(device_name):
    assert find_accelerator(device_name) is None


@pytest.mark.parametrize("accelerator", ACCELERATORS.values(), ids=lambda a: a.name)
def test_peaks_are_consistent(accelerator):
    peaks = accelerator.peak_flops
    # On every device of the table the rate doubles from tf32 to half and from half to float8. A value copied
    # "with sparsity" would break that. The datasheets round by up to 3 %.
    assert peaks["bfloat16"] == peaks["float16"]
    assert "tf32" not in peaks or peaks["bfloat16"] == pytest.approx(2 * peaks["tf32"], rel=0.03)
    if "float8" in peaks:
        assert peaks["float8"] == pytest.approx(2 * peaks["bfloat16"], rel=0.03)
    assert peaks["float32"] <= peaks.get("tf32", peaks["bfloat16"])
    assert 0.2e12 < accelerator.memory_bandwidth < 10e12
    assert accelerator.source
