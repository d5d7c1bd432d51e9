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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from processes import PATIENCE, python, until
from stand_in_hub import Hub, commit_of, serving

from harness.compose.composer import compose_job
from harness.compose.verb import guarded
from harness.tools.convert import ConvertJob
from harness.tools.download import VERB, DownloadJob, choose, download, next_commands
from harness.util.errors import EXIT_INTERRUPTED, EXIT_MACHINE, EXIT_OK, EXIT_USER, MachineError, UserError
from harness.weights import hub as client
from harness.weights.config_json import hf_config
from harness.weights.hub import RemoteFile, Repository

ROOT = Path(__file__).resolve().parents[2]
REPO = "meta-llama/Llama-3.1-8B"
MIB = 1 << 20
CONFIG = hf_config(compose_job(["model=llama3_8b"]).model, dtype="bfloat16", bos_id=1, eos_id=2)
WEIGHTS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
TOKENIZER = ["config.json", "original/tokenizer.model", "tokenizer.json", "tokenizer_config.json"]
FILES = {
    "README.md": b"# Llama",
    "config.json": json.dumps(CONFIG).encode(),
    "generation_config.json": b"{}",
    "tokenizer.json": b"{} ",
    "tokenizer_config.json": b'{"eos_token": "<|end_of_text|>"}',
    "model.safetensors.index.json": b'{"weight_map": {}}',
    WEIGHTS[0]: os.urandom(3 * MIB),
    WEIGHTS[1]: os.urandom(2 * MIB),
    "consolidated.safetensors": os.urandom(MIB),
    "original/tokenizer.model": b"IQ== 0\n",
    "original/consolidated.00.pth": os.urandom(MIB),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with serving() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """A public hub with one repository, for this process and, by their environment, for new ones."""
    from huggingface_hub import constants

    server.repos = {REPO: {"main": dict(FILES)}}
    server.gated, server.members, server.tokens = set(), set(), set()
    server.sent, server.is_listed, server.mishap = [], True, lambda handler, content: False
    for name, value in {
        "HF_ENDPOINT": server.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "hf_home"),
        "PYTHONPATH": str(ROOT),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    # This process's client has already read the environment.
    for name, constant in {
        "ENDPOINT": server.url,
        "HF_HUB_OFFLINE": False,
        "HF_TOKEN_PATH": str(tmp_path / "hf_home" / "token"),
        "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
    }.items():
        monkeypatch.setattr(constants, name, constant)
    return server


def typed(*arguments: str) -> int:
    """Run the command in this process; return its exit code."""
    return guarded(lambda: VERB.run_line(arguments))


def run(*overrides: str) -> None:
    job = compose_job(overrides, config_name="download", schema=DownloadJob)
    assert download(job, list(overrides)) == EXIT_OK


def refused(*overrides: str, kind: type[Exception] = UserError) -> str:
    with pytest.raises(kind) as caught:
        run(*overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def require_same(folder: Path, files: dict[str, bytes] = FILES, names: list[str] | None = None) -> None:
    """Fail unless the downloaded files, apart from the download's records, have the hub's content."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    found = {name: path for name, path in found.items() if name != "download.json" and ".cache/" not in name}
    assert names is None or sorted(found) == sorted(names)
    assert all(path.read_bytes() == files[name] for name, path in found.items())


def partial_files(folder: Path) -> list[Path]:
    return list((folder / ".cache").rglob("*.incomplete"))


def test_the_command(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed(f"repo={REPO}") == EXIT_OK
    said = capsys.readouterr()
    folder = tmp_path / "assets/hf" / REPO
    assert said.err == ""
    names = [*TOKENIZER, "generation_config.json", "model.safetensors.index.json", *WEIGHTS]
    require_same(folder, names=names)
    assert not partial_files(folder)
    # The printed next commands work in the current folder.
    target, commit = f"assets/hf/{REPO}-dcp/step-0", commit_of(FILES)
    output = said.out.splitlines()
    assert output == [
        f"{REPO} at {commit[:12]}: 8 files, 0.005 GB downloaded: assets/hf/{REPO}",
        f"next: harness convert model=llama3_8b convert.source=assets/hf/{REPO} convert.target={target}",
        f"next: harness train model=llama3_8b tokenizer=llama3 checkpoint.initial_load_path={target}",
    ]
    assert json.loads((folder / "download.json").read_text()) == {"repo": REPO, "commit": commit}
    compose_job(shlex.split(output[1])[4:], config_name="convert", schema=ConvertJob).convert.validate()
    job = compose_job(shlex.split(output[2])[4:])
    assert job.tokenizer.file.read_bytes() == FILES["original/tokenizer.model"]


def test_files_that_are_there(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    run(f"repo={REPO}", "what=tokenizer", "to=out")
    require_same(out, names=TOKENIZER)
    assert sorted(hub.sent) == TOKENIZER
    hub.sent.clear()
    run(f"repo={REPO}", "what=[tokenizer,index]", "to=out")
    assert hub.sent == ["model.safetensors.index.json"]
    assert "1 file, 0.000 GB downloaded, 4 already there: out" in capsys.readouterr().out
    # Also files from elsewhere, if the content is the same.
    for name in (WEIGHTS[0], "generation_config.json"):
        (out / name).write_bytes(FILES[name])
    for sent in ([WEIGHTS[1]], []):
        hub.sent.clear()
        run(f"repo={REPO}", "to=out")
        assert hub.sent == sent
        require_same(out)

    newer = {**FILES, "tokenizer.json": b"newer"}
    hub.repos[REPO] = {"main": newer, "old": FILES}
    run(f"repo={REPO}", "what=tokenizer", "to=out")
    assert hub.sent == ["tokenizer.json"]
    require_same(out, newer)
    for revision, files in (("old", FILES), (commit_of(newer), newer)):
        run(f"repo={REPO}", "what=tokenizer", "to=out", f"revision={revision}")
        require_same(out, files)

    hub.sent.clear()
    (out / "config.json").write_text("mine")
    said = refused(f"repo={REPO}", "to=out")
    assert said.startswith("out/config.json: already exists and differs from the hub's; would work: another")
    assert (out / "config.json").read_text() == "mine"
    changed = tmp_path / "changed" / "config.json"  # by somebody else, not since a download
    changed.parent.mkdir()
    changed.write_bytes(bytes(len(FILES["config.json"])))
    assert "changed/config.json: already exists" in refused(f"repo={REPO}", "to=changed")
    hub.repos["other/model"] = {"main": FILES}
    said = refused("repo=other/model", "what=config", "to=out")
    assert said == f"to=out: holds files of {REPO}; would work: another folder"
    (out / "download.json").write_text("{}")
    assert "out/download.json: cannot be read; would work" in refused(f"repo={REPO}", "to=out")
    assert hub.sent == []


def test_an_interrupted_download_goes_on(hub: Hub, tmp_path: Path) -> None:
    """It ends at once, although the library would wait for the files in transfer."""
    go_on, out = threading.Event(), tmp_path / "out"

    def stall(handler: Any, content: bytes) -> bool:
        if content != FILES[WEIGHTS[0]]:
            return False
        handler.wfile.write(content[: 2 * MIB])
        handler.wfile.flush()
        go_on.wait(PATIENCE)
        return True

    hub.mishap = stall
    arguments = [sys.executable, "-m", "harness", "download", f"repo={REPO}", "what=weights", "to=out"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(lambda: (out / WEIGHTS[1]).exists() and WEIGHTS[0] in hub.sent)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=PATIENCE)
    go_on.set()
    assert (process.returncode, err) == (EXIT_INTERRUPTED, "")
    assert json.loads((out / "download.json").read_text())["repo"] == REPO
    require_same(out, names=[WEIGHTS[1]])
    [part] = partial_files(out)

    hub.mishap = lambda handler, content: False
    hub.sent.clear()
    os.utime(part, (0, 0))
    run(f"repo={REPO}", "what=weights", "to=out")
    assert hub.sent == [WEIGHTS[0]] and not partial_files(out)
    require_same(out, names=WEIGHTS)


def test_damage_is_noticed(hub: Hub, tmp_path: Path) -> None:
    def other(handler: Any, content: bytes) -> bool:
        handler.wfile.write(bytes(len(content)))
        return True

    hub.mishap = other
    said = refused(f"repo={REPO}", "what=[config,weights]", "to=out", kind=MachineError)
    assert f"{WEIGHTS[1]}: the download does not have the hub's checksum" in said
    hub.mishap = lambda handler, content: False
    run(f"repo={REPO}", "what=[config,weights]", "to=out")
    require_same(tmp_path / "out")


@pytest.mark.skipif(huggingface_hub.__version__ < "2", reason="older clients give up where newer ones retry")
def test_a_hub_that_fails_after_the_first_answer(hub: Hub) -> None:
    """The library then only warns, because there are other files in the folder."""
    hub.is_listed = False
    said = refused(f"repo={REPO}", "what=config", "to=out", kind=MachineError)
    assert said == f"{hub.url} did not send config.json; the same command downloads the missing files"


def test_disks(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is too small, one that fills up, and places that cannot be written."""
    with monkeypatch.context() as patched:
        patched.setattr(client.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 4 * MIB})())
        said = refused(f"repo={REPO}", "to=out", kind=MachineError)
        assert said == "out: needs 0.005 GB, and the disk has 0.004 GB left"
        assert hub.sent == []
        run(f"repo={REPO}", "what=tokenizer", "to=out")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("huggingface_hub.file_download.http_get", fail)
        said = refused(f"repo={REPO}", "what=weights", "to=out", kind=MachineError)
        assert "the disk is full, or a quota is; with more space the same command" in said
    (tmp_path / "file").write_text("x")
    assert refused(f"repo={REPO}", "to=file") == "to=file: is a file; would work: a folder"
    said = refused(f"repo={REPO}", "to=file/below")
    assert said == "to=file/below: file is not a folder; would work: a folder"


