"""Conversions between all formats keep the weights, checked with transformers, in little memory."""

import itertools
import json
import os
import re
import resource
import shutil
import signal
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import texts
from conversions import consolidated, model_of, refused, require_same, run, save_meta, to_meta
from held import Held
from peak_memory import bytes_of_converting
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.checkpoint.catalog import CheckpointFolder, encode_manifest, open_checkpoint
from harness.checkpoint.storage import HashingStream, Writer
from harness.compose.verb import guarded
from harness.config.data import TokenizerConfig
from harness.contrib.formats.torchtitan import read_torchtitan
from harness.model.spec import parameter_shapes, tensor_shapes
from harness.tools.convert import VERB, model_manifest
from harness.util.errors import EXIT_INTERRUPTED, EXIT_MACHINE, UserError
from harness.weights import source as sources
from harness.weights.config_json import hf_config
from harness.weights.dcp import DistributedSource, write_distributed
from harness.weights.detect import WeightFolder
from harness.weights.hf_tensors import our_tensors
from harness.weights.huggingface import HuggingFaceSource, write_huggingface

transformers = pytest.importorskip("transformers")

TINY = ["model=llama3_tiny", "model.vocab_size=320", "model.n_layers=2"]
TIED = [*TINY, "model.tied_embeddings=true"]
PARAMS = json.loads(
    """{"dim": 64, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 320, "multiple_of": 32,
    "ffn_dim_multiplier": 0.7, "norm_eps": 1e-5, "rope_theta": 500000.0, "use_scaled_rope": true}"""
)
FOUND = WeightFolder("hf", "", {})
Weights = dict[str, Tensor]


def transformer(model):
    """transformers' Llama with random weights; equal values would hide swapped norms."""
    torch.manual_seed(1)
    plain = hf_config(model, "float32")
    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**plain)).eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return network


def ours(network, model):
    theirs = network.state_dict()
    return {
        name: theirs[piece.theirs].detach().clone() for name, [piece] in our_tensors(model).items()
    }


MODEL = model_of(*TINY)


@pytest.fixture
def weights():
    return ours(transformer(MODEL), MODEL)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf") / "theirs"
    transformer(MODEL).save_pretrained(folder, max_shard_size="100KB")
    return folder


@pytest.fixture
def copy(theirs, tmp_path):
    return Path(shutil.copytree(theirs, tmp_path / "theirs"))


RECORDED = {"name": "x", "training": {"steps": 3}, "parallelism": {}}


def read_dcp(path, model):
    checkpoint = open_checkpoint(str(path))
    return DistributedSource(checkpoint.path, checkpoint.manifest, model)


def save_training(folder, step, weights, model):
    """A checkpoint as written by training."""
    state = {
        **weights,
        "optimizer.state.norm.weight.exp_avg": torch.ones(64),
        "rng.0": torch.ones(8),
    }
    manifest = {
        **model_manifest(FOUND, model, TokenizerConfig(kind="bytes")),
        "step": step,
        "holds": "full",
        "job": RECORDED,
        "state": {
            "train_state": {"step": step},
            "lr_scheduler": {"last_epoch": step},
            "data_loader": {"step": step, "samples": 8 * step},
        },
    }
    path = folder / f"step-{step}"
    dcp.save(state, storage_writer=Writer(str(path), manifest), no_dist=True)
    return path


def write_source(format, folder, weights, model):
    """Write weights as their own software does; ``foreign`` is DCP as of torchtitan, with an optimizer."""
    if format == "hf":
        write_huggingface(Held(weights), model, None, folder)
    elif format == "dcp":
        write_distributed(Held(weights), folder, model_manifest(FOUND, model, None))
    elif format.startswith("meta"):
        params = PARAMS if model.dim == PARAMS["dim"] else None
        files, by_rows = {"meta": (2, True), "meta_columns": (2, False), "meta_1": (1, True)}[
            format
        ]
        save_meta(folder, consolidated(to_meta(weights, model), files, by_rows), params)
    else:
        prefix = "model." if format == "foreign_nested" else ""
        state = {f"{prefix}{name}": tensor for name, tensor in to_meta(weights, model).items()}
        if model.tied_embeddings:
            state[f"{prefix}output.weight"] = weights["tok_embeddings.weight"].clone()
        state["optimizer.state.norm.weight.exp_avg"] = torch.ones(64)
        dcp.save({**state, "train_state": {"step": 3}}, checkpoint_id=folder, no_dist=True)


