"""What is measured on a GPU: what runs, what fits, the targets, and the table of results."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.compose.composer import compose_job
from harness.config.fields import with_value
from harness.config.job import Job
from harness.metrics.mfu import peak_of
from harness.model.spec import block_tensors
from harness.tools.report.rounds import Spread, ratios_by_round
from harness.util.document import to_markdown
from harness.util.encoding import flatten
from harness.util.hardware import find_accelerator
from harness.util.tables import Table
from harness.util.words import GIB

WARMUP_STEPS = 5
LOSS_CHUNKS = 8


@dataclass(frozen=True)
class Shape:
    """A model and a sequence length; not ``whole``: as many of its layers as fit."""

    model: str
    seq_len: int
    whole: bool = True


SHAPES = {
    "1B": Shape("llama32_1b", 8192),
    "3B": Shape("llama32_3b", 8192),
    "8B": Shape("llama3_8b", 8192, whole=False),
    "tiny": Shape("llama3_tiny", 64, whole=False),
}
DEFAULT_SHAPES = ("1B", "3B", "8B")
TARGET_SHAPE = "8B"

# The hungriest first: what does not fit shows in the first run of a round.
MODES = {
    "bf16": ["precision=bf16", "compile=off"],
    "bf16_compile": ["precision=bf16", "compile=on"],
    "bf16_graphs": ["precision=bf16", "compile=on", "compile.cuda_graphs=true"],
    "float8_tensorwise": ["precision=float8_tensorwise", "compile=on"],
    "float8_rowwise": ["precision=float8_rowwise", "compile=on"],
    "float8_rowwise_graphs": ["precision=float8_rowwise", "compile=on", "compile.cuda_graphs=true"],
}
BASELINE = "bf16_compile"
# torchtitan captures CUDA graphs by default and we do not, so one pair of rows compares defaults with
# defaults and one graphs with graphs. 0.3.0 has no float8 that scales by tensors.
TITAN_MODES = ("bf16", "bf16_compile", "bf16_graphs", "float8_rowwise", "float8_rowwise_graphs")
ACTIVATION_CHECKPOINTS = ("none", "selective_op", "full")


@dataclass(frozen=True)
class Targets:
    """The project's targets on an H200, at the shape of Llama 3 8B."""

    device: str = "H200"
    mfu: float = 0.55
    float8: float = 1.25
    torchtitan: float = 1.05


@dataclass(frozen=True)
class Case:
    """One way to run one shape."""

    shape: str
    activation_checkpoint: str
    mode: str
    n_layers: int | None = None
    """Layers of the model; None: all of them."""
    batch: int = 1
    steps: int = 20
    device: str = "cuda"
    elsewhere: bool = False
    """Whether the GPU is not this machine's: the case is planned, and does not run here."""

    @property
    def compiled(self) -> bool:
        return "compile=on" in MODES[self.mode]

    @property
    def precision(self) -> str:
        """The name of the precision group's option."""
        return MODES[self.mode][0].removeprefix("precision=")

    def overrides(self) -> list[str]:
        """The job, as ``harness.train`` takes it."""
        shape = SHAPES[self.shape]
        # Where there is no float8, its rounding can still be tried.
        emulated = self.device == "cpu" and self.precision.startswith("float8")
        return [
            f"model={shape.model}",
            *([f"model.n_layers={self.n_layers}"] if self.n_layers is not None else []),
            *MODES[self.mode],
            *(["precision.emulate=true"] if emulated else []),
            f"activation_checkpoint={self.activation_checkpoint}",
            *(
                "data=synthetic",
                "tokenizer=bytes",
                "checkpoint=disabled",
                f"cluster.device={self.device}",
            ),
            *(f"training.seq_len={shape.seq_len}", f"training.global_batch_size={self.batch}"),
            *(f"training.steps={self.steps}", f"training.loss_chunks={LOSS_CHUNKS}"),
            *(f"metrics.warmup_steps={WARMUP_STEPS}", f"metrics.log_interval={self.steps}"),
            "metrics.console=none",
        ]

    def job(self) -> Job:
        """The composed job.

        Raises:
            UserError: this machine, or this version, cannot do it.
        """
        return compose_job([*self.overrides(), *(["cluster=slurm"] if self.elsewhere else [])])

    def with_layers(self, n_layers: int | None) -> Case:
        return replace(self, n_layers=n_layers)


