"""Own configurations: composed as Hydra itself composes them, in its order, and one line for each mistake."""

import re
import sys

import pytest
from one_line import one_line

from harness.compose.composer import compose_job, compose_points
from harness.compose.hydra import search_path, shadowed
from harness.compose.overrides import groups, options_of
from harness.compose.paths import conf_dir, config_folders
from harness.compose.verb import Verb
from harness.config.job import Job
from harness.util.errors import UserError

TEXTS = {
    "model/mine": "defaults: [llama3_tiny, _self_]\nname: mine\nn_layers: 3\n",
    "model/deep": "defaults: [mine, _self_]\nn_layers: 5\n",
    "model/llama3_8b": "defaults: [llama3_tiny, _self_]\nname: not_used\n",
    "sweep/seeds": "# @package _global_\nhydra:\n  sweeper:\n    params:\n      training.seed: 5,6\n",
    "ablation/a": "# @package _global_\ntraining:\n  seed: 77\n",
    "ablation/b": "# @package optimizer\nlr: 0.25\n",
    "own_train": "defaults: [train, ablation: null, _self_, override model: deep]\ntraining:\n  steps: 9\n",
}
VALID = ["data=synthetic", "tokenizer=none"]


def written(folder, texts):
    for name, text in texts.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    return written(tmp_path_factory.mktemp("own"), TEXTS)


def test_own_primary_config_with_its_own_group(own):
    typed = [f"hydra.searchpath=[{own}]", *VALID]
    job = compose_job([*typed, "ablation=a"], config_name="own_train")
    assert (job.model.n_layers, job.training.steps, job.training.seed) == (5, 9, 77)
    assert (
        compose_job([*typed, "ablation=b", "model=mine"], config_name="own_train").optimizer.lr
        == 0.25
    )
    points = compose_points([*typed, "sweep=seeds"], config_name="own_train")
    assert [point.job.training.seed for point in points] == [5, 6]


def test_the_first_folder_with_a_name_is_used(own, tmp_path):
    """conf/ comes first, then --config-dir, then the search path, in its order."""
    other = written(tmp_path, {"model/mine": "defaults: [llama3_tiny, _self_]\nn_layers: 7\n"})
    for path, flags, layers in (
        (f"{other},{own}", [], 7),
        (f"{own},{other}", [], 3),
        (other, [str(own)], 3),
    ):
        with search_path(
            [f"hydra.searchpath=[{path}]", "model=mine"], "train", folders=flags
        ) as typed:
            assert compose_job([*typed, *VALID]).model.n_layers == layers


def test_a_primary_config_names_its_search_path(own, tmp_path, monkeypatch):
    text = "defaults: [train, _self_, override model: mine]\nhydra: {searchpath: ['file://${oc.env:OWN}']}\n"
    folder = written(tmp_path, {"from_primary": text})
    monkeypatch.setenv("OWN", str(own))
    with search_path([], "from_primary", folders=[str(folder)]) as typed:
        assert config_folders().added == (folder, own)
        assert compose_job([*typed, *VALID], config_name="from_primary").model.n_layers == 3
    # The command line wins, as in Hydra.
    with (
        search_path(["hydra.searchpath=[]"], "from_primary", folders=[str(folder)]) as typed,
        one_line(UserError, r"^model=mine.*: no such option; options: "),
    ):
        compose_job([*typed, *VALID], config_name="from_primary")


def test_folder_of_a_package_that_is_not_imported(tmp_path, monkeypatch):
    package = tmp_path / "my_models_package"
    written(package / "conf", TEXTS)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    typed = ["hydra.searchpath=[pkg://my_models_package.conf]", "model=mine", *VALID]
    with search_path(typed, "train") as recorded:
        assert recorded == typed  # the same on another machine
    assert compose_job(typed).model.n_layers == 3


@pytest.mark.parametrize("name", ["a b", "it's", "ü,[x]", "back\\slash", "a=b:c"])
def test_recorded_search_paths_are_read_again(name, tmp_path, monkeypatch):
    folder = written(tmp_path / name, TEXTS)
    monkeypatch.chdir(tmp_path)
    with search_path(["model=mine"], "train", folders=[name]) as recorded:
        pass
    monkeypatch.chdir("/")
    with search_path(recorded, "train") as again:
        assert config_folders().added == (folder,) and again == recorded
    [point] = compose_points([*recorded, *VALID])
    assert point.job.model.n_layers == 3 and point.overrides[0] == recorded[0]


def test_options_are_listed_and_checked(own):
    setting = f"hydra.searchpath=[{own}]"
    with search_path([setting], "train"):
        assert {"mine", "deep", "llama3_tiny"} <= set(options_of("model"))
        assert options_of("ablation") == ["a", "b"]
    assert "ablation" not in groups() and "mine" not in options_of("model")
    for typed, message in (
        ("model=mime", r"^model=mime: no such option; did you mean mine\?"),
        ("ablation=c", "^ablation=c: no such option; options: a, b"),
        ("ablatoin=a", r"^ablatoin=a: no such field; did you mean ablation\?"),
        (
            "ablation=a",
            r"^Could not override 'ablation'\. .* use \+ablation=a",
        ),
        (
            "+model=mine",
            "^model: two files choose an option of it; would work: .*override /model: ",
        ),
    ):
        with one_line(UserError, message):
            compose_job([setting, typed, *VALID])
    points = compose_points([setting, "model=glob(m*,exclude=[mis*,mix*])", *VALID])
    assert [point.job.model.name for point in points] == ["mine"]


