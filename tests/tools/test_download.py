"""Files are downloaded intact and once, despite interruptions; refusals of the hub are one-line errors."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from stand_in_hub import Hub, commit_of, serving
from tiers import rest_is_thorough

from harness.compose.composer import compose_job
from harness.config.job import Job
from harness.tools.convert import ConvertJob
from harness.tools.download import DownloadJob, choose, download, next_commands
from harness.util.errors import (
    EXIT_INTERRUPTED,
    EXIT_MACHINE,
    EXIT_OK,
    EXIT_USER,
    ConfigError,
    HarnessError,
    MachineError,
    UserError,
)
from harness.weights import hub as client
from harness.weights.config_json import hf_config
from harness.weights.hub import RemoteFile, Repository

ROOT = Path(__file__).resolve().parents[2]
REPO = "meta-llama/Llama-3.1-8B"
MIB = 1 << 20
# config.json of Llama 3.1 8B.
CONFIG = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
FILES = {
    "README.md": b"# Llama",
    "config.json": json.dumps(CONFIG).encode(),
    "generation_config.json": b"{}",
    "tokenizer.json": b"{} ",
    "tokenizer_config.json": b'{"eos_token": "<|end_of_text|>"}',
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "model-00001-of-00002.safetensors": os.urandom(3 * MIB),
    "model-00002-of-00002.safetensors": os.urandom(2 * MIB),
    "consolidated.safetensors": os.urandom(MIB),
    "original/tokenizer.model": b"IQ== 0\n",
    "original/consolidated.00.pth": os.urandom(MIB),
}
WEIGHTS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
TOKENIZER = ["config.json", "original/tokenizer.model", "tokenizer.json", "tokenizer_config.json"]


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with serving() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """A public hub with one repository, which a new process finds through its environment."""
    server.repos = {REPO: {"main": dict(FILES)}}
    server.gated, server.members, server.tokens = set(), set(), set()
    server.sent, server.is_listed, server.mishap = [], True, lambda handler, content: False
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf_home"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    return server


@pytest.fixture
def here(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """The same for this process, whose client library has already read the environment."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf_home" / "token"))
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    return hub


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "harness", "download", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )


def run(*overrides: str) -> None:
    job = compose_job(overrides, config_name="download", schema=DownloadJob)
    assert download(job, list(overrides)) == EXIT_OK


