"""Mistakes on the command line: each gives one line with field, value, rule and what would work."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from processes import python

from harness.compose.composer import compose_job
from harness.compose.paths import using_folders
from harness.tools.parity.parity import ParityJob
from harness.tools.plan.compare import job_against
from harness.tools.plan.config import PlanJob
from harness.util.errors import EXIT_USER, UserError

ROOT = Path(__file__).parents[1]


PP = "parallelism.pp=2 training.global_batch_size=8"


@dataclass(frozen=True)
class Mistake:
    """Overrides, the last of which is wrong.

    Attributes:
        typed: the overrides, separated by spaces.
        start: start of the message.
        works: overrides that work in place of the last one; the message must contain their values.
    """

    typed: str
    start: str
    works: tuple[str, ...] = ()


def read_mistakes(text: str) -> list[Mistake]:
    """Read ``mistakes.txt``, whose head describes it."""
    found: list[Mistake] = []
    for line in text.splitlines():
        rule = re.fullmatch(r"(.*?) +(:|=>) (.*)", line)
        if not line or line.startswith("#"):
            continue
        if line.startswith("    works: "):
            works = line.removeprefix("    works: ").split(" | ")
            found[-1] = replace(found[-1], works=(*found[-1].works, *works))
        elif rule:
            typed = rule[1] or found.pop().typed
            start = rule[3] if rule[2] == "=>" else f"{typed.split(' ')[-1]}: {rule[3]}"
            found.append(Mistake(typed, start))
        else:
            found.append(Mistake(line, ""))
    return found


MISTAKES = read_mistakes((ROOT / "tests" / "mistakes.txt").read_text())


pytestmark = pytest.mark.usefixtures("alone")


def message(overrides: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        compose_job(overrides)
    assert caught.value.exit_code == EXIT_USER
    return str(caught.value)


def test_a_job_with_parts_of_its_own() -> None:
    """Errors about a verb's own fields have the same form."""
    for typed, start in (
        ("parity.steps=few", "parity.steps=few: must be an integer"),
        ("parity.step=3", "parity.step=3: no such field; did you mean parity.steps?"),
    ):
        with pytest.raises(UserError, match=f"^{re.escape(start)}$"):
            compose_job([typed], config_name="parity", schema=ParityJob)
    done = python("-m", "harness", "parity", "parity.steps=few")
    assert (done.returncode, done.stderr) == (EXIT_USER, "error: parity.steps=few: must be an integer\n")


@pytest.mark.parametrize(
    ("against", "start"),
    [
        ("parallelism.tp=3", "against: parallelism.tp=3: must divide model.n_heads=16, "),
        ("parallelism.tpp=2", "against: parallelism.tpp=2: no such field; did you mean parallelism.tp?"),
        ("tp", "against: tp: not an override; would work: field=value"),
        ("parallelism.tp=1", "against=parallelism.tp=1: does not change the job; would work: "),
        ("", "against='': does not change the job; would work: "),
        ("name='a", "against=name='a: cannot be read: No closing quotation; would work: "),
        ("search=true", "against=search=true: compares plans, and search asks for more; would work: "),
    ],
)
def test_a_job_to_compare_with(against: str, start: str) -> None:
    typed = [f"against={against}"]
    job = compose_job(typed, config_name="plan", schema=PlanJob)
    with pytest.raises(UserError, match=f"^{re.escape(start)}") as caught:
        job_against(job, typed)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("top=0", "top=0: must be at least 1"),
        ("search=true rehearse=true", "rehearse=true: cannot be .*; would work: search=false"),
        ("sweep_file=a.yaml", "sweep_file=a.yaml: is used by a search only; would work: search=true"),
        ("headroom=0.1", "headroom=0.1: is used by a search only; would work: search=true"),
        ("search=true sweep_file=a.txt", "sweep_file=a.txt: must end in .yaml; .*: plan.yaml"),
        ("picture=plan.pdf", "picture=plan.pdf: must end in .png; would work: plan.png"),
        ("picture=nowhere/plan.png", "picture=nowhere/plan.png: there is no folder nowhere; .*"),
        ("calibrate=r search=true", "calibrate=r: .* plans no job; .*: calibrate alone, then search without"),
        ("calibrate=r calibration=nowhere/c.json", "calibration=nowhere/c.json: there is no folder .*"),
        *(
            (f"against=seed=2 {other}=true", f"against=seed=2: compares the .*: against without {other}")
            for other in ("search", "rehearse")
        ),
        ("against=seed=2 picture=a.png", "against=seed=2: compares the .*: against without picture"),
    ],
)
def test_options_of_a_plan(typed: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}$"):
        compose_job(typed.split(), config_name="plan", schema=PlanJob)


