"""Greedy text and scores equal transformers': every family, with and without a cache, on several ranks."""

import copy
from functools import cache

import numpy as np
import pytest
import torch
from cases import texts
from families_table import CASES, PLAIN, changed, random_model, set_fields, to_transformers
from inference_jobs import evaluation, generation

from harness.config.fields import with_value
from harness.model.cache import CachedPass
from harness.tools.inference.generate import Prompt
from harness.tools.inference.model import InferenceModel, with_model
from harness.tools.inference.scoring import Scorer
from harness.tools.inference.tasks import ScoredRow
from harness.train.setup import process_group
from harness.weights.detect import find_source

CPU = torch.device("cpu")
NEW = 40
FEW = 8  # with transformers' own loop, which takes most of the time
LENGTHS = (20, 3, 37)
WINDOW = 48
LAYOUTS = {
    "tp": "parallelism=tp parallelism.tp=2",
    "fsdp": "parallelism=fsdp parallelism.dp_shard=2",
    "ddp": "parallelism=ddp parallelism.dp_replicate=2",
    "ep": "parallelism=fsdp parallelism.dp_shard=2 parallelism.ep=2",
    "tp_ep": "parallelism=tp parallelism.tp=2 parallelism.dp_shard=2 parallelism.ep=2",
    "pp": "parallelism=pp parallelism.pp=2 training.loss_chunks=3",
    "compiled": "parallelism=tp parallelism.tp=2 compile=on compile.backend=aot_eager",
    "tp_cp": "parallelism=tp parallelism.tp=2 parallelism.cp=2 training.loss_chunks=3",
}
FAMILIES = ["llama", "qwen2", "mistral_wide", "mixtral_window", "qwen3", "qwen3_moe", "deepseek_v2"]
FAMILIES += ["deepseek_v3", "gpt_oss", "llama4", "qwen3_next", "kimi_linear"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Write the weights of a case; return their folder, and transformers' model."""

    @cache
    def save(case):
        folder = tmp_path_factory.mktemp(case) / "hf"
        return folder, to_transformers(random_model(CASES[case]), folder)

    return save


def prompts(case):
    generator = torch.Generator().manual_seed(3)
    vocab_size = CASES[case].vocab_size
    return [
        Prompt("", torch.randint(vocab_size, (n,), generator=generator).tolist()) for n in LENGTHS
    ]


def rows(case):
    """Rows of different lengths, more than one batch; some are scored from the middle."""
    generator = np.random.default_rng(3)
    lengths = (49, 12, 30, 2, 33, 40, 7, 20, 25, 49, 5)
    vocab_size = CASES[case].vocab_size
    return [
        ScoredRow(generator.integers(0, vocab_size, n), max(1, n // 2 * (n % 2))) for n in lengths
    ]


def greedy_job(folder, *overrides):
    job = with_value(generation(folder, *overrides), "generate.max_new_tokens", NEW)
    return with_value(job, "training.seq_len", max(LENGTHS) + NEW)


def scoring_job(folder, *overrides):
    job = evaluation(folder, "evaluate.batch_size=4", f"evaluate.seq_len={WINDOW}", *overrides)
    return with_value(job, "training.seq_len", WINDOW)


def generated(job, folder, given, device=CPU):
    function = "harness.tools.inference.decode:generate"
    outcome = with_model(job, device, function, find_source(str(folder)), given, False)
    return [text.tokens for text in outcome.texts]


def scored(job, folder, given):
    model = InferenceModel(job, CPU)
    model.load(find_source(str(folder)))
    return Scorer(model).score(given)


def require_greedy(made, theirs, given):
    """Compare with the likeliest token after the prompt and after each token, in one pass without a cache.

    They are equal only for the greedy text: its first token that differs follows an equal prefix.
    """
    for prompt, tokens in zip(given, made, strict=True):
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt.ids + tokens[:-1]]), use_cache=False).logits
        assert len(tokens) == NEW
        assert tokens == logits[0, len(prompt.ids) - 1 :].argmax(-1).tolist(), (
            f"{len(prompt.ids)} tokens"
        )


