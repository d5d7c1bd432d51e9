"""What is composed is what Hydra itself composes: options, experiments, own folders, points and axes."""

import dataclasses
from pathlib import Path
from typing import Any, get_origin

import hydra
import pytest
from cases import rows, texts, words
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, ListConfig, OmegaConf
from test_search_path import written

import harness.compose.hydra
from harness.compose.composer import Composer, compose_job, compose_points
from harness.compose.hydra import search_path
from harness.compose.overrides import groups, options_of
from harness.compose.paths import config_folders
from harness.config.job import Job
from harness.tools.parity.parity import ParityJob
from harness.util.errors import UserError

FILES = {
    "model/mine": "defaults: [llama3_tiny, _self_]\nname: mine\nn_layers: 3\n",
    "model/deep": "defaults: [mine, _self_]\nn_layers: 5\n",
    "experiment/own": "# @package _global_\ndefaults:\n  - override /model: mine\ntraining:\n  steps: 3\n",
    "experiment/sub/below": "# @package _global_\ndefaults: [/experiment/own, _self_]\nname: below\n",
    "ablation/a": "# @package _global_\ntraining:\n  seed: 77\n",
    "ablation/b": "# @package optimizer\nlr: 1\n",
    "data/synth": "defaults: [synthetic]\n",
    "own_train": "defaults: [train, ablation: null, _self_, override model: deep]\ntraining:\n  steps: 9\n",
}
SCHEMAS = {"train": Job, "parity": ParityJob, "own_train": Job}


def typed_node(schema):
    """A dataclass as OmegaConf types it, but not inside of mappings of dataclasses and lists of mappings."""

    def unlock(node):
        node._set_flag("readonly", None)
        if dataclasses.is_dataclass(node._metadata.element_type):
            node._metadata.element_type, node._metadata.ref_type = Any, dict[str, Any]
        for name in node:
            child = node._get_node(name)
            if isinstance(child, DictConfig):
                unlock(child)
            elif isinstance(child, ListConfig) and get_origin(child._metadata.element_type) is dict:
                child._metadata.element_type, child._metadata.ref_type = Any, list[Any]
        return node

    return unlock(OmegaConf.structured(schema))


def by_hydra(primary, typed):
    """What Hydra's own command line would compose, with the folders in use."""
    ConfigStore.instance().store(name="job_schema", node=typed_node(SCHEMAS[primary]))
    folders = [str(path) for path in config_folders().paths]
    [main] = [folder for folder in folders if (Path(folder) / f"{primary}.yaml").is_file()]
    rest = ",".join(folder for folder in folders if folder != main)
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(main, version_base="1.3"):
        return OmegaConf.to_container(
            hydra.compose(primary, [f"hydra.searchpath=[{rest}]", *typed])
        )


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    return written(tmp_path_factory.mktemp("own"), FILES)


@pytest.mark.parametrize(
    ("primary", "typed"),
    texts("""
        train      model=deep precision=bf16 parallelism=tp optimizer.lr=1 training.steps='7' name=3
        train      experiment=own metrics.console=off
        parity     experiment=own data=synth model.n_layers=7
        train      experiment=sub/below model=deep
        train      experiment=[own,sub/below] model={n_layers:9}
        train      +ablation=a model=mine ++cluster.env={A:1,B:x} ++optimizer.options.x=[1,{a:2}]
        train      +ablation=b optimizer=adamw data=mixture +data@data.sources.web=local_text
        own_train  ablation=b ++data.sources.web={weight:3} schedule=cosine data.paths=[1,b]
        train      experiment=quickstart parallelism.tp=${model.n_heads} name=a-${training.seed}
    """),
)
def test_files_and_values(primary, typed, own):
    with search_path([], primary, folders=[str(own)]):
        composed = Composer(primary, SCHEMAS[primary]).config(typed.split())
        again = Composer(primary, SCHEMAS[primary]).config(typed.split())
        assert repr(composed) == repr(again) == repr(by_hydra(primary, typed.split()))


@pytest.mark.parametrize("primary", ["train", "parity"])
@pytest.mark.parametrize("rest", [[], ["experiment=quickstart"]])
def test_options_of_all_groups_together(primary, rest):
    """Option n of every group."""
    chosen = {
        group: options_of(group) for group in groups() if group not in ("experiment", "sweep")
    }
    composer = Composer(primary, SCHEMAS[primary])
    for number in range(2):
        options = [(group, names[number % len(names)]) for group, names in chosen.items()]
        typed = [
            f"{group}='{name}'" if name == "nan" else f"{group}={name}" for group, name in options
        ]
        assert repr(composer.config([*rest, *typed])) == repr(by_hydra(primary, [*rest, *typed])), (
            typed
        )