def test_refusals_of_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated, hub.tokens, hub.members = {REPO}, {"hf_stranger"}, {"hf_member"}
    monkeypatch.setenv("HF_TOKEN", "hf_member")
    run(f"repo={REPO}", "what=config", "to=a")
    for token, repo, says in (
        ("", REPO, f"repo={REPO}: the hub answers HTTP 401 ("),
        ("hf_stranger", REPO, f"repo={REPO}: the hub answers HTTP 403 ("),
        ("hf_mistyped", REPO, f"repo={REPO}: the hub answers HTTP 401 ("),
        ("", "no/thing", "repo=no/thing: the hub answers HTTP 401 ("),
        ("", f"{REPO} revision=v9", f"revision=v9: {REPO} has no such branch, tag or commit; would work: "),
    ):
        monkeypatch.setenv("HF_TOKEN", token)
        said = refused(*f"repo={repo} what=config".split())
        assert said.startswith(says), said
        assert f"; would work: a name from {hub.url}/models" in said or "revision=" in said


@pytest.mark.parametrize(
    ("name", "value", "code", "says"),
    [
        ("HF_ENDPOINT", "http://127.0.0.1:9", EXIT_MACHINE, "no complete answer from http://127.0.0.1:9: "),
        ("HF_HUB_OFFLINE", "1", EXIT_USER, "HF_HUB_OFFLINE=1 forbids access to the hub; would work: HF_HUB_"),
    ],
)
def test_the_network(hub: Hub, name: str, value: str, code: int, says: str) -> None:
    """In new processes, whose client reads the environment."""
    done = python("-m", "harness", "download", f"repo={REPO}", "what=config", **{name: value})
    assert done.returncode == code
    assert done.stderr.startswith(f"error: {says}") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("", "repo=null: must be given; would work: Qwen/Qwen3-8B"),
        ("repo=a/b what=tokens", "what=tokens: no such files; would work: one or a list of tokenizer, "),
        ("repo=a/b what=[config,weight]", "what=[config,weight]: no such files; would work: one or a list"),
        ("repo=a/b what=[]", "what=[]: no such files"),
        ("repo=https://huggingface.co/a/b/tree/main", "not a valid name; would work: a/b"),
        ("repo=a/b/c", "repo=a/b/c: not a valid name; would work: owner/name"),
        ("repo=a/b revision=''", "revision='': must be given; would work: main"),
        ("repos=a/b", "repos=a/b: no such field; did you mean repo?"),
        ("repo=a/b model=llama3_8b", "model=llama3_8b: no such field; "),
    ],
)
def test_mistakes(typed: str, says: str) -> None:
    assert says in refused(*typed.split())


