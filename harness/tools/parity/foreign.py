"""Parity for models that the harness does not know: transformers' own layouts, against one process.

transformers shards its models by plans in their code (``DistributedConfig``: FSDP2, tensor and
expert parallel). A rule that is missing or wrong changes gradients without an error. This compares
one forward and backward pass of any causal language model in a folder: weights as loaded, outputs
of modules, the loss, and gradients.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.config.job import Job
from harness.tools.parity.verdict import Verdict
from harness.util.errors import ConfigError, UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

FIELD = "parity.transformers"
NEEDED = ("transformers", "accelerate")
# Fields that such a comparison reads. The model comes from the folder.
READ = ("parity.", "training.seq_len", "training.global_batch_size", "training.seed")
UNREAD = ("parity.steps", "parity.resume", "parity.random", "parity.seed")
DATA_PARALLEL = ("fsdp_size", "dp_replicate_size")
SIZES = (*DATA_PARALLEL, "tp_size", "ep_size")
# Ends of the names of fields of transformers' configs.
DROPOUT = ("dropout", "pdrop")
LOSS = "loss"
WEIGHT = "value of "
OUTPUT = "output of "
GRADIENT = "gradient of "


@dataclass(frozen=True)
class Batch:
    """Random tokens, all of which are labels."""

    rows: int
    length: int
    seed: int


@dataclass(frozen=True)
class Layout:
    """Sizes of transformers' ``DistributedConfig``.

    Attributes:
        data: ranks with rows of their own.
        tensor: ranks that split each matrix.
    """

    sizes: dict[str, int]

    @classmethod
    def read(cls, name: str, text: str) -> Layout:
        """Read ``fsdp_size=2 tp_size=2``."""
        sizes = {}
        for word in text.split():
            key, _, value = word.partition("=")
            if key not in SIZES or not value.isdigit() or int(value) < 1:
                rule = "must be sizes, separated by spaces"
                works = f"{SIZES[0]}=2 {SIZES[2]}=2, of {', '.join(SIZES)}"
                raise ConfigError(f"parity.transformers_matrix.{name}", text, rule, works)
            sizes[key] = int(value)
        return cls(sizes)

    @property
    def data(self) -> int:
        return math.prod(self.sizes.get(name, 1) for name in DATA_PARALLEL)

    @property
    def tensor(self) -> int:
        return self.sizes.get("tp_size", 1)

    @property
    def ranks(self) -> int:
        """Expert parallelism takes ranks that the others have."""
        return self.data * self.tensor


def check(folder: str, overrides: list[str]) -> None:
    """Refuse overrides without effect, a folder without a model, and missing packages."""
    for override in overrides:
        name = override.lstrip("+~").partition("=")[0]
        if not name.startswith(READ) or name in UNREAD:
            rule = f"has no effect with {FIELD}, whose model and layouts are those of transformers"
            raise UserError(f"{override}: {rule}; would work: {', '.join(READ)}")
    if not (Path(folder) / "config.json").is_file():
        rule = "must be a folder with config.json and weights of transformers"
        raise ConfigError(FIELD, folder, rule, "what save_pretrained wrote")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        works = f"pip install {' '.join(missing)}"
        raise ConfigError(FIELD, folder, f"needs {', '.join(missing)}, not installed", works)
    from transformers.distributed import DistributedConfig

    if not hasattr(DistributedConfig, SIZES[0]):
        rule = f"needs a transformers whose DistributedConfig has {SIZES[0]}"
        raise ConfigError(FIELD, folder, rule, "transformers 5.23")


def batch_of(job: Job, layouts: Mapping[str, Layout]) -> Batch:
    """The batch that all layouts compute; its rows are dealt out evenly, as transformers' loss wants."""
    rows = job.training.global_batch_size
    assert rows is not None
    for name, layout in layouts.items():
        if rows % layout.data:
            rule = f"must divide by the {layout.data} data-parallel ranks of {name}"
            raise ConfigError("training.global_batch_size", rows, rule, [layout.data])
    return Batch(rows, job.training.seq_len, job.training.seed)