def test_a_search_path_in_an_experiment_is_refused_as_hydra_does(tmp_path):
    written(
        tmp_path, {"experiment/late": "# @package _global_\nhydra:\n  searchpath: [file://x]\n"}
    )
    with one_line(UserError, "searchpath is only supported from the primary config"):
        compose_job([f"hydra.searchpath=[{tmp_path}]", "experiment=late"])


def test_files_that_are_not_used_are_named(own):
    with search_path([f"hydra.searchpath=[{own}]"], "train"):
        first = f"{conf_dir()}/model/llama3_8b.yaml has the same name and comes first"
        assert shadowed() == [f"{own}/model/llama3_8b.yaml: not used, {first}"]
    with search_path([f"hydra.searchpath=[{conf_dir()}]"], "train"):
        assert shadowed() == []


def ran(arguments, monkeypatch):
    """Run a verb in this process; return its job and overrides, or its points."""
    found = []
    monkeypatch.setattr(sys, "argv", ["harness", *arguments])
    with pytest.raises(SystemExit) as ended:
        Verb(
            "train",
            lambda *of: found.extend(of) or 0,
            job=Job,
            sweep=lambda of: found.extend(of) or 0,
        ).main()
    assert ended.value.code == 0
    return found


def test_the_command_line(own, monkeypatch, capsys):
    flags = ["-cd", str(own), "-cn", "own_train", *VALID]
    job, overrides = ran(flags, monkeypatch)
    assert job.model.n_layers == 5
    assert overrides[0] == f"hydra.searchpath=[file://{own}]"
    assert capsys.readouterr().err.count("WARNING") == 1
    points = ran(["-m", *flags, "ablation=a", "model=deep,mine"], monkeypatch)
    assert [(each.job.training.seed, each.job.model.n_layers) for each in points] == [
        (77, 5),
        (77, 3),
    ]
    assert ran([*flags, "--help", "all"], monkeypatch) == []
    out = capsys.readouterr().out
    assert "\n  ablation               a, b\n" in out and "\nmodel.n_layers=5 " in out
    assert config_folders().added == ()


def test_info_shows_the_folders_and_the_files_of_the_job(own, monkeypatch, capsys):
    assert ran(["--info", "-cd", str(own), "model=deep", "+ablation=a"], monkeypatch) == []
    folders, files = capsys.readouterr().out.split("files of the job, of which later ones win\n")
    assert folders.splitlines()[1:3] == [f"  {conf_dir()}", f"  {own}"]
    first, tiny, mine, deep, *_, last = files.split()
    assert (first, tiny) == (f"{conf_dir()}/train.yaml", f"{conf_dir()}/model/llama3_tiny.yaml")
    assert (mine, deep) == (f"{own}/model/mine.yaml", f"{own}/model/deep.yaml")
    assert last == f"{own}/ablation/a.yaml"


def test_a_variable_adds_folders_to_every_command(own, tmp_path, monkeypatch, capsys):
    other = written(tmp_path, {"model/mine": "defaults: [llama3_tiny, _self_]\nn_layers: 7\n"})
    monkeypatch.setenv("HARNESS_CONF", f"{other}:{own}")
    job, overrides = ran(["model=mine", *VALID], monkeypatch)
    assert job.model.n_layers == 7
    assert overrides[0] == f"hydra.searchpath=[file://{other},file://{own}]"
    # Typed folders come before it.
    job, overrides = ran(["-cd", str(own), "model=mine", *VALID], monkeypatch)
    assert job.model.n_layers == 3
    assert overrides[0] == f"hydra.searchpath=[file://{own},file://{other}]"
    assert len(ran(["-m", "model=mine,deep", *VALID], monkeypatch)) == 2
    monkeypatch.setenv("HARNESS_CONF", f"{other}/nope")
    with pytest.raises(SystemExit):
        Verb("train", print, job=Job).main()
    shown = capsys.readouterr().err.splitlines()[-1]
    assert shown.startswith(f"error: HARNESS_CONF={other}/nope: no such folder; would work: ")


@pytest.mark.parametrize(
    ("name", "content", "typed", "error"),
    [
        (
            "experiment",
            "training:\n  steps: ???",
            "",
            "training.steps: must be given, on the command line",
        ),
        ("experiment", "training:\n  steps: ???", "training.steps=7", ""),
        (
            "experiment",
            "checkpoint: {enable: false, interval: 10}",
            "",
            "checkpoint.interval=10: has no effect with checkpoint.enable=false (in experiment/mine.yaml); "
            "would work: checkpoint.enable=true checkpoint.interval=10, or leave it out",
        ),
        ("experiment", "checkpoint: {interval: 10}", "checkpoint=disabled", ""),
        ("experiment", "compile: {components: [blocks]}", "", ""),  # for the points that compile
        (
            "experiment",
            "parallelism: {cp: 2, cp_method: ulysses}",
            "parallelism=tp parallelism.cp=1",
            "",
        ),
        (
            "cluster",
            "time: 24:00:00",
            "",
            "cluster.time=86400: 86400 minutes; without quotes YAML reads 24:00:00 as this number (in "
            'cluster/mine.yaml); would work: "24:00:00", or 1440',
        ),
        ("cluster", 'time: "24:00:00"', "", ""),
    ],
)
def test_a_value_of_a_file_has_the_effect_that_it_says(name, content, typed, error, tmp_path):
    head = "# @package _global_\n" if name == "experiment" else ""
    written(tmp_path, {f"{name}/mine": f"{head}{content}\n"})
    overrides = [f"hydra.searchpath=[{tmp_path}]", *VALID, f"{name}=mine", *typed.split()]
    if not error:
        compose_job(overrides)
        return
    with one_line(UserError, rf"^{re.escape(error)}"):
        compose_job(overrides)