def read_target(format, path, model):
    if format == "torch":
        state = torch.load(path, weights_only=True)
        return {name: state[name] for name in parameter_shapes(model)}
    if format == "hf":
        again = transformers.AutoModelForCausalLM.from_pretrained(path)
        require_same(HuggingFaceSource(path, model), ours(again, model))
        return HuggingFaceSource(path, model)
    return read_dcp(path, model) if format == "dcp" else read_torchtitan(str(path), model)


# Format of the source and of the target, and whether the embeddings are tied.
ROWS = """
hf torchtitan untied
dcp torch tied
dcp hf tied
meta dcp untied
meta_columns hf untied
meta_1 torch tied
foreign dcp untied
foreign_nested hf untied
foreign_nested hf tied
"""


@pytest.mark.parametrize("row", ROWS.strip().splitlines())
def test_formats(row, tmp_path, capsys):
    source, target, tied = row.split()
    overrides = TIED if tied == "tied" else TINY
    model = model_of(*overrides)
    weights = ours(transformer(model), model)
    write_source(source, tmp_path / "in", weights, model)
    run(tmp_path / "in", tmp_path / "out", f"convert.format={target}", *overrides)
    said = capsys.readouterr().out
    assert ("its content cannot be verified" in said) == source.startswith("foreign")
    assert ("torchtitan's model needs theta=500000" in said) == (target == "torchtitan")
    assert (tmp_path / "out" / "manifest.json").exists() == (target == "dcp")
    require_same(read_target(target, tmp_path / "out", model), weights)


def test_another_number_format_and_a_tokenizer(copy, weights, tmp_path):
    half = ("convert.format=hf", "convert.dtype=bfloat16", "convert.max_shard_gb=0.0001", *TINY)
    run(copy, tmp_path / "half", *half)
    expected = {name: tensor.bfloat16() for name, tensor in weights.items()}
    require_same(HuggingFaceSource(tmp_path / "half", MODEL), expected)
    index = json.loads((tmp_path / "half" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert not (tmp_path / "half" / "tokenizer.json").exists()
    run(
        tmp_path / "half",
        tmp_path / "half.pt",
        "convert.format=torch",
        "convert.dtype=float16",
        *TINY,
    )
    halves = {name: tensor.half() for name, tensor in expected.items()}
    require_same(torch.load(tmp_path / "half.pt", weights_only=True), halves)

    run(copy, tmp_path / "with_tokenizer", *half, "tokenizer=bytes")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "with_tokenizer", dtype="auto"
    )
    assert (again.dtype, again.config.eos_token_id) == (torch.bfloat16, 257)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "with_tokenizer")
    assert tokenizer("hé").input_ids[-1] == 0xA9


@pytest.mark.parametrize("place", ["run", "memory://bucket/run"])
def test_a_run_gives_its_newest_complete_checkpoint(place, weights, tmp_path, capsys):
    checkpoints = tmp_path / "run" / "checkpoints"
    for step in (1, 2, 3):
        save_training(checkpoints, step, weights, MODEL)
    (checkpoints / "step-3" / "__0_0.distcp").write_bytes(b"cut")
    if "://" in place:
        fsspec.filesystem("memory").put(str(checkpoints), "/bucket/run/checkpoints", recursive=True)
    run(place if "://" in place else tmp_path / place, tmp_path / "step-9")
    assert "step-3 is skipped: __0_0.distcp has 3 bytes instead of" in capsys.readouterr().out
    checkpoint = open_checkpoint(str(tmp_path / "step-9"))
    assert (checkpoint.step, checkpoint.holds, checkpoint.job) == (2, "model", RECORDED)
    assert checkpoint.manifest["tokenizer"]["kind"] == "bytes"
    require_same(read_dcp(tmp_path / "step-9", MODEL), weights)
    assert [c.step for c in CheckpointFolder(str(tmp_path)).complete()[0]] == [2]

    # Weights that training saved for transformers have a manifest too, so model= is not needed.
    step = tmp_path / "other" / "checkpoints" / "step-7"
    write_huggingface(Held(weights), MODEL, None, step)
    manifest = {**model_manifest(FOUND, MODEL, None), "step": 7, "holds": "hf", "files": {}}
    (step / "manifest.json").write_bytes(encode_manifest(manifest))
    run(tmp_path / "other", tmp_path / "out")
    checkpoint = open_checkpoint(str(tmp_path / "out"))
    assert (checkpoint.step, checkpoint.holds) == (7, "model")
    require_same(read_dcp(tmp_path / "out", MODEL), weights)


