"""Columns of ``metrics.jsonl`` and ``result.json``: name, unit and meaning. Imports no torch.

``docs/reference.py`` writes them into the documentation; a test compares them with what runs write.
A name that ends in ``.*`` stands for all names with that prefix.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """One value of a row.

    Attributes:
        name: key in the row.
        unit: unit, or type where there is no unit.
        text: meaning, in one sentence.
        when: condition under which the row has it; empty means always.
    """

    name: str
    unit: str
    text: str
    when: str = ""


_UTILIZATION = (
    Column("images_per_second", "images/s", "Pictures of all ranks.", "`model.architecture=flux`"),
    Column("tokens_per_second_per_rank", "tokens/s", "`tokens_per_second` divided by the number of ranks."),
    Column("tflops_per_device", "TFLOP/s", "Model FLOPs per second and rank, attention counted in full."),
    Column("mfu", "0 to 1", "Model FLOPs utilization, attention counted in full; null without a known peak."),
    Column("mfu_causal", "0 to 1", "Model FLOPs utilization with half of attention, as a causal mask needs."),
    Column("memory_gib", "GiB", "Peak memory of the fullest rank since the process started."),
    Column("memory.active_gib", "GiB", "Peak memory in use by tensors, on the fullest rank.", "GPUs"),
    Column("memory.reserved_gib", "GiB", "Peak memory reserved by the allocator.", "GPUs"),
    Column(
        "memory.retries", "count", "Allocations that first had to free cached memory, most of a rank.", "GPUs"
    ),
    Column("memory.out_of_memory", "count", "Allocations that failed, most of a rank.", "GPUs"),
)

METRICS = (
    Column("step", "count", "Optimizer step, from 1."),
    Column("loss", "nats/token", "Mean cross entropy over all valid tokens of the global batch."),
    Column("loss_max", "nats/token", "Largest mean loss of one rank's share of the batch."),
    Column("grad_norm", "2-norm", "Norm of all gradients before clipping."),
    Column("lr", "1", "Learning rate of this step."),
    Column("tokens", "tokens", "Tokens processed since step 1, masked ones included."),
    Column("valid_tokens", "tokens", "Tokens of this step whose label is not masked."),
    Column(
        "loss.*",
        "nats/token",
        "Loss of a source; null if the step has none of it.",
        "`data=mixture`",
    ),
    Column("valid_tokens.*", "tokens", "Tokens of a source in this step, not masked.", "`data=mixture`"),
    Column("tokens.*", "tokens", "Tokens of a source since step 1.", "`data=mixture`"),
    Column("epochs.*", "count", "Epochs of a source since step 1; not of streams.", "`data=mixture`"),
    Column("mtp_loss", "nats/token", "Loss of multi-token prediction, without its weight.", "`model.mtp`"),
    Column("step_seconds", "s", "Mean time of the steps since the last row, warm-up included."),
    Column("tokens_per_second", "tokens/s", "Throughput of all ranks since the last row, without warm-up."),
    Column("data_share", "0 to 1", "Share of the step's time spent waiting for data."),
    Column("profiled_steps", "count", "Steps left out of throughput: a profiler ran.", "`profiling=on`"),
    *_UTILIZATION,
    Column("skipped_steps", "count", "Updates skipped so far because a number was not finite."),
    Column("schedule.batch_size", "sequences", "Sequences of this step.", "`schedule.batch_size`"),
    Column("schedule.seq_len", "tokens", "Tokens per sequence of this step.", "`schedule.seq_len`"),
    Column("moe.load_max", "ratio", "Largest load of an expert over its layer's mean.", "mixtures"),
    Column("moe.load_min", "ratio", "Smallest load of an expert over its layer's mean.", "mixtures"),
    Column("moe.load_max.*", "ratio", "The same for one layer; the name ends in its number.", "mixtures"),
    Column("moe.load_min.*", "ratio", "The same for one layer; the name ends in its number.", "mixtures"),
    Column("moe.unused", "count", "Experts without a token, over all layers.", "mixtures"),
    Column("moe.dropped", "count", "Choices of an expert that were not computed: always 0.", "mixtures"),
    Column("slow_ranks", "count", "Ranks that compute longer than others.", "`profiling.phases=true`"),
    Column("time", "s", "Unix time at which the row was written."),
    Column(
        "validation_loss",
        "nats/token",
        "Loss on held-out samples; a row of its own with `step`.",
        "validation",
    ),
    Column("validation_loss.*", "nats/token", "The same for a source.", "`data=mixture`, validation"),
    Column(
        "evaluation.*",
        "number",
        "Metric of a task, `evaluation.<task>.<metric>`; a row of its own with `step`.",
        "evaluation",
    ),
)

OF_RANK = (
    Column("step", "count", "Optimizer step, from 1."),
    Column("rank", "number", "The rank."),
    Column("stage", "number", "Its pipeline stage."),
    Column("host", "text", "Name of its node."),
    Column("device", "text", "Name of its device."),
    Column("loss", "nats/token", "Mean loss of the tokens that it counts; null if another rank does."),
    Column("step_seconds", "s", "Mean time of its steps since the last row, warm-up included."),
    Column("data_share", "0 to 1", "Share of its time spent waiting for data, without warm-up."),
    Column("memory_gib", "GiB", "Its peak memory since the process started."),
    Column("memory.active_gib", "GiB", "Its peak memory in use by tensors.", "GPUs"),
    Column("memory.reserved_gib", "GiB", "Its peak memory reserved by the allocator.", "GPUs"),
    Column("memory.retries", "count", "Its allocations that first had to free cached memory.", "GPUs"),
    Column("memory.out_of_memory", "count", "Its allocations that failed.", "GPUs"),
    Column("phase.*", "s", "Mean time of a phase in the steps done last.", "`profiling.phases=true`"),
    Column("time", "s", "Unix time at which the row was written."),
)

_ERROR = (
    Column("error.kind", "text", "Failure class (see troubleshooting).", "failure"),
    Column("error.type", "text", "Class of the exception.", "failure"),
    Column("error.rank", "number", "Rank that failed first; null for the controller.", "failure"),
    Column("error.step", "count", "Last step that rank completed.", "failure"),
    Column("error.message", "text", "Message of the exception.", "failure"),
    Column("error.allocation", "text", "Size of the allocation that failed.", "`out_of_memory`"),
    Column("error.operation", "text", "Collective that timed out.", "`collective_timeout`"),
    Column("error.absent_ranks", "list", "Ranks that never reached the collective.", "`collective_timeout`"),
)

RESULT = (
    Column("id", "hash", "Job id: hash of all numerics and execution fields."),
    Column("numerics_id", "hash", "Hash of the numerics fields; layouts of one experiment share it."),
    Column("name", "text", "Field `name` of the job."),
    Column("exit_reason", "text", "`completed`, `interrupted` or `failed`."),
    Column("exit_code", "number", "Exit code of the command (see verbs)."),
    Column("world_size", "count", "Number of ranks."),
    Column("step", "count", "Last step completed."),
    Column("start_step", "count", "Step that this attempt started from; 0 for a new run."),
    Column("resumed_from", "path", "Checkpoint that was loaded; null for a new run."),
    Column("saved", "bool", "Whether the last step is checkpointed."),
    Column("checkpoint.step", "count", "Step of the newest checkpoint of this attempt."),
    Column("checkpoint.saves", "count", "Checkpoints written by this attempt."),
    Column("checkpoint.failed", "count", "Saves that failed."),
    Column("checkpoint.seconds", "s", "Time that training waited for checkpoints."),
    Column("tokens", "tokens", "Tokens processed since step 1."),
    Column("loss", "nats/token", "Loss of the last step."),
    Column("validation_loss", "nats/token", "Loss of the last validation; null without one."),
    Column("validation_loss.*", "nats/token", "The same for a source, of this attempt.", "`data=mixture`"),
    Column("evaluation.*", "number", "Metrics of the last evaluation of this attempt.", "evaluation"),
    Column("tokens.*", "tokens", "Tokens of a source since step 1.", "`data=mixture`"),
    Column("epochs.*", "count", "Epochs of a source since step 1; not of streams.", "`data=mixture`"),
    Column("skipped_steps", "count", "Updates skipped because a number was not finite."),
    Column("damaged_documents", "count", "Documents that could not be read and were left out."),
    Column("first_step_seconds", "s", "Time from the start of the command to the end of the first step."),
    Column("compile_seconds", "s", "Time spent in torch.compile."),
    Column("recompiles", "count", "Graphs compiled again after the first step."),
    Column("parameters", "count", "Parameters of the model."),
    Column("flops_per_token_full", "FLOP", "Model FLOPs per token of the window, attention counted in full."),
    Column("flops_per_token_causal", "FLOP", "Model FLOPs per token with half of attention."),
    Column("peak_flops", "FLOP/s", "Peak of the device that MFU is computed against; null if unknown."),
    Column("peak_origin", "text", "Source of that peak, or why there is none."),
    Column("device", "text", "Name of the device."),
    Column("window.window_steps", "count", "Steps after warm-up, without profiled ones."),
    Column("window.window_seconds", "s", "Their total time."),
    Column("window.window_tokens", "tokens", "Their total tokens."),
    Column("window.step_seconds_median", "s", "Median time of a step."),
    Column("window.step_seconds_p10", "s", "10th percentile of the time of a step."),
    Column("window.step_seconds_p90", "s", "90th percentile of the time of a step."),
    Column("window.step_seconds_spread", "ratio", "(p90 - p10) / median."),
    Column("window.tokens_per_second", "tokens/s", "All tokens over all seconds, as in every table."),
    Column("window.tokens_per_second_p10", "tokens/s", "10th percentile of the rates of single steps."),
    Column("window.tokens_per_second_p90", "tokens/s", "90th percentile of the rates of single steps."),
    Column("window.tokens_per_second_median", "tokens/s", "Mean tokens of a step over the median time."),
    Column("window.data_share", "0 to 1", "Share of the window spent waiting for data."),
    Column("window.profiled_steps", "count", "Steps left out because a profiler ran; null if none."),
    *_UTILIZATION,
    *_ERROR,
    Column("job.*", "field", "Every field of the resolved job."),
    Column("code.*", "text", "Commit, whether the tree was dirty, and versions of the packages."),
    Column("host.*", "text", "Host name, system and cores."),
)
