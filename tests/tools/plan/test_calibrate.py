"""Fitting: the constants behind generated rows are recovered, and the defaults fit the published rows."""

import dataclasses
import functools
import json
import operator
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cases import rows, words

sys.path.insert(0, str(Path(__file__).parents[3] / "experiments" / "llama3_h100"))

import torchtitan_rows

from harness.compose.composer import compose_job
from harness.tools.plan.constants import Calibration, Constants
from harness.tools.plan.loads import measured_imbalance
from harness.tools.plan.make import START, Measured, fit, predicted_rate
from harness.tools.plan.verb import _calibrate
from harness.util.errors import UserError

SMALL = words("""
    cluster=slurm_h100 precision=bf16 training.seq_len=4096 model=llama3_8b data=synthetic
""")


def test_constants_behind_generated_rows_are_recovered():
    layouts = ([], ["compile=on"], ["compile=on", "precision=float8_tensorwise"])
    jobs = [compose_job([*SMALL, "parallelism.dp_shard=8", *layout]) for layout in layouts]
    truth = Calibration(replace(START, matmul=0.45, float8=0.6))
    rows = [Measured(job, predicted_rate(job, truth)) for job in jobs]
    found = fit(rows, Calibration(START)).constants
    assert found.matmul == pytest.approx(0.45, rel=0.02) and found.float8 == pytest.approx(
        0.6, rel=0.04
    )
    assert found.memory == START.memory


def test_a_calibration_is_a_file(tmp_path):
    path = str(tmp_path / "here.json")
    written = Calibration(replace(START, matmul=0.5), source="here")
    written.write(path)
    assert Calibration.read(path) == written
    Path(path).write_text('{"source": ""}')
    for name, says in (
        (path, "constants=null: must"),
        ("no", "No such file"),
        ("a" * 300, "long"),
    ):
        with pytest.raises(UserError, match=says):
            Calibration.read(name)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        *rows("""
            constants           {gpus: 3}            "constants.gpus=3: no such field; constants has: async"
            constants           [1]                  "constants=[1]: must be set by its fields, constants."
            constants.matmul    '0.5'                "constants.matmul=0.5: must be a number"
            constants.matmul    {a: {b: 1}}          "constants.matmul={a:{b:1}}: must be a number"
            constants.matmul    -0.5                 "constants.matmul=-0.5: must be above 0"
            constants.link      0                    "constants.link=0: must be above 0"
            constants.latency   inf                  "constants.latency=inf: must be a finite number"
            constants.launch    .nan                 "constants.launch=nan: must be a finite number"
            constants.async_tp  2                    "constants.async_tp=2: must be in [0, 1]"
            source              3                    "source=3: must be text"
            constants           {matmul: 0.5}        "lacks async_tp, "
            software            {speed: 0}           "software.speed=0: must be above 0"
            software            {attention: flash9}  "software.attention=flash9: no such choice"
        """),
        ("constants.matmul", 10**400, "constants.matmul=1000"),
    ],
    ids=lambda part: str(part)[:60],
)
def test_a_wrong_value_of_a_calibration_is_named(tmp_path, key, value, error):
    plain = dataclasses.asdict(Calibration(Constants(), source="here"))
    *parts, name = key.split(".")
    inner = functools.reduce(operator.getitem, parts, plain)
    inner[name] = value
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(plain))
    with pytest.raises(UserError) as refused:
        Calibration.read(str(path))
    assert str(refused.value).startswith(f"calibration={path}: {error}")
    assert str(refused.value).endswith(
        "would work: a file that harness plan calibrate=FOLDER wrote"
    )


def test_published_rows_are_predicted():
    """The bounds hold for all rows, and for the 13 rows that were not used for fitting."""
    errors, unseen = [], []
    for row, job in torchtitan_rows.jobs():
        rate = predicted_rate(job, Calibration(Constants(), software=row.software))
        errors.append(abs(rate / row.tokens_per_second_per_rank - 1))
        if row.table not in ("table1", "table5"):
            unseen.append(errors[-1])
    assert (len(errors), len(unseen)) == (18, 13)
    for amounts in (errors, unseen):
        assert statistics.median(amounts) <= 0.10 and max(amounts) <= 0.25


def test_loads_are_read_from_runs(tmp_path):
    """The mean of the layers over the last half of the rows that have them."""
    assert measured_imbalance(None) is None is measured_imbalance(str(tmp_path))
    row = {"moe.rank_load_max": 9, "moe.load_max.1": 9}
    rows = [
        row,
        *({**row, "moe.rank_load_max.1": load, "moe.rank_load_max.2": 1} for load in (7, 7, 2, 3)),
    ]
    for written, expected in ((rows[:1], None), (rows, 1.75)):
        (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, written)))
        assert measured_imbalance(str(tmp_path)) == expected


def test_loads_of_a_run_on_a_cpu_are_printed(tmp_path):
    model = ["data=synthetic", "tokenizer=bytes", "parallelism=ep", "model=qwen3_moe_debug"]
    job = compose_job([*model, f"runs_dir={tmp_path}"])
    job.run_dir.mkdir(parents=True)
    (job.run_dir / "job.json").write_text(job.to_json())
    found = _calibrate(job.run_dir, None, job.cluster)
    assert "no completed run" in str(found.error)
    assert found.text.startswith("expert_imbalance is unknown of ")
    assert ", parallelism.ep=2: no row has moe.rank_load_max.*" in found.text
    (job.run_dir / "metrics.jsonl").write_text('{"moe.rank_load_max.1": 1.25}')
    assert _calibrate(job.run_dir, None, job.cluster).text.startswith("expert_imbalance=1.25  of ")