def test_the_tokenizer_of_a_checkpoint(tmp_path):
    """A typed one wins over the manifest's, which must fit the model."""
    model = model_of("model=llama3_tiny", "model.vocab_size=2048", "model.n_layers=1")
    source = save_training(tmp_path, 1, ours(transformer(model), model), model)
    run(source, tmp_path / "a", "convert.format=hf", "tokenizer=python_2k")
    assert (tmp_path / "a" / "tokenizer.model").exists()
    run(source, tmp_path / "b", "convert.format=hf")
    assert (tmp_path / "b" / "tokenizer.json").exists()
    assert not (tmp_path / "b" / "tokenizer.model").exists()  # bytes have no file

    model = model_of("model=llama3_tiny", "model.vocab_size=256", "model.n_layers=1")
    source = save_training(tmp_path, 2, ours(transformer(model), model), model)
    says = refused(source, tmp_path / "c", "convert.format=hf")
    assert says.startswith(
        "tokenizer=bytes: has 258 ids, more than model.vocab_size=256; would work: "
    )
    assert "tokenizer=none" in says
    run(source, tmp_path / "c", "convert.format=hf", "tokenizer=none")


def test_another_model_is_refused(copy, weights, tmp_path):
    write_source("meta_1", tmp_path / "meta", weights, MODEL)
    write_source("meta_1", tmp_path / "no_params", weights, MODEL)
    (tmp_path / "no_params" / "params.json").unlink()
    save_training(tmp_path, 1, weights, MODEL)
    wrong = [{"dim": "64"}, {"multiple_of": 0}, {"vocab_size": None}, {"ffn_dim_multiplier": []}]
    for number, change in enumerate(wrong):
        save_meta(
            tmp_path / f"wrong{number}", [{"norm.weight": torch.ones(64)}], {**PARAMS, **change}
        )
    for source, typed, says in (
        *((f"wrong{number}", "TINY", "params.json") for number in range(len(wrong))),
        *texts("""
            theirs     TINY model.n_layers=3  model.n_layers=3: config.json has num_hidden_layers 2
            theirs     ""                     does not record its model; would work: model=NAME
            meta       TINY model.ffn_hidden_dim=160  model.ffn_hidden_dim=160: params.json has 128
            meta       TINY model.rope.theta=1  model.rope.theta=1.0: params.json has 500000.0
            no_params  TINY model.n_layers=3  the tensors are not those of model=llama3_tiny: 9 missing
            no_params  TINY model.dim=128     do not make up [320, 128] of model=llama3_tiny
            step-1     model=llama3_8b model.n_layers=2  model.vocab_size=128256: the checkpoint says
            step-1     model.rope.theta=7     model.rope.theta=7.0: the checkpoint says
        """),
    ):
        overrides = typed.replace("TINY", " ".join(TINY)).split()
        assert says in refused(tmp_path / source, tmp_path / "out", *overrides)
    run(tmp_path / "step-1", tmp_path / "out", "model.n_layers=2")  # agrees with the manifest


def test_non_finite_values_are_reported(copy, tmp_path, capsys):
    run(copy, tmp_path / "whole", *TINY)
    assert "WARNING" not in capsys.readouterr().out
    for file in sorted(copy.glob("*.safetensors")):
        stored = load_file(file)
        if "model.norm.weight" in stored:
            stored["model.norm.weight"][3] = torch.inf
        if "model.layers.0.self_attn.k_proj.weight" in stored:
            stored["model.layers.0.self_attn.k_proj.weight"][1, :2] = torch.nan
        save_file(stored, file, metadata={"format": "pt"})
    for target in ("dcp", "hf"):
        run(copy, tmp_path / target, f"convert.format={target}", *TINY)
        wrong = "layers.0.attention.wk.weight, norm.weight; they were written as they are"
        says = f"WARNING 2 of 21 tensors hold NaN or infinite values: {wrong}"
        assert says in capsys.readouterr().out