def test_points_are_what_composing_each_of_them_gives():
    typed = ["model=llama3_8b,llama3_tiny", "parallelism={tp:2},{pp:3}", "+user.a=x"]
    # Set groups by option and by value, with experiments that set fields of other groups.
    mixed = words("""
        precision=bf16,fp32 cluster=slurm_h100,local experiment=quickstart compile=on
    """)
    twice = ["data=python_stdlib", "data=synthetic", "training.seed=1,2"]
    points = [*compose_points(typed), *compose_points(twice), *compose_points(mixed)]
    assert len(points) == 10 and any(point.job is not None for point in points)
    harness.compose.hydra.hydra_of.cache_clear()
    for point in points:
        alone = Composer().point_of_sweep(point.overrides)
        assert (alone.job, alone.reason) == (point.job, point.reason)
    assert [point.job.data.kind for point in points[4:6]] == ["synthetic"] * 2


def test_a_value_has_an_effect_in_some_point_of_a_sweep():
    """So an option of one layout may be typed for a sweep over layouts."""
    points = compose_points(["parallelism=single,cp", "parallelism.cp_method=ulysses"])
    assert [point.job.parallelism.cp for point in points] == [1, 2]
    for unused in ("parallelism.cp_method=ulysses", "cluster.partition=gpu"):
        points = compose_points(["parallelism=single,tp", unused])
        assert all(point.reason.startswith(f"{unused}: has no effect with ") for point in points)


@pytest.mark.parametrize(
    "text", ["12.10", "12e4567", "1e-4", "1_000", "+5", "true", "NaN", "a:1.10"]
)
def test_a_text_is_what_was_typed(text):
    typed = [
        f"name={text}",
        f"tags=[{text}, {text}]",
        "cluster=slurm",
        f"cluster.env={{A: {text},B:x,C:{text}}}",
    ]
    made = compose_job(typed)
    assert (made.name, made.tags) == (text, [text, text])
    assert made.cluster.env == {"A": text, "B": "x", "C": text}
    assert [point.job.name for point in compose_points([f"name={text},{text}b"])] == [
        text,
        f"{text}b",
    ]


@pytest.mark.parametrize(
    ("value", "tags"),
    [
        ("[ä, b]", [["ä", "b"]]),
        ("[true,'x,1.50']", [["true", "x,1.50"]]),
        ("[1.50],[ ü b ,1]", [["1.50"], ["ü b", "1"]]),
        ("choice([1.0],[nan])", [["1.0"], ["nan"]]),
    ],
)
def test_elements_of_lists_are_what_was_typed(value, tags):
    points = compose_points([f"tags={value}"])
    assert [point.job.tags for point in points] == tags


def test_a_changed_file_is_composed_again(tmp_path):
    typed = [f"hydra.searchpath=[{tmp_path}]", "experiment=own", "model=llama3_tiny"]
    for seed in (1, 23):
        written(tmp_path, {"experiment/own": f"# @package _global_\ntraining:\n  seed: {seed}\n"})
        assert compose_job(typed).training.seed == seed


COMMON = words("model=llama3_tiny data=synthetic tokenizer=none cluster.device=cpu")


@pytest.mark.parametrize(
    ("axis", "seeds"),
    # https://hydra.cc/docs/advanced/override_grammar/extended
    rows("""
        range(1,4)                      [1, 2, 3]
        range(3)                        [0, 1, 2]
        range(5,1,-2)                   [5, 3]
        choice(3,1)                     [3, 1]
        sort(3,1,2)                     [1, 2, 3]
        sort(range(1,4),reverse=true)   [3, 2, 1]
        tag(a,b,choice(2,1))            [2, 1]
        int(choice(1.0,2.0))            [1, 2]
    """),
)
def test_functions_of_numbers(axis, seeds):
    assert seeds_of(f"training.seed={axis}") == seeds


def seeds_of(axis):
    return [point.job.training.seed for point in compose_points([*COMMON, axis])]


def test_functions_of_options_and_order():
    jobs = [
        each.job for each in compose_points([*COMMON, "precision=glob([bf16*,fp32],exclude=*full)"])
    ]
    assert [each.precision.param_dtype for each in jobs] == ["bfloat16", "float32"]
    assert {each.precision.master_dtype for each in jobs} == {"float32"}
    assert sorted(seeds_of("training.seed=shuffle(range(1,9))")) == list(range(1, 9))


@pytest.mark.parametrize("params", ["3", "[1]", "{points: 3}", "{points: null}"])
def test_no_axes_in_a_file(params, tmp_path):
    written(
        tmp_path, {"sweep/own": f"# @package _global_\nhydra: {{sweeper: {{params: {params}}}}}\n"}
    )
    with pytest.raises(
        UserError, match=r"^hydra\.sweeper\.params=.*: must be a mapping of axes, and points"
    ):
        compose_points([f"hydra.searchpath=[{tmp_path}]", "sweep=own", *COMMON])