def test_files_of_each_kind() -> None:

    def chosen(what: Any, *listed: str) -> list[str]:
        files = tuple(RemoteFile(name, 1, "0") for name in listed)
        return [file.name for file in choose(DownloadJob("a/b", what), Repository("a/b", "0" * 40, files))]

    assert chosen("weights", "model.safetensors", "adapter.safetensors") == ["model.safetensors"]
    assert chosen("weights", "part.safetensors", "sub/model.safetensors") == ["part.safetensors"]
    metas = ["consolidated.00.pth", "consolidated.01.pth"]
    assert chosen(["weights", "config"], *metas, "params.json") == ["params.json", *metas]
    assert chosen(["index", "weights"], "model.safetensors") == ["model.safetensors"]
    no_files = r"^what=tokenizer: a/b has no such files; would work: what=\[config\]$"
    with pytest.raises(UserError, match=no_files):
        chosen(["tokenizer", "config"], "config.json")
    with pytest.raises(UserError, match=r"^what=index: .*would work: a repository with safetensors$"):
        chosen("index", "README.md")


def test_next_commands_of_families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The family's tokenizer is chosen, which defines the end of a document."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "assets/hf/Qwen/Qwen3-0.6B"
    for path in (folder, folder.parent / "Qwen3-8B"):
        path.mkdir(parents=True)
        (path / "tokenizer.json").write_text("{}")
    job = DownloadJob("Qwen/Qwen3-0.6B", "tokenizer")
    path = "assets/hf/Qwen/Qwen3-0.6B/tokenizer.json"
    train = "next: harness train"
    assert next_commands(job) == [f"{train} tokenizer.kind=huggingface tokenizer.path={path}"]
    for family in ("qwen3", "qwen3_moe"):
        (folder / "config.json").write_text(json.dumps({"model_type": family}))
        assert next_commands(job) == [f"{train} tokenizer=qwen3 tokenizer.path={path}"]
    assert next_commands(DownloadJob("Qwen/Qwen3-8B", "tokenizer")) == [f"{train} tokenizer=qwen3"]
    assert compose_job(["tokenizer=qwen3"]).tokenizer.file.read_text() == "{}"
    told_all = next_commands(DownloadJob("Qwen/Qwen3-0.6B", ["weights"]))
    assert "model=NAME" in told_all[0] and told_all[-1].startswith("note: no option of conf/model")