def test_invalid_indexes(copy, tmp_path):
    index = copy / "model.safetensors.index.json"
    for content, says in (
        (b'{"weight_map": {"a": 3}}', ""),
        (b'{"weight_map": {"a": "/etc/x.safetensors"}}', "instead of a file name"),
        (b'{"weight_map": {"a": "../x.safetensors"}}', "instead of a file name"),
        (b'{"weight_map": []}', ""),
        (b"[]", ""),
        (b"\xff", "cannot be read as JSON"),
    ):
        index.write_bytes(content)
        assert says in refused(copy, tmp_path / "out", *TINY)


def test_missing_tensors_are_refused(copy, weights, tmp_path):
    out = tmp_path / "out"
    del weights["layers.1.ffn_norm.weight"]
    write_source("dcp", tmp_path / "dcp", weights, MODEL)
    assert "1 missing (layers.1.ffn_norm.weight)" in refused(tmp_path / "dcp", out)
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    file = index["weight_map"]["model.norm.weight"]
    (copy / file).rename(tmp_path / "aside")
    assert re.search(
        rf"theirs: {file} is missing, one of \d+ files that", refused(copy, out, *TINY)
    )
    (copy / "model.safetensors.index.json").unlink()
    assert "missing" in refused(copy, out, *TINY)
    (tmp_path / "aside").rename(copy / file)
    run(copy, out, *TINY)  # several files without an index are complete


@pytest.mark.parametrize("stale", ["complete", "incomplete", "no JSON"])
def test_one_file_wins_over_an_index_beside_it(copy, tmp_path, stale):
    """A folder that was saved in shards and then in one file; transformers reads the file too."""
    network = transformer(MODEL)
    with torch.no_grad():
        network.model.norm.weight.fill_(3.0)
    network.save_pretrained(tmp_path / "new")
    shutil.copy(tmp_path / "new" / "model.safetensors", copy)
    if stale == "incomplete":
        for shard in copy.glob("model-*.safetensors"):
            shard.unlink()
    elif stale == "no JSON":
        (copy / "model.safetensors.index.json").write_bytes(b"{")
    assert torch.equal(
        transformers.LlamaForCausalLM.from_pretrained(copy).model.norm.weight,
        torch.full((64,), 3.0),
    )
    run(copy, tmp_path / "out", *TINY)
    require_same(read_dcp(tmp_path / "out", MODEL), ours(network, MODEL))


def flip(file, at):
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def cut(file):
    file.write_bytes(file.read_bytes()[:-8])


