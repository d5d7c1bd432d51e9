"""Tasks of lm-evaluation-harness through our model give the numbers of its own hf model."""

import json

import pytest
import torch
from families_table import random_model, set_fields, shipped, to_transformers

from harness.compose.composer import compose_job
from harness.tools.inference.evaluate import EvaluateJob
from harness.tools.inference.scoring import evaluate
from harness.train.setup import process_group
from harness.util.errors import UserError
from harness.weights.detect import find_source

lm_eval = pytest.importorskip(
    "lm_eval", reason="lm-evaluation-harness (extra eval) is not installed"
)

WINDOW, VOCABULARY = 96, 384
# All characters stay, so that the longest rows exceed the window and lose their beginning.
TEXT = " ".join(
    f"the {word} of {number} ships" for number, word in enumerate(("crew", "name", "sail") * 6)
)
QUESTIONS = [
    {
        "question": TEXT[: 20 * i + 5] + "<end>" * (i % 2),
        "choices": ["yes", "a long answer", "no"],
        "gold": i % 3,
        "text": f"{'<begin>' if i == 1 else ''}{TEXT[i:]}<end> {TEXT[:9]}",
    }
    for i in range(6)
]
TASKS = {
    "local_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": name} for name in ("acc", "acc_norm", "acc_bytes")],
    },
    "local_rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [
            {"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")
        ],
    },
    "local_text": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "yes",
        "generation_kwargs": {"until": ["zz"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}
NAMES = [f"lm_eval:{name}" for name in TASKS]


def folder_of(parent, *, bos=False):
    """Weights, a tokenizer for transformers and for us, and the files of the tasks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    config = set_fields(shipped("llama3_tiny"), vocab_size=VOCABULARY, max_seq_len=WINDOW)
    folder = parent / "hf"
    to_transformers(random_model(config, WINDOW), folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("\u0120", "s"), ("\u0120", "o")]
    vocabulary = {
        piece: i for i, piece in enumerate([*letters, *("".join(pair) for pair in merges), "<end>"])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ends = {"eos_token": "<end>"}
    if bos:
        ends["bos_token"] = "<begin>"
        tokenizer.add_special_tokens(["<begin>"])
        begin = ("<begin>", tokenizer.token_to_id("<begin>"))
        tokenizer.post_processor = processors.TemplateProcessing(
            "<begin> $A", special_tokens=[begin]
        )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends).save_pretrained(folder)
    (parent / "questions.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in QUESTIONS))
    for name, task in TASKS.items():
        data = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(parent / "questions.jsonl")}},
            "test_split": "test",
        }
        (parent / f"{name}.yaml").write_text(json.dumps(data | task))
    return folder


def job_of(folder, *overrides):
    return compose_job(
        [
            f"checkpoint={folder}",
            "tokenizer.kind=huggingface",
            f"tokenizer.path={folder}/tokenizer.json",
            "cluster.device=cpu",
            f"evaluate.tasks=[{','.join(NAMES)}]",
            f"evaluate.include_path={folder.parent}",
            f"evaluate.seq_len={WINDOW}",
            *overrides,
        ],
        config_name="evaluate",
        schema=EvaluateJob,
    )


def on_rank(job, folder):
    return evaluate(job, torch.device("cpu"), find_source(folder), None)


def theirs(folder, name, bos):
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    options = {"device": "cpu", "dtype": "float32", "batch_size": 2, "max_length": WINDOW}
    model = HFLM(pretrained=str(folder), add_bos_token=bos, **options)
    manager = TaskManager(include_path=str(folder.parent), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=model, tasks=[name], task_manager=manager, log_samples=True
    )
    values = {key.removesuffix(",none"): value for key, value in found["results"][name].items()}
    return {key: value for key, value in values.items() if isinstance(value, float)} | {
        "samples": [sample["filtered_resps"] for sample in found["samples"][name]]
    }


@pytest.mark.parametrize("bos", [False, True])
def test_metrics(bos, tmp_path, pool, monkeypatch):
    """Also of texts with special tokens, and where the tokenizer has a begin token."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = folder_of(tmp_path, bos=bos)
    job = job_of(folder)
    with process_group(job, torch.device("cpu")):
        ours = dict(on_rank(job, str(folder)))
    split = job_of(folder, "parallelism=tp", "parallelism.tp=2")
    for name, metrics in pool.run(split.world_size, on_rank, split, str(folder))[0]:
        assert metrics == pytest.approx(ours[name], rel=1e-5)
    for name in TASKS:
        wanted = theirs(folder, name, bos)
        del wanted["samples"]
        assert wanted, name
        found = {key: ours[f"lm_eval:{name}"][key] for key in wanted}
        assert found == pytest.approx(wanted, rel=1e-4), name


def test_unknown_task(tmp_path):
    folder = folder_of(tmp_path)
    job = job_of(folder, "evaluate.tasks=[lm_eval:local_choise]")
    with pytest.raises(
        UserError, match=r"local_choise: .*no such task; would work: lm_eval:local_choice"
    ):
        on_rank(job, str(folder))


def test_generation_needs_a_layout(tmp_path, pool):
    folder = folder_of(tmp_path)
    job = job_of(
        folder, "parallelism=cp", "parallelism.cp=2", "evaluate.tasks=[lm_eval:local_text]"
    )
    with pytest.raises(Exception, match=r"parallelism.cp=2: the task generates text"):
        pool.run(2, on_rank, job, str(folder))
