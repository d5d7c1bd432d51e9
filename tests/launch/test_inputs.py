"""A job's input files are checked before it is submitted."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
from cases import rows
from one_line import one_line

from harness.compose.composer import compose_job
from harness.data import documents
from harness.data.cache import open_documents
from harness.data.tokenizer import build_tokenizer
from harness.launch import inputs
from harness.launch.inputs import require_inputs, require_tokenized
from harness.util.errors import ConfigError


@pytest.fixture(autouse=True)
def as_if_shared(tmp_path, monkeypatch):
    """Treat pytest's temporary folders as shared."""
    monkeypatch.setattr(inputs, "_NODE_LOCAL", ("/local",))
    monkeypatch.setattr(inputs.tempfile, "gettempdir", lambda: "/local")
    inputs._matches_any.cache_clear()


def require(*typed):
    require_inputs(
        compose_job(["model=llama3_tiny", "cluster=slurm", "cluster.device=cpu", *typed])
    )


MIXTURE = (
    "data=mixture",
    "data.sources.a.kind=synthetic",
    "data.weights={a: 1, b: 1}",
    "tokenizer=bytes",
)
LOCAL = ("data=local_text", "tokenizer=bytes", "data.validation_fraction=0")
SETS = ("data=synthetic", "tokenizer=bytes", "validation.interval=1")


@pytest.mark.parametrize(
    ("typed", "says"),
    # What is here, or cannot be seen from here, is not missing.
    rows("""
        LOCAL data.paths=[{here}/nope.txt]                                  data.paths=.*no file matches
        LOCAL data.paths=[{here}/nope/**/*.txt]                             data.paths=.*no file matches
        LOCAL data.paths=[{here}/a.txt] data.validation_paths=[{here}/b]    data.validation_paths=
        MIXTURE data.sources.b={kind:tokens,paths:[{here}/nope]}            data.sources.b.paths=.*no file
        SETS validation.sets.a.paths=[{here}/nope]                          validation.sets.a.paths=.*no file
        tokenizer.kind=huggingface tokenizer.path={here}/nope.json          tokenizer.path=.*no such file
        checkpoint.initial_load_path={here}/nope                            checkpoint.init.*no such folder
        LOCAL data.paths=[{here}/nope.txt,{here}/a.*]                       ''
        data=tokens tokenizer=bytes data.paths=[{here}/prefix]              ''
        LOCAL data.paths=[/not/here/either/*.txt]                           ''
        LOCAL data.paths=[/local/data/*.txt]                                ''
        tokenizer.kind=huggingface tokenizer.path=/not/here/tokenizer.json  ''
        tokenizer=bytes checkpoint.initial_load_path=s3://bucket/step-5     ''
        tokenizer=bytes checkpoint.initial_load_path={here}                 ''
    """),
)
def test_what_is_missing(tmp_path, capsys, typed, says):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "prefix.idx").touch()
    common = {"LOCAL": LOCAL, "MIXTURE": MIXTURE, "SETS": SETS}
    words = [word for each in typed.split(" ") for word in common.get(each, [each])]
    with one_line(ConfigError, says) if says else nullcontext():
        require(*(each.replace("{here}", str(tmp_path)) for each in words))
    is_unseen = "=/" in typed or "[/" in typed
    assert ("NOTE not checked, because nodes may see" in capsys.readouterr().err) == is_unseen


def test_a_run_on_this_machine_sees_all_paths(tmp_path):
    for path in ("/not/here/either/*.txt", "/local/data/*.txt", f"{tmp_path}/*.txt"):
        with one_line(ConfigError, "no file matches"):
            require_inputs(compose_job([*LOCAL, "model=llama3_tiny", f"data.paths=[{path}]"]))
    with one_line(ConfigError, "would work: harness download repo=a/b what=tokenizer, or "):
        require_inputs(
            compose_job(["tokenizer=qwen3", "tokenizer.path=assets/hf/a/b/tokenizer.json"])
        )


def test_a_job_that_must_tokenize_too_much_is_refused_with_the_command(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "some text of a document"}\n' * 9)
    typed = [
        *("model=llama3_tiny", "data=local_jsonl", f"data.paths=[{tmp_path}/a.jsonl]"),
        *("data.text_field=content", "tokenizer=bytes", f"data.cache_dir={tmp_path}/cache"),
    ]
    limit = "data.tokenize_limit_gib=1e-7"
    for where in ((), ("cluster=slurm", "cluster.device=cpu")):
        job = compose_job([*typed, limit, *where])
        with one_line(ConfigError, r"GiB that are not tokenized.*: harness tokenize with"):
            require_tokenized(job)
    require_tokenized(compose_job([*typed, "data.tokenize_limit_gib=null"]))
    with one_line(ConfigError, "tokenize_limit_gib"):  # a rank, under torchrun
        open_train(job)
    open_train(compose_job(typed))
    require_tokenized(job)  # the cache exists
    # A source is searched once for all points of a sweep.
    passed = set()
    with mock.patch.object(documents, "find_files", wraps=documents.find_files) as found:
        for more in ("training.seed=1", "training.seed=2", "data.validation_fraction=0.5"):
            require_tokenized(compose_job([*typed, more]), passed)
    assert found.call_count == 2


CHAT = "{kind: chat, paths: [{here}/a.jsonl], chat_template: plain}"
ALONE = ("data.attend_across_documents=false", "tokenizer=bytes")


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (
            (*MIXTURE, "data.sources.b={paths: [{here}/a.jsonl]}"),
            r"data\.sources\.b: data\.paths=.*: harness tokenize with .* then "
            r"data\.sources\.b\.kind=tokens 'data\.sources\.b\.paths=.*, or data\.tokenize_limit_gib=null",
        ),
        (
            (*SETS, "validation.sets.b={paths: [{here}/a.jsonl]}"),
            r"validation\.sets\.b: data\.paths=.*: harness tokenize with .* then "
            r"validation\.sets\.b\.kind=tokens 'validation\.sets\.b\.paths=.*, or data\.tokenize_limit",
        ),
        (
            ("data=mixture", f"data.sources.b={CHAT}", "data.weights.b=1", *ALONE),
            r"data\.sources\.b: data\.paths=.*would work: null",
        ),
        (
            (
                "data=chat",
                "data.paths=[{here}/a.jsonl]",
                "data.chat_template=plain",
                "tokenizer=bytes",
            ),
            "harness tokenize does not read conversations; would work: null",
        ),
    ],
)
def test_sources_that_must_be_tokenized(tmp_path, typed, says):
    (tmp_path / "a.jsonl").write_text('{"messages": []}\n')
    typed = tuple(each.replace("{here}", str(tmp_path)) for each in typed)
    size = ("data.tokenize_limit_gib=0", f"data.cache_dir={tmp_path}/cache")
    with one_line(ConfigError, f"^data.tokenize_limit_gib=0.*{says}"):
        require_tokenized(compose_job(["model=llama3_tiny", *typed, *size]))


def open_train(job):
    read = {"data": job.data, "tokenizer": build_tokenizer(job.tokenizer), "split": "train"}
    open_documents(SimpleNamespace(**read, wait_for_all=None, is_builder=True))