@pytest.mark.parametrize(
    ("format", "name", "damage", "says"),
    [
        (
            "dcp",
            "__0_0.distcp",
            lambda file: flip(file, file.stat().st_size // 2),
            "__0_0.distcp: bytes ",
        ),
        ("dcp", ".metadata", lambda file: flip(file, 100), ".metadata does not have the checksum"),
        ("dcp", "manifest.json", Path.unlink, "did not finish writing it: the manifest is missing"),
        ("half", ".metadata", Path.unlink, "was not finished: there is no .metadata"),
        ("hf", "model.safetensors", cut, "model.safetensors: not a complete safetensors file"),
        ("meta", "consolidated.00.pth", cut, "consolidated.00.pth: cannot be read: "),
    ],
)
def test_damage_is_noticed(format, name, damage, says, weights, tmp_path):
    source = tmp_path / "in"
    if format in ("dcp", "half"):
        source = save_training(tmp_path, 1, weights, MODEL)
        if format == "half":
            (source / "manifest.json").unlink()
    else:
        write_source(format, source, weights, MODEL)
    damage(source / name)
    for target in ("dcp", "hf", "torch"):
        said = refused(source, tmp_path / "out", f"convert.format={target}", *TINY)
        assert said.startswith(str(source)) and says in said
        if name == "__0_0.distcp":
            assert re.search(
                r": bytes \d+ to \d+ do not have the checksum they were written with$", said
            )


@pytest.mark.parametrize("format", ["hf", "meta_1"])
def test_tied_embeddings_that_are_not(format, weights, tmp_path):
    """A file may repeat the table as lm_head; a different matrix would be lost, so it is refused."""
    tied, out = model_of(*TIED), tmp_path / "out"
    for case, head in (
        ("other", weights["output.weight"]),
        ("same", weights["tok_embeddings.weight"]),
    ):
        write_source(format, tmp_path / case, {**weights, "output.weight": head}, MODEL)
        config = hf_config(tied, "float32")
        (tmp_path / case / "config.json").write_text(json.dumps(config))
    message = refused(tmp_path / "other", out, *TIED)
    assert re.search(
        r"(lm_head\.weight|the output projection) differs from .*; would work", message
    )
    run(tmp_path / "same", out, *TIED)
    require_same(read_dcp(out, tied), {name: weights[name] for name in parameter_shapes(tied)})


def test_values_that_a_format_cannot_hold(weights, tmp_path):
    weights["norm.weight"][3] = 1e6
    write_huggingface(Held(weights), MODEL, None, tmp_path / "hf")
    message = refused(tmp_path / "hf", tmp_path / "out", *TINY, "convert.dtype=float16")
    assert (
        message == "norm.weight has values that float16 cannot hold; would work: bfloat16, float32"
    )
    run(tmp_path / "hf", tmp_path / "out", *TINY, "convert.dtype=bfloat16")


def test_existing_targets(copy, tmp_path):
    full, empty, file = tmp_path / "full", tmp_path / "empty", tmp_path / "file.pt"
    (full / "inside").mkdir(parents=True)
    empty.mkdir()
    file.touch()
    for each in (full, Path("/dev/zero"), file):
        format = "torch" if each == file else "dcp"
        said = refused(copy, each, *TINY, f"convert.format={format}")
        assert said.startswith(f"convert.target={each}: already exists")
    assert "is a folder; format=torch writes a file" in refused(
        copy, empty, *TINY, "convert.format=torch"
    )
    run(copy, empty, *TINY)
    run(copy, tmp_path / "new" / "deep" / "step-0", *TINY)
    with pytest.raises(UserError, match=r"file\.pt is not a folder; would work: "):
        run(copy, file / "step-0", *TINY)


def command(source, target, *typed):
    """Run the command in this process; return its exit code."""
    return guarded(
        lambda: VERB.run_line(
            [*TINY, *typed, f"convert.source={source}", f"convert.target={target}"]
        )
    )


@pytest.mark.parametrize("target", ["dcp", "hf", "torch"])
def test_a_full_disk(target, theirs, tmp_path, capsys, monkeypatch):
    out, (soft, hard) = tmp_path / "new" / "out", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        assert command(theirs, out, f"convert.format={target}") == EXIT_MACHINE
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (
        capsys.readouterr().err
        == f"error: {out}: the disk is full, or a quota is; nothing was written\n"
    )
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(
        sources.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1)
    )
    assert command(theirs, out, f"convert.format={target}") == EXIT_MACHINE
    assert re.search(r"needs .* GB, and the disk has 0\.000 GB left", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_an_end_from_outside(theirs, tmp_path, monkeypatch):
    count, original, before = (
        itertools.count(),
        HashingStream.write,
        signal.getsignal(signal.SIGTERM),
    )

    def end(self, argument):
        if next(count) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, argument)

    monkeypatch.setattr(HashingStream, "write", end)
    assert VERB.prepare is not None
    VERB.prepare()
    try:
        assert command(theirs, tmp_path / "out") == EXIT_INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    assert list(tmp_path.iterdir()) == []


def test_memory_is_that_of_a_few_tensors(tmp_path):
    experts = ["model.moe.hidden_dim=192", "model.moe.num_experts=16"]
    for name, layers in (("small", 2), ("large", 16)):
        sizes = ["model.dim=256", "model.ffn_hidden_dim=512", f"model.n_layers={layers}", *experts]
        model = model_of("model=gpt_oss_debug", *sizes)
        weights = {name: torch.randn(shape) for name, shape in tensor_shapes(model).items()}
        write_source("dcp", tmp_path / name, weights, model)
    small, large, out = (tmp_path / name for name in ("small", "large", "out"))
    size = sum(file.stat().st_size for file in large.iterdir())
    assert size > 150e6
    # The largest stack of experts has 3 MB.
    assert bytes_of_converting(small, large, out, "hf", 2, []) < size / 5