def test_degrees_that_split_neither_heads_nor_sequence_are_not_named() -> None:
    assert message(["training.seq_len=100", "parallelism.tp=3"]).endswith("would work: 1, 2, 4")
    plain = message(["training.seq_len=100", "parallelism.sequence_parallel=false", "parallelism.tp=3"])
    assert plain.endswith("would work: 1, 2, 4, 8, 16")


def contains_value(error: str, value: str) -> bool:
    """Whether a message contains this value, not only as a part of another one."""
    return re.search(rf"(?<![\w.-]){re.escape(value)}(?![\w.]\w)", error) is not None


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.typed)
def test_each_mistake_is_one_line(mistake: Mistake) -> None:
    *right, wrong = mistake.typed.split(" ")
    error = message([*right, wrong])
    assert error.startswith(mistake.start)
    assert "\n" not in error
    for instead in mistake.works:
        compose_job([*right, *instead.split(" ")])
        new = [
            override.split("=") for override in instead.split(" ") if override not in mistake.typed.split()
        ]
        assert any(contains_value(error, value) or f"{field} set" in error for field, value in new), instead


def schedule_file(folder: Path, rows: str) -> str:
    path = folder / "schedule.csv"
    path.write_text(rows)
    return f"parallelism.pp_schedule_csv={path}"


GOOD_ROWS = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize(
    ("rows", "rule"),
    [
        (GOOD_ROWS + "2F0,2B0,2F1,2B1\n", "has 3 rows; needs one per pipeline rank, parallelism.pp=2"),
        ("0F0,0B0\n1F0,1X0\n", "cell '1X0' is not <stage><F|B|I|W><microbatch>, like 0F0"),
        ("0F0,0B0\n1F,1B0\n", "cell '1F' is not <stage><F|B|I|W><microbatch>, like 0F0"),
        ("0F0,0B0\n1F0,1SEND_B0,1B0\n", "cell '1SEND_B0' is not <stage>"),
        ("0F0,0B0\n2F0,2B0\n", "stages [0, 2] are not 0, 1, 2, ... each on one rank"),
        ("0F0,0B0\n0F1,0B1\n", "stages [0, 0] are not 0, 1, 2, ... each on one rank"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0\n", "every stage needs one F of each of the microbatches 0 to 1"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0\n", "every stage and microbatch needs one B, or one I and one W"),
        ("0F0,0B0\n1F0,1I0\n", "every stage and microbatch needs one B, or one I and one W"),
        ("0F0,0B0,0W0\n1F0,1B0\n", "every stage and microbatch needs one B, or one I and one W"),
        ("0F0,0B0\n1F0,1W0,1I0\n", "every stage and microbatch needs one B, or one I and one W after it"),
        ("0F0,0F0,0B0\n1F0,1B0\n", "every stage needs one F of each of the microbatches 0 to 0"),
        ("0F0,0B0,0B0\n1F0,1B0\n", "every stage and microbatch needs one B, or one I and one W"),
        ("0F0,1B0\n1F0,0B0\n", "stages [0, 0, 1, 1] are not 0, 1, 2, ... each on one rank"),
        (
            "0F0,0B0\n1B0,1F0\n",
            "the ranks wait for each other, or for themselves, for ever: 0B0 for 1B0, 1B0 for 1F0;",
        ),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
            "the ranks wait for each other, or for themselves, for ever: 0B0 for 1B0, 1F1 for 0F1;",
        ),
    ],
)
def test_csv_schedule_malformed(rows: str, rule: str, tmp_path: Path) -> None:
    typed = schedule_file(tmp_path, rows)
    error = message(["parallelism.pp=2", "training.global_batch_size=2", typed])
    assert error.startswith(f"{typed}: {rule}")
    assert "\n" not in error


def test_csv_schedule_missing() -> None:
    error = message([*PP.split(), "parallelism.pp_schedule_csv=nowhere.csv"])
    assert error == "parallelism.pp_schedule_csv=nowhere.csv: no such file"


def test_csv_schedule_of_another_batch(tmp_path: Path) -> None:
    typed = schedule_file(tmp_path, GOOD_ROWS)
    path = typed.split("=")[1]
    base = ["parallelism.pp=2", typed, "training.global_batch_size=4"]
    error = message(base)
    assert error == (
        "training.local_batch_size=4: with parallelism.pp_microbatch_size=1 "
        "the number of microbatches is 4, but "
        f"{path} runs 2 microbatches; would work: 2, or parallelism.pp_microbatch_size=2, "
        "or 2 with training.global_batch_size=2"
    )
    for works in ("training.local_batch_size=2", "parallelism.pp_microbatch_size=2"):
        compose_job([*base, works])
    compose_job([*base[:2], "training.global_batch_size=2", "training.local_batch_size=2"])