def estimated_bytes(job: Job, *, whole_logits: bool) -> float:
    """Device memory that a job of one rank will take, roughly.

    Args:
        job: one rank, computing in bfloat16.
        whole_logits: count the logits of all tokens at once, whatever the job says, as torchtitan has them.
    """
    model, tokens = job.model, job.local_batch_size * job.training.seq_len
    block = sum(tensor.size for tensor in block_tensors(model, 0) if not tensor.is_buffer)
    tables = model.vocab_size * model.dim * (1 if model.tied_embeddings else 2)
    # Masters, gradients and both moments of AdamW, all float32.
    state = 16 * (model.n_layers * block + tables)
    # bfloat16 copies of the parameters in use, and their gradients: the tables, and two blocks in flight.
    copies = (2 + 2) * (tables + 2 * block)
    # Logits in bfloat16, their float32 copy, log-probabilities and gradient (harness/parallelism/loss.py).
    chunks = 1 if whole_logits else job.training.loss_chunks
    logits = 12 * tokens / chunks * model.vocab_size
    kept = model.n_layers * kept_per_token(job) + block_activations(job)
    return state + copies + logits + 2 * tokens * kept + 1.5 * GIB


def block_activations(job: Job) -> int:
    """Numbers that one block keeps for backward, per token, without recomputation.

    Inputs of the norms and their outputs, queries, keys, values, what attention gives, and four of the
    feed-forward's width: both halves of SwiGLU, its activation, and the product.
    """
    model = job.model
    kv_width = model.n_kv_heads * model.head_width
    return 6 * model.dim + 2 * kv_width + 4 * model.ffn_hidden_dim


def kept_per_token(job: Job) -> int:
    """The same under the job's activation checkpointing."""
    model, mode = job.model, job.activation_checkpoint.mode
    kv_width = model.n_kv_heads * model.head_width
    if mode == "full":
        return model.dim
    if mode == "selective_op":
        # The block's input, what attention gives, and every second matrix product.
        return 2 * model.dim + (3 * model.dim + 2 * kv_width + 2 * model.ffn_hidden_dim) // 2
    return block_activations(job)


def layers_that_fit(case: Case, memory_bytes: float, *, whole_logits: bool) -> int:
    """The most layers of a case's model whose estimate leaves a twelfth of the memory free; 0: not one."""
    job = case.with_layers(None).job()
    for n_layers in range(job.model.n_layers, 0, -1):
        fewer = with_value(job, "model.n_layers", n_layers)
        if estimated_bytes(fewer, whole_logits=whole_logits) <= memory_bytes * 11 / 12:
            return n_layers
    return 0


Row = dict[str, Any]
SIDES = ("harness", "torchtitan")
TORCHTITAN = "torchtitan.tokens_per_second_per_rank"
HEADER = (
    *(
        "shape",
        "layers",
        "activation checkpoint",
        "mode",
        "tokens/s (range)",
        "MFU",
        "MFU, causal half",
    ),
    *(
        "peak GiB",
        "s to step 1",
        f"over {BASELINE} (range)",
        "torchtitan tokens/s",
        "over torchtitan (range)",
    ),
    "target met",
)


def render(facts: Row, rows: Sequence[Row]) -> str:
    """Markdown: the machine, the table, and each target with the best value."""
    table: list[list[str]] = []
    best: dict[str, float] = {}
    for group in groups_of(rows):
        for mode in dict.fromkeys(row["mode"] for row in group):
            cells, reached = line_of(group, mode)
            table.append(cells)
            for target, figure in reached.items():
                best[target] = max(figure, best.get(target, figure))
    origins = sorted({row["peak_origin"] for row in rows if "peak_origin" in row})
    lines = [
        about(facts),
        "",
        to_markdown(Table.of_cells(HEADER, table)),
        f"MFU is against bfloat16 in every mode: {'; '.join(origins) or 'nothing ran'}.",
    ]
    lines += [*versions_in_words(rows), *targets_in_words(facts, best), ""]
    lines += [
        f"{row_name(row)}: {row['failed']}: {row.get('message', '')}" for row in failures(rows)
    ]
    return "\n".join(lines).rstrip()


def about(facts: Row) -> str:
    packages = ", ".join(f"{name} {value}" for name, value in facts["versions"].items() if value)
    platform = (
        f"CUDA {facts['cuda']}"
        if facts["cuda"]
        else f"HIP {facts['hip']}"
        if facts["hip"]
        else "no GPU"
    )
    commit = (
        f"commit {facts['commit'][:10]}{' and changes' if facts['dirty'] else ''}"
        if facts["commit"]
        else ""
    )
    return (
        f"{facts['device']}, {facts['memory'] / GIB:.1f} GiB, {platform}; {packages}; {commit}; "
        f"{facts['rounds']} rounds of {facts['steps']} steps, batch {facts['batch']}."
    )