def trace(folder: str, sizes: dict[str, int], batch: Batch) -> dict[str, Any] | str:
    """Compute one step on this rank; return its values by the words that name them.

    Gradients are whole, of the mean loss of all rows. Outputs of modules are this rank's.

    Returns:
        Values in the order of computation, or why transformers refuses the layout.
    """
    import torch
    import transformers
    from torch import distributed
    from transformers.distributed import DistributedConfig

    transformers.logging.set_verbosity_error()
    # transformers reads it where a launcher would have set it.
    os.environ.setdefault("LOCAL_RANK", str(distributed.get_rank()))
    layout = Layout(sizes)
    options: dict[str, Any] = {}
    if sizes:
        options["distributed_config"] = DistributedConfig.from_dict(sizes)
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    for name in config.to_dict():
        # Its masks differ between layouts.
        if name.endswith(DROPOUT):
            setattr(config, name, 0.0)
    load = transformers.AutoModelForCausalLM.from_pretrained
    try:
        model = load(folder, config=config, dtype=torch.float32, local_files_only=True, **options)
    except ValueError as error:
        return str(error)
    model.train()
    generator = torch.Generator().manual_seed(batch.seed)
    vocabulary = model.config.get_text_config().vocab_size
    tokens_BT = torch.randint(0, vocabulary, (batch.rows, batch.length), generator=generator)
    own_BT = tokens_BT.chunk(layout.data)[_row_of(distributed.get_rank(), layout)]
    values: dict[str, Any] = {
        f"{WEIGHT}{name}": _whole(each) for name, each in model.named_parameters()
    }
    _keep_outputs(model, values)
    loss = model(input_ids=own_BT, labels=own_BT, use_cache=False).loss
    loss.backward()
    values[LOSS] = float(loss.detach())
    # Backward goes from the last module to the first.
    for name, parameter in reversed([*model.named_parameters()]):
        if parameter.grad is not None:
            values[f"{GRADIENT}{name}"] = _whole(parameter.grad)
    return values


def _row_of(rank: int, layout: Layout) -> int:
    """Which of the data-parallel ranks a rank is; tensor parallel is the innermost axis."""
    return rank // layout.tensor % layout.data


def _whole(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def _keep_outputs(model: nn.Module, values: dict[str, Any]) -> None:
    """Keep the first output of every module."""
    import torch

    def keep(name: str, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) and output else output
        if type(output) is torch.Tensor and output.dim() > 1:
            values.setdefault(f"{OUTPUT}{name}", output.detach().clone())

    for name, module in model.named_modules():
        if name:
            module.register_forward_hook(lambda _, __, output, name=name: keep(name, output))


def compare(
    name: str,
    layout: Layout,
    reference: dict[str, Any],
    traces: list[dict[str, Any]],
    tolerances: tuple[float, float],
) -> Verdict:
    """Compare all ranks of a layout with one process.

    Weights, the loss and gradients decide. Outputs of modules say where an error begins, as far as
    a rank has all columns of its rows: order and number of others belong to transformers.
    """
    from harness.tools.parity.first_wrong import largest, relative_difference

    offs: dict[str, float] = {}
    wrong = []
    for what, whole in reference.items():
        found = [each.get(what) for each in traces]
        if what == LOSS:
            losses = [each[LOSS] for each in traces]
            offs[what] = relative_difference(sum(losses) / len(losses), whole)
        elif what.startswith(OUTPUT):
            apart = [0.0]
            for rank, own in enumerate(found):
                part = _part(whole, layout, rank)
                if own is not None and own.shape == part.shape:
                    apart.append(relative_difference(own, part))
            offs[what] = largest(apart)
        else:
            offs[what] = largest([_difference(own, whole) for own in found])
        # NaN is different, because every comparison with it is false.
        if not offs[what] <= tolerances[0 if what == LOSS else 1]:
            wrong.append(what)
    passed = all(what.startswith(OUTPUT) for what in wrong)
    gradients = [what for what in offs if what.startswith(GRADIENT)]
    worst = max(gradients, key=lambda what: (math.isnan(offs[what]), offs[what]))
    return Verdict(
        name,
        layout.ranks,
        offs[LOSS],
        offs[worst],
        worst.removeprefix(GRADIENT),
        largest([off for what, off in offs.items() if what.startswith(WEIGHT)]),
        passed,
        first_wrong="" if passed else f"{wrong[0]}, relative difference {offs[wrong[0]]:.1e}",
    )


def _part(whole: Tensor, layout: Layout, rank: int) -> Tensor:
    """A rank's rows of an output [B, T, ...], or of one that has tokens as rows, [B * T, ...]."""
    rows = whole.chunk(layout.data)
    return rows[_row_of(rank, layout)] if len(rows) == layout.data else whole


def _difference(own: Tensor | None, whole: Tensor) -> float:
    """Relative difference; infinite where a rank has nothing, or a tensor of another shape."""
    from harness.tools.parity.first_wrong import relative_difference

    if own is None or own.shape != whole.shape:
        return math.inf
    return relative_difference(own, whole)