def test_csv_schedule_with_another_number_of_stages(tmp_path: Path) -> None:
    typed = schedule_file(tmp_path, GOOD_ROWS)
    three = "parallelism.pp_modules_per_stage=[[tok_embeddings],[layers.0],[norm,output]]"
    error = message(["parallelism.pp=2", "training.global_batch_size=2", "model.n_layers=1", three, typed])
    assert error == f"{typed}: runs 2 stages, but parallelism.pp_modules_per_stage makes 3"
    rows = ["".join(f"{stage}F0," for stage in stages) for stages in ((0, 2), (1, 3))]
    back = ["".join(f"{stage}B0," for stage in stages) for stages in ((2, 0), (3, 1))]
    typed = schedule_file(tmp_path, "\n".join(f + b for f, b in zip(rows, back, strict=True)))
    error = message(["parallelism.pp=2", "training.global_batch_size=1", "model.n_layers=1", typed])
    assert error == f"{typed}: runs 4 stages, but model.n_layers=1 makes at most 3"


@pytest.mark.parametrize(
    ("file", "text", "typed", "start"),
    [
        ("model/mine", "dimm: 3", "model=mine", "model.dimm: no such field; did you mean model.dim?"),
        ("model/mine", "dim: wide", "model=mine", "model.dim=wide: must be an integer (in model/mine.yaml)"),
        ("parallelism/mine", "tp: null", "parallelism=mine", "parallelism.tp=null: must be an integer (in "),
        (
            "model/mine",
            "name: mine\ndim: 64\nn_layers: 2\nn_heads: 4\nmax_seq_len: 64",
            "model=mine",
            "model.ffn_hidden_dim, model.n_kv_heads, model.vocab_size: must be given",
        ),
        ("model/mine", "dim: 64", "model=mine", "model.ffn_hidden_dim, model.max_seq_len, "),
        (
            "experiment/mine",
            "# @package _global_\ntraining:\n  stepz: 3",
            "experiment=mine",
            "training.stepz: no such field; did you mean training.steps? (in experiment/mine.yaml)",
        ),
        (
            "experiment/mine",
            "training:\n  steps: 3",
            "experiment=mine",
            "In 'experiment/mine': the file must begin with '# @package _global_'",
        ),
        (
            "experiment/mine",
            "# @package _global_\ndefaults:\n  - override /parallelism: fsdpp",
            "experiment=mine",
            "parallelism=fsdpp: no such option; options: cp, ddp, ",
        ),
        (
            "experiment/mine",
            "# @package _global_\ndefaults:\n  - /parallelism: fsdp",
            "experiment=mine",
            "parallelism: two files choose an option of this group; would work: '- override /parallelism: ",
        ),
    ],
)
def test_mistakes_in_files(file: str, text: str, typed: str, start: str, tmp_path: Path) -> None:
    written = tmp_path / f"{file}.yaml"
    written.parent.mkdir(exist_ok=True)
    written.write_text(text + "\n")
    with using_folders([tmp_path]):
        error = message([typed])
    assert error.startswith(start)
    assert "\n" not in error


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (
            ["model=llama3_8b", "parallelism.tp=3"],
            "parallelism.tp=3: must divide model.n_heads=32, model.n_kv_heads=8, "
            "model.ffn_hidden_dim=14336; would work: 1, 2, 4, 8",
        ),
        (["parallelism.tp=two"], "parallelism.tp=two: must be an integer"),
        (["+parallelism.tpp=2"], "parallelism.tpp=2: no such field; did you mean parallelism.tp?"),
    ],
)
def test_command_line_fails_fast(typed: list[str], expected: str, tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = python("-m", "harness.train", *typed, f"runs_dir={tmp_path}/runs")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == EXIT_USER
    assert done.stderr == f"error: {expected}\n"
    assert done.stdout == ""
    assert not (tmp_path / "runs").exists()
    # CPU time, because other tests may use the cores.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_composing_and_refusing_import_no_torch() -> None:
    code = (
        "import sys, harness.config.job\n"
        "from harness.compose.composer import compose_job\n"
        "compose_job(['parallelism=fsdp_tp_pp', 'training.global_batch_size=8'])\n"
        "try: compose_job(['parallelism.tp=3'])\n"
        "except Exception as error: assert 'must divide' in str(error)\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