def versions_in_words(rows: Sequence[Row]) -> list[str]:
    """The libraries of each side, and that no ratio is taken if they differ."""
    sides = {side: sorted({stack_of(row) for row in rows if row["side"] == side}) for side in SIDES}
    lines = [f"{side}: {' and '.join(stacks)}." for side, stacks in sides.items() if any(stacks)]
    if sides["torchtitan"] and sides["harness"] != sides["torchtitan"]:
        lines.append("No ratio over torchtitan is taken across versions.")
    return lines


def stack_of(row: Row) -> str:
    """The versions of torch, Triton and cuDNN that a row was measured with; empty if it does not say."""
    return ", ".join(f"{name} {version}" for name, version in row.get("software", {}).items())


def is_comparable(rows: Sequence[Row]) -> bool:
    """Whether all runs of these rows had the same libraries."""
    return len({stack_of(row) for row in rows if "failed" not in row}) == 1


def groups_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one shape and one way of activation checkpointing; of several sizes the last one tried."""
    keys = dict.fromkeys((row["shape"], row["activation_checkpoint"]) for row in rows)
    groups = []
    for key in keys:
        group = [row for row in rows if (row["shape"], row["activation_checkpoint"]) == key]
        last = group[-1]["n_layers"]
        groups.append(
            [row for row in group if row["n_layers"] == last or row.get("failed") == "refused"]
        )
    return groups


def figures(group: Sequence[Row], mode: str, side: str, name: str) -> dict[int, float]:
    """One figure of one mode and side by round; rounds that failed, or do not know it, are left out."""
    chosen = [row for row in group if (row["mode"], row["side"]) == (mode, side)]
    return {row["round"]: row[name] for row in chosen if row.get(name) is not None}


def line_of(group: Sequence[Row], mode: str) -> tuple[list[str], dict[str, float]]:
    """The cells of one mode, and its value for each target that applies."""
    own = {
        name: figures(group, mode, "harness", name)
        for name in ("tokens_per_second", "mfu", "mfu_causal", "memory_gib", "first_step_seconds")
    }
    rate = own["tokens_per_second"]
    theirs = figures(group, mode, "torchtitan", "tokens_per_second")
    comparable = is_comparable([row for row in group if row["mode"] == mode])
    over_titan = ratios_by_round(rate, theirs) if comparable else []
    over_baseline = ratios_by_round(rate, figures(group, BASELINE, "harness", "tokens_per_second"))
    reached: dict[str, float] = {}
    if group[0]["shape"] == TARGET_SHAPE:
        if mode == BASELINE and own["mfu"]:
            reached["mfu"] = statistics.median(own["mfu"].values())
        if mode.startswith("float8") and over_baseline:
            reached["float8"] = statistics.median(over_baseline)
        if over_titan:
            reached["torchtitan"] = statistics.median(over_titan)
    verdicts = [judged(target, figure) for target, figure in reached.items()]
    layers = group[-1]["n_layers"]
    failed = failure(group, mode, "harness")
    cells = [
        group[0]["shape"],
        "all" if layers is None else str(layers),
        group[0]["activation_checkpoint"],
        mode,
        failed or spread(list(rate.values()), ",.0f"),
        median(own["mfu"], ".1%"),
        median(own["mfu_causal"], ".1%"),
        median(own["memory_gib"], ".1f"),
        median(own["first_step_seconds"], ".0f"),
        spread(over_baseline, ".3f") if mode != BASELINE else "-",
        failure(group, mode, "torchtitan") or spread(list(theirs.values()), ",.0f"),
        spread(over_titan, ".3f"),
        "; ".join(verdicts) or "-",
    ]
    return cells, reached


def judged(target: str, figure: float) -> str:
    """Format the best value for a target, and whether it is enough."""
    wanted = getattr(Targets(), target)
    shown = {"mfu": f"MFU {figure:.1%} of {wanted:.0%}"}.get(
        target, f"{target} {figure:.3f} of {wanted:.2f}"
    )
    return f"{shown}: {'yes' if figure >= wanted else 'no'}"


def targets_in_words(facts: Row, best: dict[str, float]) -> list[str]:
    targets = Targets()
    here = "" if targets.device in facts["device"] else f" (this is a {facts['device']})"
    lines = [
        f"Targets, stated for an {targets.device} at the {TARGET_SHAPE} shape{here}, by the best row:"
    ]
    wanted = {
        "mfu": f"{BASELINE} at least {targets.mfu:.0%} MFU",
        "float8": f"float8 at least {targets.float8} x {BASELINE}",
        "torchtitan": f"at least {targets.torchtitan} x torchtitan's tokens/s",
    }
    for target, words in wanted.items():
        lines.append(
            f"- {words}: {judged(target, best[target]) if target in best else 'not measured'}"
        )
    return lines


def failures(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "failed" in row]


def failure(group: Sequence[Row], mode: str, side: str) -> str:
    """How a mode failed, in two words; empty if it did not."""
    found = [row["failed"] for row in failures(group) if (row["mode"], row["side"]) == (mode, side)]
    return found[0].replace("_", " ") if found else ""


def row_name(row: Row) -> str:
    layers = f" {row['n_layers']} layers" if row["n_layers"] else ""
    return f"- {row['shape']}{layers}, {row['activation_checkpoint']}, {row['mode']}, {row['side']}"


def median(values: dict[int, float], form: str) -> str:
    found = Spread.of(list(values.values()))
    return format(found.median, form) if found else "-"


def spread(values: Sequence[float], form: str) -> str:
    """The median, with the range behind it where there are several."""
    found = Spread.of(values)
    if found is None:
        return "-"
    middle, between = found.as_text(form)
    return middle if len(values) == 1 else f"{middle} ({between})"


def report_rows(facts: Row, rows: Sequence[Row]) -> list[Row]:
    """Return a row for each case of the harness: medians over rounds, with torchtitan's median beside it.

    If a shape was reduced to fit into memory, only rows with its final number of layers count, as in
    ``table.md``.
    """
    last: dict[tuple[str, str], int | None] = {}
    for row in rows:
        if row.get("failed") != "refused":
            last[row["shape"], row["activation_checkpoint"]] = row["n_layers"]
    cases: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        group = (row["shape"], row["activation_checkpoint"])
        if row.get("failed") == "refused" or row["n_layers"] == last[group]:
            cases.setdefault((*group, row["mode"]), []).append(row)
    return [
        _of_case(each, facts)
        for each in cases.values()
        if any(row["side"] == "harness" for row in each)
    ]


def _of_case(rows: Sequence[Row], facts: Row) -> Row:
    ours = [row for row in rows if row["side"] == "harness"]
    first, failed = ours[0], [row for row in ours if "failed" in row]
    layers = f" {first['n_layers']} layers" if first["n_layers"] else ""
    row = {
        "point": f"{first['shape']}{layers} {first['mode']} {first['activation_checkpoint']}",
        "state": "completed",
        "kind": None,
        "reason": "",
        "device": facts["device"],
        "world_size": 1,
        "overrides": first.get("overrides", []),
        "command": "python experiments/gpu_single/run.py",
        **{f"code.versions.{name}": value for name, value in facts["versions"].items()},
        **{f"code.versions.{name}": value for name, value in first.get("software", {}).items()},
        "code.commit": facts["commit"],
        "code.dirty": facts["dirty"],
        **described(first.get("overrides"), facts["device"]),
    }
    if failed:
        failure = failed[0]
        state = "skipped" if failure["failed"] in ("refused", "does not fit") else "failed"
        return {
            **row,
            "state": state,
            "kind": failure["failed"],
            "reason": failure.get("message", ""),
        }
    rates = [each["tokens_per_second"] for each in ours]
    peak = peak_of(facts["device"], "bfloat16")
    row |= {"peak_flops": peak.flops, "peak_origin": peak.origin, "rounds": len(rates)}
    middle = statistics.median(rates)
    row |= {
        "measured.tokens_per_second_per_rank": middle,
        "measured.low": min(rates),
        "measured.high": max(rates),
        "measured.spread": (max(rates) - min(rates)) / middle,
        "measured.step_seconds": statistics.median(each["step_seconds"] for each in ours),
        "measured.memory_gib": max(each["memory_gib"] for each in ours),
    }
    if all(each.get("mfu") is not None for each in ours):
        row["measured.mfu"] = statistics.median(each["mfu"] for each in ours)
    others = [each for each in rows if each["side"] == "torchtitan" and "failed" not in each]
    if others and is_comparable([*ours, *others]):
        row[TORCHTITAN] = statistics.median(each["tokens_per_second"] for each in others)
    return row


def described(overrides: list[str] | None, device: str) -> Row:
    """The fields of a row's job."""
    if not overrides:
        return {}
    job = job_on(overrides, device)
    return {
        "id": job.id,
        "numerics_id": job.numerics_id,
        "name": job.name,
        **flatten({"job": job.to_dict()}),
    }


def job_on(overrides: list[str], device: str) -> Job:
    """Compose a job again, on a node with the device it was measured on."""
    accelerator = find_accelerator(device)
    if "cluster.device=cuda" in overrides:
        overrides = [*overrides, "cluster=slurm"]
        overrides += (
            [f"cluster.accelerator='{accelerator.name}'"] if accelerator is not None else []
        )
    return compose_job(overrides)