def test_from_an_empty_folder_to_training(hub: Hub, tmp_path: Path) -> None:
    """The three commands of the README, with a model created here."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    model = ["model=llama3_tiny", "model.vocab_size=320", "model.n_layers=1"]
    sizes = hf_config(compose_job(model).model, dtype="float32", bos_id=None, eos_id=None)
    published, text = tmp_path / "published", Path(__file__).read_text()
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(published)
    learnt = tokenizers.ByteLevelBPETokenizer()
    learnt.train_from_iterator([text], 319, special_tokens=["</s>"], show_progress=False)
    learnt.save(str(published / "tokenizer.json"))
    (published / "tokenizer_config.json").write_text('{"bos_token": null, "eos_token": "</s>"}')
    hub.repos = {"me/tiny": {"main": {file.name: file.read_bytes() for file in published.iterdir()}}}
    (tmp_path / "text.txt").write_text(text)
    short = ["data=local_text", "data.paths=[text.txt]", f"data.cache_dir={tmp_path}/cache"]
    short += ["training.steps=4", "training.seq_len=32", "training.global_batch_size=2", "cluster.device=cpu"]

    commands = [["harness", "download", "repo=me/tiny", "what=[tokenizer,config,weights]"]]
    for number, more in enumerate(([], [], short)):
        done = python("-m", *commands[number], *more, cwd=tmp_path)
        assert done.returncode == EXIT_OK, done.stderr + done.stdout
        found = [line.removeprefix("next: ") for line in done.stdout.splitlines() if "next: " in line]
        commands += map(shlex.split, found)
    assert len(commands) == 3 and all("model=from_config" in words for words in commands[1:])
