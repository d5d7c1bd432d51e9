"""``harness doctor``: a machine without a GPU, a driver that is too old, and a node by srun."""

import json
import shlex

import pytest

from harness.compose.verb import guarded
from harness.tools import doctor
from harness.util.errors import EXIT_OK, EXIT_USER


def rows(capsys, *arguments):
    """The exit code, and by check: what was found, the verdict and the advice."""
    code = guarded(lambda: doctor.VERB.run_line([*arguments, "--json"]))
    checks = json.loads(capsys.readouterr().out)["checks"]
    return code, {row["what"]: (row["found"], row["verdict"], row["advice"]) for row in checks}


@pytest.fixture(autouse=True)
def _quick(alone, monkeypatch, tmp_path):
    monkeypatch.setattr("torch.compile", lambda function: function)
    monkeypatch.setattr(doctor, "PCI", tmp_path / "pci")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_a_machine_without_a_gpu_trains_on_the_cpu(capsys, monkeypatch):
    code, found = rows(capsys)
    assert code == EXIT_OK and len(found) == len(doctor.CHECKS)
    assert found["driver"][1:] == ("warn", "nothing, to train on the CPU")
    assert rows(capsys, "cluster.device=cpu")[1]["driver"][1] == "ok"
    # A compiler that does not work fails only for a job that compiles.
    monkeypatch.setattr("torch.compile", _fails)
    for job, verdict, expected in ((), "warn", EXIT_OK), (("compile=on",), "fail", EXIT_USER):
        code, found = rows(capsys, *job)
        assert (code, found["compiler"][:2]) == (expected, ("RuntimeError: no g++", verdict))


def _fails(_):
    raise RuntimeError("no g++")


def test_gpus_that_torch_cannot_use_fail(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    driver = tmp_path / "version"
    driver.write_text("NVRM version: 580.65.06")
    monkeypatch.setattr("harness.train.setup.DRIVER", driver)
    code, found = rows(capsys)
    assert code == EXIT_USER and "sees no CUDA device" in found["driver"][0]
    works = "cpu, or on a node with GPUs a build of torch for the CUDA that nvidia-smi shows"
    assert found["driver"][1:] == ("fail", works)
    # A card without any driver.
    driver.unlink()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (tmp_path / "pci" / "0").mkdir(parents=True)
    for name, text in (("vendor", "0x10de\n"), ("class", "0x030200\n")):
        (tmp_path / "pci" / "0" / name).write_text(text)
    code, found = rows(capsys)
    assert code == EXIT_USER and "1 GPUs without a driver" in found["driver"][0]


def test_a_node_is_asked_for_as_a_job_asks(capsys):
    """tests/slurm/test_nodes.py runs it."""
    node = ["cluster=slurm_h100", "cluster.setup=[echo loaded]", "cluster.partition=gpu"]
    assert guarded(lambda: doctor.VERB.run_line([*node, "cluster.dry_run=true"])) == EXIT_OK
    command = shlex.split(capsys.readouterr().out)
    assert {
        "--nodes=1",
        "--ntasks=1",
        "--cpus-per-task=96",
        "--gpus-per-node=8",
        "--partition=gpu",
    } <= {*command}
    assert "echo loaded" in command[-1].splitlines()