def require_scores(made, theirs, given):
    for number, (row, scores) in enumerate(zip(given, made, strict=True)):
        tokens = torch.from_numpy(row.tokens)
        with torch.no_grad():
            logits = theirs(tokens[None, :-1], use_cache=False).logits[0, row.start - 1 :].float()
        labels = tokens[row.start :]
        nats = logits.log_softmax(-1).gather(1, labels[:, None]).sum().item()
        assert abs(scores[0] - nats) < 1e-4, f"row {number}: {scores[0]} and not {nats}"
        assert scores[1] == (logits.argmax(-1) != labels).sum(), (
            f"row {number}: tokens that are not greedy"
        )


@pytest.mark.parametrize("case", FAMILIES)
def test_greedy_text(case, saved):
    (folder, theirs), given = saved(case), prompts(case)
    job = greedy_job(folder, "generate.batch_size=3")
    with process_group(job, CPU):
        made = generated(job, folder, given)
    require_greedy(made, theirs, given)
    tokens = torch.tensor([given[0].ids])
    options = {"max_new_tokens": FEW, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    own = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    assert made[0][:FEW] == own[0, len(given[0].ids) :].tolist()


@pytest.mark.gpu
def test_captured_pass(saved):
    """The first batch captures the pass of a token, and the others repeat it."""
    (folder, theirs), given, device = saved("llama"), prompts("llama"), torch.device("cuda", 0)
    job = greedy_job(folder, "generate.batch_size=1", "cluster.device=cuda")
    with process_group(job, device):
        require_greedy(generated(job, folder, given, device), theirs, given)


@pytest.mark.parametrize("case", ["llama", "deepseek_v3"])
def test_scores(case, saved):
    (folder, theirs), given = saved(case), rows(case)
    job = scoring_job(folder)
    with process_group(job, CPU):
        require_scores(scored(job, folder, given), theirs, given)


@pytest.mark.parametrize(
    ("verb", "case", "layout"),
    texts("""
        generate  llama        tp
        generate  llama        fsdp
        generate  llama        ddp
        generate  deepseek_v3  tp
        generate  gpt_oss      tp_ep
        generate  llama4       ep
        generate  gpt_oss      compiled
        evaluate  deepseek_v3  compiled
        evaluate  llama        pp
        evaluate  llama        tp_cp
        evaluate  deepseek_v3  ep
    """),
)
def test_ranks(verb, case, layout, saved, pool):
    folder, theirs = saved(case)
    options = (greedy_job, prompts, generated, require_greedy)
    if verb == "evaluate":
        options = (scoring_job, rows, scored, require_scores)
    compose, make, on_rank, require = options
    job, given = compose(folder, *LAYOUTS[layout].split()), make(case)
    for made in pool.run(job.world_size, on_rank, job, folder, given):
        require(made, theirs, given)


MUP = {
    "mup": set_fields(
        PLAIN,
        n_kv_heads=2,
        tied_embeddings=True,
        mup__base_dim=32,
        mup__base_widths={"head_dim": 4},
    ),
    "mup_latents_experts": changed(
        "deepseek_v3_debug", mup__base_dim=16, mup__base_widths={"attention.qk_nope_head_dim": 4}
    ),
}
CACHED = [(case, (24, 9)) for case in [*FAMILIES, *MUP]]
CACHED += [(case, lengths) for case in ("llama", "deepseek_v3") for lengths in ((24, 24), (1, 2))]


@pytest.mark.parametrize(("case", "lengths"), CACHED)
def test_cached_logits(case, lengths):
    """Logits of every new token equal those of a pass over the complete sequences."""
    length = 40
    plain = random_model((CASES | MUP)[case], length)
    assert case not in MUP or 1 not in (
        plain.config.score_multiplier,
        plain.config.output_multiplier,
    )
    cached = copy.deepcopy(plain)
    cached.use_cache(length)
    tokens = torch.randint(
        plain.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(5)
    )
    with torch.no_grad():
        wanted = plain(tokens)
        now = list(lengths)
        padded = tokens[:, : max(now)].clone()
        for row, end in enumerate(now):
            padded[row, end:] = 0
        got = cached(padded, cached=CachedPass(torch.tensor(now), max(now)))
        while max(now) < length:
            for row, end in enumerate(now):
                worst = (got[row, 0] - wanted[row, end - 1]).abs().max() / wanted.abs().max()
                assert worst < 1e-5, f"row {row}, position {end - 1}: {worst:.1e}"
            new = torch.stack([tokens[row, end] for row, end in enumerate(now)]).unsqueeze(1)
            now = [end + 1 for end in now]
            got = cached(new, cached=CachedPass(torch.tensor(now)))
