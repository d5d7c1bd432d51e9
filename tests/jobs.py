"""Jobs of the smallest model, and their runs in this process or on ranks of a pool."""

import time
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from harness.checkpoint.state import model_state
from harness.compose.composer import compose_job
from harness.config.job import Job
from harness.data.batch import Batch
from harness.data.tokenizer import build_tokenizer
from harness.launch.begin import begin
from harness.metrics.jsonl import read_metrics
from harness.model.decoder import Decoder
from harness.parallelism.materialize import materialize
from harness.run.folder import RunFolder
from harness.train.engine import Engine
from harness.train.objective import loader_of
from harness.train.rank import run_rank
from harness.train.setup import set_up_process

TINY = (
    "model=llama3_tiny",
    "data=synthetic",
    "tokenizer=bytes",
    "cluster.device=cpu",
    "metrics.console=none",
)


class Run(NamedTuple):
    """A run of one rank in this process."""

    code: int
    folder: RunFolder
    job: Job

    @property
    def rows(self):
        """Rows of metrics.jsonl."""
        return read_metrics(self.folder.path / "metrics.jsonl")


def tiny(*overrides):
    """Compose a job of the smallest model, on synthetic data and the CPU."""
    return compose_job([*TINY, *overrides])


def train(runs_dir, *overrides, adopt=False):
    """Train one block of a ``tiny`` job as the command of a single rank does."""
    job = tiny("model.n_layers=1", *overrides, f"runs_dir={runs_dir}")
    folder = RunFolder(job.run_dir)
    begin(folder, job, list(overrides), adopt=adopt)
    try:
        return Run(run_rank(job, folder, started=time.monotonic()), folder, job)
    finally:
        folder.release()


class Trained(NamedTuple):
    """What one rank has after some steps of an engine.

    Attributes:
        losses, norms: of each step.
        weights: in full, of this rank's model parts.
        state: the optimizer's, in full, by weight and name.
    """

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    state: dict[str, dict[str, Tensor]]


def train_engine(job, steps):
    """Train on this rank without a run folder, and gather weights and optimizer state."""
    set_up_process(job)
    engine = Engine(job, torch.device("cpu"))
    loader = batches_of(job, engine.rows)
    losses, norms = [], []
    for _ in range(steps):
        outcome = engine.gradients(loader.next())
        engine.update(outcome.norm)
        losses.append(outcome.loss)
        norms.append(outcome.grad_norm)
    weights = {name: full(weight) for name, weight in model_state(engine).items()}
    state = {
        name: {key: full(value) for key, value in engine.optimizer.state[parameter].items()}
        for name, parameter in engine.named_parameters()
    }
    return Trained(losses, norms, weights, state)


def batches_of(job, rows, split="train"):
    """The loader of a job for some rows of the global batch."""
    return loader_of(job, build_tokenizer(job.tokenizer), rows, split)


def random_batch(rows, length, seed=0):
    """Random bytes, and as labels those that follow."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, (rows, length + 1), generator=generator)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def full(tensor):
    """Return a copy of a tensor, gathered if it is sharded."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def plain_losses(job, batch):
    """Return the losses of all tokens from one plain forward pass of the initial model."""
    model = Decoder(job.model, job.training.seq_len)
    materialize(model, job.training.seed, torch.device("cpu"), torch.device("cpu"))
    with torch.no_grad():
        return cross_entropy(model(batch.inputs_BT).mT, batch.labels_BT, reduction="none")
