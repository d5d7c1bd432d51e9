"""Files are downloaded by the hub's own client; refusals are one line, and the next commands work."""

import errno
import json
import os
import shlex
from pathlib import Path

import pytest
from processes import python
from stand_in_hub import COMMIT, serving

from harness.compose.composer import compose_job
from harness.tools.convert import ConvertJob
from harness.tools.download import DownloadJob, choose, download, next_commands
from harness.util.errors import (
    EXIT_INTERRUPTED,
    EXIT_MACHINE,
    EXIT_OK,
    EXIT_USER,
    MachineError,
    UserError,
)
from harness.weights.config_json import hf_config

ROOT = Path(__file__).resolve().parents[2]
REPO = "meta-llama/Llama-3.1-8B"
CONFIG = hf_config(compose_job(["model=llama3_8b"]).model, "bfloat16")
TOKENIZER = ["config.json", "original/tokenizer.model", "tokenizer.json", "tokenizer_config.json"]
MODEL = [
    "generation_config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
]
FILES = {
    name: name.encode() for name in (*TOKENIZER, *MODEL, "README.md", "consolidated.safetensors")
}
FILES["config.json"] = json.dumps(CONFIG).encode()


@pytest.fixture(scope="module")
def server():
    with serving() as hub:
        yield hub


