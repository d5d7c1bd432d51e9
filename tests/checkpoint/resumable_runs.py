"""Training runs on a test's ranks, stopped and resumed within the process, and their results."""

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jobs import TINY

from harness.checkpoint.optimizer_state import optimizer_state
from harness.checkpoint.state import model_state, rng_state
from harness.config.job import Job
from harness.run.folder import RunFolder
from harness.train.engine import Engine
from harness.train.setup import set_up_process
from harness.train.trainer import Trainer

SMALL = [
    *(*TINY, "data.mask_fraction=0.3", "training.seq_len=32", "training.global_batch_size=8"),
    *("schedule.warmup_steps=2", "optimizer.lr=0.01"),
]


@dataclass(frozen=True)
class Outcome:
    """Result of one run on one rank; batches and tensors at the end are digests."""

    reason: str  # completed or interrupted
    losses: dict[int, float]  # by step, as the next two
    norms: dict[int, float]
    batches: dict[int, str]
    state: dict[str, str]  # weights, optimizer, random states
    resumed_from: str | None
    messages: list[str]  # shown to the user
    facts: dict[str, Any]  # its result row


def train(job_json, run_dir, stop_after=None):
    """Train on this rank; request a stop during step ``stop_after``."""
    job, folder = Job.from_json(job_json), RunFolder(Path(run_dir))
    set_up_process(job)
    # Start like a new process, with no state from earlier runs in this one.
    torch.manual_seed(0)
    engine = Engine(job, torch.device("cpu"))
    trainer = Trainer(job, folder, engine, None, time.monotonic())
    losses = {}
    norms = {}
    batches = {}
    messages = []
    trainer._message = messages.append
    trainer.saver.say = messages.append
    passes = engine.gradients

    def gradients(batch, *, stop_requested=False, **others):
        step = trainer.progress.step + 1
        # Use random numbers, so that the generator's state matters.
        torch.rand(3)
        outcome = passes(batch, stop_requested=stop_requested or step == stop_after, **others)
        losses[step], norms[step] = outcome.loss, outcome.grad_norm
        batches[step] = "".join(_digest(tensor) for tensor in batch if tensor is not None)
        return outcome

    engine.gradients = gradients
    reason = trainer.train()
    tensors = {**model_state(engine), **optimizer_state(engine), "rng": rng_state(engine.device)}
    state = {name: _digest(getattr(t, "_local_tensor", t)) for name, t in tensors.items()}
    return Outcome(
        reason, losses, norms, batches, state, trainer.resumed_from, messages, trainer.result()
    )


def _digest(tensor):
    flat = tensor.detach().reshape(-1).contiguous()
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
