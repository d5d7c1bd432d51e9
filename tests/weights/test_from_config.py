"""A model out of a config.json: the shipped ones come back, and no file ends in a traceback."""

import itertools
import json
from functools import partial

import pytest
from families_table import CASES, RELEASED_CONFIGS, shipped
from one_line import one_line

from harness.compose.composer import Composer, compose_job, compose_points
from harness.util.errors import ConfigError, UserError
from harness.weights.config_json import check_hf_config, hf_config, model_from_config, relevant

# What config.json does not say: how initial values are drawn, and speeds of training.
UNSAID = {"embedding_std", "moe.balance_coeff", "moe.force_balance", "mtp.loss_weight"}


def write(folder, content):
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


def meant(model):
    return {name: value for name, value in relevant(model) if name not in UNSAID}


@pytest.mark.parametrize("name", RELEASED_CONFIGS)
def test_released_files_give_the_shipped_model(name, tmp_path):
    check_hf_config(shipped(name), RELEASED_CONFIGS[name])
    assert meant(model_from_config(write(tmp_path, RELEASED_CONFIGS[name]))) == meant(shipped(name))


@pytest.mark.parametrize("name", CASES)
def test_what_we_write_comes_back(name, tmp_path):
    content = hf_config(CASES[name], "float32")
    assert meant(model_from_config(write(tmp_path, content))) == meant(CASES[name])


def test_a_job_holds_the_numbers_and_what_is_typed_wins(tmp_path):
    folder = tmp_path / "My Model"
    folder.mkdir()
    write(folder, RELEASED_CONFIGS["mistral_7b"])
    typed = ["model=from_config", f"model.path='{folder}'", "data=synthetic", "tokenizer=bytes"]
    job = compose_job([*typed, "training.seq_len=64"])
    assert (job.model.name, job.name, job.model.path) == ("My_Model", "My_Model", str(folder))
    assert meant(job.model) == meant(shipped("mistral_7b"))
    other = compose_job(
        [*typed, "model.n_layers=2", "model.attention.window=null", "training.seq_len=64"]
    )
    assert (other.model.n_layers, other.model.attention.window) == (2, None)
    # The path is a label: the same numbers are the same job.
    same = compose_job([*typed, "model.name=other", "training.seq_len=64"])
    assert same.numerics_id == job.numerics_id
    assert type(job).from_json(job.to_json()).model == job.model


@pytest.mark.parametrize("chosen", ["model=from_config", "model='from_config'"])
def test_points_of_a_sweep_have_each_their_own(tmp_path, chosen):
    paths = []
    for name in ("mistral_7b", "qwen3_8b"):
        (tmp_path / name).mkdir()
        paths.append(write(tmp_path / name, RELEASED_CONFIGS[name]))
    points = compose_points([chosen, f"model.path={','.join(paths)}", "training.seq_len=32"])
    assert [point.job.model.family for point in points] == ["mistral", "qwen3"]


def test_a_path_that_is_not_read_is_refused(tmp_path):
    composer = Composer()
    with one_line(ConfigError, r"^model\.path=.*read only together with model=from_config"):
        composer.job([f"model.path={tmp_path}"])
    with one_line(UserError, r"^model\.path: must be given with model=from_config"):
        composer.job(["model=from_config"])
    with one_line(UserError, r"config\.json: is missing"):
        composer.job(["model=from_config", f"model.path={tmp_path}"])


DEBUG = ("llama4_debug", "qwen3_moe_debug", "deepseek_v3_debug", "gpt_oss_debug")
WRONG = [
    None,
    "x",
    "",
    -1,
    0,
    1.5,
    10**30,
    True,
    [],
    [3, "a"],
    {},
    {"rope_type": 3},
    [[]],
]


@pytest.mark.parametrize("name", DEBUG)
def test_wrong_values_end_in_one_line(name, tmp_path):
    """Keys of an export with values of all types, three for each in turn: no reader ends in a traceback."""
    model = shipped(name)
    content = hf_config(model, "float32")
    values, refused = itertools.cycle(WRONG), 0
    for key in [*content, "quantization_config", "text_config", "no_rope_layer_interval"]:
        for value in itertools.islice(values, 3):
            broken = {**content, key: value}
            path = write(tmp_path, broken)
            for read in (partial(model_from_config, path), partial(check_hf_config, model, broken)):
                try:
                    read()
                except UserError as error:
                    refused += 1
                    assert "\n" not in str(error)
    assert refused > 50


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"rope_scaling": {"rope_type": ["linear"]}},
            "it has rope_type ['linear'] instead of text",
        ),
        ({"rms_norm_eps": 10**400}, f"it has rms_norm_eps {10**400}: model.norm_eps="),
        ({"rope_scaling": {"rope_type": "linear"}}, "it has no factor"),
        (
            {"num_attention_heads": 0},
            "it has no head_dim, and fields of its default are missing or invalid",
        ),
        ({"quantization_config": {"bits": 4}}, "config.json has quantization_config: quant_method"),
    ],
    ids=lambda part: "" if isinstance(part, str) else next(iter(part)),
)
def test_what_cannot_be_taken_is_named(change, says, tmp_path):
    with pytest.raises(UserError) as refused:
        model_from_config(write(tmp_path, {**RELEASED_CONFIGS["mistral_7b"], **change}))
    assert str(refused.value).startswith(f"{tmp_path}/config.json: {says}")


def test_files_of_other_kinds(tmp_path):
    """A device has no end, and a byte order mark is no content."""
    with one_line(UserError, "/dev/null: is not a regular file"):
        model_from_config("/dev/null")
    (tmp_path / "config.json").write_text(
        json.dumps(RELEASED_CONFIGS["qwen3_8b"]), encoding="utf-8-sig"
    )
    assert model_from_config(str(tmp_path)).family == "qwen3"