def refused(kind: type[HarnessError], *overrides: str) -> str:
    with pytest.raises(kind) as caught:
        run(*overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def names(folder: Path) -> list[str]:
    """The downloaded files, without the records of the download."""
    found = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    return sorted(name for name in found if not name.startswith(".cache/") and name != "download.json")


def same(folder: Path, files: dict[str, bytes] = FILES) -> bool:
    return all((folder / name).read_bytes() == files[name] for name in names(folder))


def parts(folder: Path) -> list[Path]:
    return list((folder / ".cache").rglob("*.incomplete"))


# -- complete downloads ----


def test_the_command(hub: Hub, tmp_path: Path) -> None:
    done = command(f"repo={REPO}")
    folder = tmp_path / "assets/hf" / REPO
    assert (done.returncode, done.stderr) == (EXIT_OK, "")
    assert names(folder) == sorted(
        [*TOKENIZER, "generation_config.json", "model.safetensors.index.json", *WEIGHTS]
    )
    assert same(folder) and not parts(folder)
    output = done.stdout.splitlines()
    commit = commit_of(FILES)
    assert output[0] == f"{REPO} at {commit[:12]}: 8 files, 0.005 GB downloaded: assets/hf/{REPO}"
    assert json.loads((folder / "download.json").read_text())["commit"] == commit
    # The printed next commands work in the current folder.
    target = f"assets/hf/{REPO}-dcp/step-0"
    convert, train = "harness convert", "harness train"
    assert output[1:] == [
        f"next: {convert} model=llama3_8b convert.source=assets/hf/{REPO} convert.target={target}",
        f"next: {train} model=llama3_8b tokenizer=llama3 checkpoint.initial_load_path={target}",
    ]
    compose_job(shlex.split(output[1])[4:], config_name="convert", schema=ConvertJob).convert.validate()
    job = compose_job(shlex.split(output[2])[4:])
    assert job.tokenizer.file.read_bytes() == FILES["original/tokenizer.model"]


def test_existing_files_are_not_downloaded_again(
    here: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(f"repo={REPO}", "what=tokenizer", "to=out")
    assert sorted(here.sent) == TOKENIZER == names(tmp_path / "out")
    here.sent.clear()
    run(f"repo={REPO}", "what=[tokenizer,index]", "to=out")
    assert here.sent == ["model.safetensors.index.json"]
    assert "1 files, 0.000 GB downloaded, 4 already there: out" in capsys.readouterr().out
    # Also files from elsewhere, if the content is the same.
    (tmp_path / "out" / WEIGHTS[0]).write_bytes(FILES[WEIGHTS[0]])
    (tmp_path / "out" / "generation_config.json").write_bytes(FILES["generation_config.json"])
    here.sent.clear()
    run(f"repo={REPO}", "to=out")
    assert here.sent == [WEIGHTS[1]]
    assert same(tmp_path / "out")


def test_other_files_are_not_overwritten(here: Hub, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("mine")
    said = refused(UserError, f"repo={REPO}", "to=out")
    assert said.startswith(
        "out/config.json: already exists and differs from the hub's; would work: another folder"
    )
    assert here.sent == [] and (tmp_path / "out" / "config.json").read_text() == "mine"
    # Also a downloaded file that was changed since.
    run(f"repo={REPO}", "what=tokenizer", "to=other")
    (tmp_path / "other" / "tokenizer_config.json").write_text("{}")
    assert "other/tokenizer_config.json: already exists" in refused(UserError, f"repo={REPO}", "to=other")


def test_a_newer_commit_replaces_what_came_before(here: Hub, tmp_path: Path) -> None:
    run(f"repo={REPO}", "what=tokenizer", "to=out")
    newer = {**FILES, "tokenizer.json": b"newer"}
    here.repos[REPO] = {"main": newer, "old": FILES}
    here.sent.clear()
    run(f"repo={REPO}", "what=tokenizer", "to=out")
    assert here.sent == ["tokenizer.json"] and same(tmp_path / "out", newer)
    for revision in ("old", commit_of(newer)):
        run(f"repo={REPO}", "what=tokenizer", "to=out", f"revision={revision}")
        assert same(tmp_path / "out", FILES if revision == "old" else newer)


def test_a_folder_is_of_one_repository(here: Hub) -> None:
    here.repos["other/model"] = {"main": FILES}
    run(f"repo={REPO}", "what=config", "to=out")
    said = refused(ConfigError, "repo=other/model", "what=config", "to=out")
    assert said == f"to=out: holds files of {REPO}; would work: another folder"


# -- interrupted downloads ----


@pytest.mark.parametrize(
    "sent", rest_is_thorough([signal.SIGINT, signal.SIGTERM, signal.SIGKILL], signal.SIGTERM)
)
def test_an_interrupted_download_goes_on(sent: signal.Signals, hub: Hub, tmp_path: Path) -> None:
    """It ends at once, and the next command downloads the files that were not complete."""
    hub.repos = {REPO: {"main": FILES}}
    go_on = threading.Event()

    def stall(handler: Any, content: bytes) -> bool:
        if content != FILES[WEIGHTS[0]]:
            return False
        handler.wfile.write(content[: 2 * MIB])
        handler.wfile.flush()
        go_on.wait(60)
        return True

    hub.mishap = stall
    arguments = [sys.executable, "-m", "harness", "download", f"repo={REPO}", "what=weights", "to=out"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "out" / WEIGHTS[1]).exists() or WEIGHTS[0] not in hub.sent:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(sent)
    _, err = process.communicate(timeout=20)
    go_on.set()
    assert process.returncode == (-sent if sent == signal.SIGKILL else EXIT_INTERRUPTED), err
    assert err == "" and names(tmp_path / "out") == [WEIGHTS[1]]
    assert json.loads((tmp_path / "out/download.json").read_text())["repo"] == REPO
    [part] = parts(tmp_path / "out")

    hub.mishap = lambda handler, content: False
    hub.sent.clear()
    os.utime(part, (0, 0))
    done = command(f"repo={REPO}", "what=weights", "to=out")
    assert done.returncode == EXIT_OK, done.stderr
    assert hub.sent == [WEIGHTS[0]]
    assert same(tmp_path / "out") and not parts(tmp_path / "out")


def test_damage_is_noticed(here: Hub, tmp_path: Path) -> None:
    files = {"config.json": b"{}", "model.safetensors": os.urandom(2 * MIB)}
    here.repos = {REPO: {"main": files}}

    def other(handler: Any, content: bytes) -> bool:
        handler.wfile.write(bytes(len(content)))
        return True

    here.mishap = other
    said = refused(MachineError, f"repo={REPO}", "what=[config,weights]", "to=out")
    assert "the download does not have the hub's checksum" in said
    here.mishap = lambda handler, content: False
    run(f"repo={REPO}", "what=[config,weights]", "to=out")
    assert same(tmp_path / "out", files)


@pytest.mark.skipif(
    int(huggingface_hub.__version__.split(".")[0]) < 2, reason="older clients give up where newer ones retry"
)
def test_a_hub_that_fails_after_the_first_answer(
    here: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library then only warns, because there are other files in the folder."""
    here.is_listed = False
    said = refused(MachineError, f"repo={REPO}", "what=config", "to=out")
    assert said == f"{here.url} did not send config.json; the same command downloads the missing files"
    here.is_listed = True
    run(f"repo={REPO}", "what=config", "to=out")
    assert same(tmp_path / "out")


def test_a_disk_that_is_too_small(here: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 4 * MIB})())
    said = refused(MachineError, f"repo={REPO}", "to=out")
    assert said == "out: needs 0.005 GB, and the disk has 0.004 GB left"
    assert here.sent == []
    run(f"repo={REPO}", "what=tokenizer", "to=out")


def test_a_disk_that_fills_up(here: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.file_download.http_get", fail)
    said = refused(MachineError, f"repo={REPO}", "what=weights", "to=out")
    assert (
        "the disk is full, or a quota is; with more space the same command downloads the missing files"
        in said
    )


def test_a_place_that_cannot_be_written(here: Hub, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    below = refused(ConfigError, f"repo={REPO}", "to=file/below")
    assert below == "to=file/below: file is not a folder; would work: a folder"
    assert refused(ConfigError, f"repo={REPO}", "to=file") == "to=file: is a file; would work: a folder"


# -- refusals of the hub ----


def test_a_gated_repository(hub: Hub) -> None:
    hub.gated, hub.tokens, hub.members = {REPO}, {"hf_stranger"}, {"hf_member"}
    assert command(f"repo={REPO}", "what=config", "to=a", HF_TOKEN="hf_member").returncode == EXIT_OK
    done = command(f"repo={REPO}", "what=config")
    assert done.returncode == EXIT_USER
    assert done.stderr == (
        f"error: repo={REPO}: is gated, and there is no token; would work: "
        f"ask for access at {hub.url}/{REPO}, then set HF_TOKEN "
        f"to one of {hub.url}/settings/tokens, or hf auth login\n"
    )
    done = command(f"repo={REPO}", "what=config", HF_TOKEN="hf_stranger")
    assert done.returncode == EXIT_USER
    assert done.stderr == (
        f"error: repo={REPO}: is gated, and the account of your token (HF_TOKEN, or your login) "
        f"has no access; would work: ask for it at {hub.url}/{REPO} and wait for the answer\n"
    )


def test_a_token_that_the_hub_does_not_know(hub: Hub) -> None:
    done = command(f"repo={REPO}", "what=config", HF_TOKEN="hf_mistyped")
    assert done.returncode == EXIT_USER
    assert done.stderr.startswith("error: the hub rejects your token (HF_TOKEN, or your login): HTTP 401")
    assert done.stderr.count("\n") == 1


def test_missing_repositories_and_revisions(here: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    said = refused(ConfigError, "repo=nobody/nothing")
    assert said.startswith(
        "repo=nobody/nothing: no such repository, or a private one; would work: a name from "
    )
    assert "HF_TOKEN" in said
    said = refused(ConfigError, f"repo={REPO}", "revision=v9")
    assert said.startswith(f"revision=v9: {REPO} has no such branch, tag or commit; would work: one of ")
    here.tokens = {"hf_known"}
    monkeypatch.setenv("HF_TOKEN", "hf_known")
    assert "or a private one that your token may not read" in refused(ConfigError, "repo=nobody/nothing")


def test_no_network(hub: Hub) -> None:
    done = command(f"repo={REPO}", HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == EXIT_MACHINE
    assert done.stderr.startswith("error: no complete answer from http://127.0.0.1:9: ")
    assert done.stderr.count("\n") == 1
    done = command(f"repo={REPO}", HF_HUB_OFFLINE="1")
    assert done.returncode == EXIT_USER
    assert done.stderr.startswith(
        "error: HF_HUB_OFFLINE=1 forbids access to the hub; would work: HF_HUB_OFFLINE=0"
    )


# -- selection of files ----


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([], "repo=null: must be given; would work: Qwen/Qwen3-8B"),
        (["repo=a/b", "what=tokens"], "what=tokens: no such files; would work: one or a list of tokenizer, "),
        (
            ["repo=a/b", "what=[config,weight]"],
            "what=[config,weight]: no such files; would work: one or a list",
        ),
        (["repo=a/b", "what=[]"], "what=[]: no such files"),
        (["repo=https://huggingface.co/a/b/tree/main"], "not a valid name; would work: a/b"),
        (["repo=a/b/c"], "repo=a/b/c: not a valid name; would work: owner/name"),
        (["repo=a/b", "revision=''"], "revision='': must be given; would work: main"),
        (["repos=a/b"], "repos=a/b: no such field; did you mean repo?"),
        (["repo=a/b", "model=llama3_8b"], "model=llama3_8b: no such field; "),
    ],
)
def test_mistakes(overrides: list[str], says: str) -> None:
    assert says in refused(UserError, *overrides)


def of_files(*listed: str) -> Repository:
    return Repository("a/b", "0" * 40, tuple(RemoteFile(name, 1, "0") for name in listed))


def chosen(what: Any, *listed: str) -> list[str]:
    return [file.name for file in choose(DownloadJob("a/b", what), of_files(*listed))]


def test_weights_are_transformers_or_the_only_ones_there_are() -> None:
    assert chosen("weights", "model.safetensors", "adapter.safetensors") == ["model.safetensors"]
    assert chosen("weights", "part.safetensors", "sub/model.safetensors") == ["part.safetensors"]
    metas = ["consolidated.00.pth", "consolidated.01.pth"]
    assert chosen(["weights", "config"], *metas, "params.json") == ["params.json", *metas]
    assert chosen(["index", "weights"], "model.safetensors") == ["model.safetensors"]


def test_kinds_that_a_repository_does_not_have() -> None:
    with pytest.raises(
        UserError, match=r"^what=tokenizer: a/b has no such files; would work: what=\[config\]$"
    ):
        chosen(["tokenizer", "config"], "config.json")
    with pytest.raises(UserError, match=r"^what=index: .*would work: a repository with safetensors$"):
        chosen("index", "README.md")


def test_next_commands_of_families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The family's tokenizer is chosen, which defines the end of a document."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "assets/hf/Qwen/Qwen3-0.6B"
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text("{}")
    job = DownloadJob("Qwen/Qwen3-0.6B", "tokenizer")
    path = "assets/hf/Qwen/Qwen3-0.6B/tokenizer.json"
    kind = f"next: harness train tokenizer.kind=huggingface tokenizer.path={path}"
    assert next_commands(job) == [kind]
    for family in ("qwen3", "qwen3_moe"):
        (folder / "config.json").write_text(json.dumps({"model_type": family}))
        assert next_commands(job) == [f"next: harness train tokenizer=qwen3 tokenizer.path={path}"]
    (folder.parent / "Qwen3-8B").mkdir()
    (folder.parent / "Qwen3-8B/tokenizer.json").write_text("{}")
    [command_line] = next_commands(DownloadJob("Qwen/Qwen3-8B", "tokenizer"))
    assert command_line == "next: harness train tokenizer=qwen3"
    assert isinstance(compose_job(shlex.split(command_line)[4:]), Job)
    told_all = next_commands(DownloadJob("Qwen/Qwen3-0.6B", ["weights"]))
    assert "model=NAME" in told_all[0] and told_all[-1].startswith("note: no option of conf/model")


# -- next commands ----


def test_from_an_empty_folder_to_training(hub: Hub, tmp_path: Path) -> None:
    """The three commands of the README, with a model created here."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    model = ["model=llama3_tiny", "model.vocab_size=320", "model.n_layers=1"]
    sizes = hf_config(compose_job(model).model, dtype="float32", bos_id=None, eos_id=None)
    published = tmp_path / "published"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(published)
    learnt = tokenizers.ByteLevelBPETokenizer()
    learnt.train_from_iterator(
        [Path(__file__).read_text()], 319, special_tokens=["</s>"], show_progress=False
    )
    learnt.save(str(published / "tokenizer.json"))
    (published / "tokenizer_config.json").write_text('{"bos_token": null, "eos_token": "</s>"}')
    files = {file.name: file.read_bytes() for file in published.iterdir()}
    hub.repos = {"me/tiny": {"main": files}}

    done = command("repo=me/tiny", "what=[tokenizer,config,weights]")
    assert done.returncode == EXIT_OK, done.stderr
    lines = [line.removeprefix("next: ") for line in done.stdout.splitlines() if line.startswith("next: ")]
    (tmp_path / "text.txt").write_text(Path(__file__).read_text())
    short = ["data=local_text", "data.paths=[text.txt]", f"data.cache_dir={tmp_path}/cache"]
    short += ["training.steps=4", "training.seq_len=32", "training.global_batch_size=2", "cluster.device=cpu"]
    for line, more in zip(lines, ([], short), strict=True):
        words = [sys.executable, "-m", *shlex.split(line)]
        assert "model=from_config" in words
        done = subprocess.run([*words, *more], capture_output=True, text=True, timeout=300)
        assert done.returncode == EXIT_OK, done.stderr + done.stdout