@pytest.fixture
def hub(server, monkeypatch, tmp_path):
    """A hub with one repository, for this process and, by their environment, for new ones."""
    from huggingface_hub import constants

    server.repos = {REPO: dict(FILES)}
    server.gated = set()
    server.sent = []
    server.silent = False
    home = str(tmp_path / "hf_home")
    environment = {
        "HF_ENDPOINT": server.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": home,
        "PYTHONPATH": str(ROOT),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    # This process's client has already read the environment.
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", f"{home}/token")
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    return server


def run(*overrides):
    job = compose_job(overrides, config_name="download", schema=DownloadJob)
    assert download(job, list(overrides)) == EXIT_OK


def refused(*overrides, kind=UserError):
    with pytest.raises(kind) as caught:
        run(*overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_files_and_the_next_commands(hub, tmp_path, capsys):
    run(f"repo={REPO}")
    folder = tmp_path / "assets/hf" / REPO
    for name in (*TOKENIZER, *MODEL):
        assert (folder / name).read_bytes() == FILES[name]
    assert sorted(hub.sent) == sorted([*TOKENIZER, *MODEL])
    # The printed next commands work in the current folder.
    said = capsys.readouterr()
    assert said.err == ""
    first, convert, train = (shlex.split(line) for line in said.out.splitlines())
    assert [REPO, COMMIT[:12]] == [first[0], first[2].rstrip(":")]
    target = f"assets/hf/{REPO}-dcp/step-0"
    assert convert[3:] == [
        "model=llama3_8b",
        f"convert.source=assets/hf/{REPO}",
        f"convert.target={target}",
    ]
    assert train[3:] == [
        "model=llama3_8b",
        "tokenizer=llama3",
        f"checkpoint.initial_load_path={target}",
    ]
    compose_job(convert[3:], config_name="convert", schema=ConvertJob).convert.validate()
    assert compose_job(train[3:]).tokenizer.file.read_bytes() == FILES["original/tokenizer.model"]


def test_files_that_are_there(hub, tmp_path):
    """They are not sent again, and the user's own are not overwritten."""
    run(f"repo={REPO}", "what=tokenizer", "to=out")
    assert sorted(hub.sent) == TOKENIZER
    run(f"repo={REPO}", "what=[tokenizer,index]", "to=out")
    assert hub.sent[len(TOKENIZER) :] == ["model.safetensors.index.json"]
    mine = "m" * len(FILES["config.json"])
    (tmp_path / "out/config.json").write_text(mine)
    # The client does not see a change within a second.
    os.utime(tmp_path / "out/config.json", (1e10, 1e10))
    said = refused(f"repo={REPO}", "to=out")
    assert said.startswith(
        "out/config.json: is not the hub's, or has changed; would work: another folder"
    )
    assert (tmp_path / "out/config.json").read_text() == mine


def test_no_space(hub, monkeypatch):

    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.file_download.http_get", fail)
    said = refused(f"repo={REPO}", "what=weights", "to=out", kind=MachineError)
    assert os.strerror(errno.ENOSPC) in said and "and space the same command" in said


def test_refusals_of_the_hub(hub):
    hub.gated = {REPO}
    for typed, says in (
        (
            f"repo={REPO}",
            f"repo={REPO}: the hub says: Access to model {REPO} is restricted; would work: ",
        ),
        (
            "repo=no/thing",
            "repo=no/thing: the hub says: Invalid username or password.; would work: a name from",
        ),
        ("repo=a/b/c", "repo=a/b/c: not a valid name; would work: owner/name"),
        (
            f"repo={REPO} revision=v9",
            f"revision=v9: {REPO} has no such branch, tag or commit; would work: ",
        ),
    ):
        assert refused(*typed.split(), "what=config").startswith(says)
    # After the listing the client only warns, because the folder has other files.
    hub.silent = True
    Path("out").mkdir()
    Path("out/mine").touch()
    said = refused(f"repo={REPO}", "what=config", "to=out", kind=MachineError)
    assert "the same command downloads the missing files" in said


@pytest.mark.parametrize(
    ("name", "value", "code", "says"),
    [
        ("HF_ENDPOINT", "http://127.0.0.1:9", EXIT_MACHINE, "http://127.0.0.1:9: "),
        (
            "HF_HUB_OFFLINE",
            "1",
            EXIT_USER,
            "HF_HUB_OFFLINE=1 forbids access to the hub; would work: HF_HUB_",
        ),
    ],
)
def test_the_network(hub, name, value, code, says):
    """In new processes, whose client reads the environment."""
    done = python("-m", "harness", "download", f"repo={REPO}", "what=config", **{name: value})
    assert done.returncode == code
    assert done.stderr.startswith(f"error: {says}") and done.stderr.count("\n") == 1


def test_a_signal_ends_it_at_once():
    """Also while the client's threads transfer files."""
    program = """
import os, signal, threading, time
from harness.tools.download import VERB
VERB.prepare()
threading.Thread(target=time.sleep, args=[10_000]).start()
os.kill(os.getpid(), signal.SIGTERM)
"""
    assert python("-c", program).returncode == EXIT_INTERRUPTED


def test_files_of_each_kind():

    def chosen(what, *listed):
        return choose(DownloadJob("a/b", what), list(listed))

    assert chosen("weights", "model.safetensors", "adapter.safetensors") == ["model.safetensors"]
    assert chosen("weights", "part.safetensors", "sub/model.safetensors") == ["part.safetensors"]
    metas = ["consolidated.00.pth", "consolidated.01.pth"]
    assert chosen(["weights", "config"], *metas, "params.json") == ["params.json", *metas]
    assert chosen(["index", "weights"], "model.safetensors") == ["model.safetensors"]
    no_files = r"^what=tokenizer: a/b has no such files; would work: what=\[config\]$"
    with pytest.raises(UserError, match=no_files):
        chosen(["tokenizer", "config"], "config.json")
    with pytest.raises(
        UserError, match=r"^what=index: .*would work: a repository with safetensors$"
    ):
        chosen("index", "README.md")


def test_next_commands_of_families(tmp_path, monkeypatch):
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


def test_from_an_empty_folder_to_training(hub, tmp_path):
    """The three commands of the README, with a model created here."""
    transformers, tokenizers = (
        pytest.importorskip("transformers"),
        pytest.importorskip("tokenizers"),
    )
    model = ["model=llama3_tiny", "model.vocab_size=320", "model.n_layers=1"]
    sizes = hf_config(compose_job(model).model, "float32")
    published, text = tmp_path / "published", Path(__file__).read_text()
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(published)
    learnt = tokenizers.ByteLevelBPETokenizer()
    learnt.train_from_iterator([text], 319, special_tokens=["</s>"], show_progress=False)
    learnt.save(str(published / "tokenizer.json"))
    (published / "tokenizer_config.json").write_text('{"bos_token": null, "eos_token": "</s>"}')
    hub.repos = {"me/tiny": {file.name: file.read_bytes() for file in published.iterdir()}}
    (tmp_path / "text.txt").write_text(text)
    short = ["data=local_text", "data.paths=[text.txt]", f"data.cache_dir={tmp_path}/cache"]
    short += [
        "training.steps=4",
        "training.seq_len=32",
        "training.global_batch_size=2",
        "cluster.device=cpu",
    ]

    commands = [["harness", "download", "repo=me/tiny", "what=[tokenizer,config,weights]"]]
    for number, more in enumerate(([], [], short)):
        done = python("-m", *commands[number], *more, cwd=tmp_path)
        assert done.returncode == EXIT_OK, done.stderr + done.stdout
        found = [
            line.removeprefix("next: ") for line in done.stdout.splitlines() if "next: " in line
        ]
        commands += map(shlex.split, found)
    assert len(commands) == 3 and all("model=from_config" in words for words in commands[1:])
