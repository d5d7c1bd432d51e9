"""Mistakes on the command line: each gives one line with field, value, rule and what would work."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
from processes import python

from harness.compose.composer import compose_job
from harness.compose.paths import using_folders
from harness.tools.parity.parity import ParityJob
from harness.tools.plan.compare import job_against
from harness.tools.plan.config import PlanJob
from harness.util.errors import EXIT_USER, UserError

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mistake:
    """Overrides, the last of which is wrong.

    Attributes:
        typed: the overrides, separated by spaces.
        start: start of the message.
        works: overrides that work in place of the last one; the message must contain their values.
    """

    typed: str
    start: str
    works: tuple[str, ...] = ()


MIXTURE = "model=qwen3_moe_debug"


def mistake(typed: str, rule: str, *works: str) -> Mistake:
    """The message begins with the last override, then the rule; ``works`` may list values of its field."""
    wrong = typed.split(" ")[-1]
    field = wrong.split("=")[0]
    listed = [[each] if "=" in each else [f"{field}={value}" for value in each.split()] for each in works]
    return Mistake(typed, f"{wrong}: {rule}", tuple(chain.from_iterable(listed)))


def shown_as(typed: str, start: str, *works: str) -> Mistake:
    """The message begins with another field, or with another form of the value."""
    return Mistake(typed, start, works)


FIELDS_AND_GROUPS = [
    mistake("parallelism.tpp=2", "no such field; did you mean parallelism.tp?", "parallelism.tp=2"),
    shown_as(
        "+parallelism.tpp=2",
        "parallelism.tpp=2: no such field; did you mean parallelism.tp?",
        "parallelism.tp=2",
    ),
    shown_as("++parallelism.tpp=2", "parallelism.tpp=2: no such field; did you mean parallelism.tp?"),
    shown_as("~parallelism.tpp", "parallelism.tpp: no such field; did you mean parallelism.tp?"),
    mistake("cluster.env.A=1,2", "has several values"),
    mistake("cluster.env.A=[", "cannot be read"),
    mistake("cluster.env.A=nope(1)", "Unknown function 'nope'"),
    mistake("tp=2", "no such field; did you mean parallelism.tp?", "parallelism.tp=2"),
    mistake("training.lr=1", "no such field; did you mean optimizer.lr?", "optimizer.lr=1"),
    mistake("model.rope.base=3", "no such field; model.rope has: beta_fast, "),
    shown_as("training={stepz:3}", "training.stepz: no such field; did you mean training.steps?"),
    mistake("parallelism.tp.size=2", "parallelism.tp is a value and has no fields"),
    mistake("+training.steps=3", "the field exists already", "training.steps=3"),
    mistake("~training.steps", "a field cannot be removed; would work: training.steps="),
    mistake("~training", "a field cannot be removed"),
    mistake("training=3", "must be set by its fields, training.steps, ", "training.steps=3"),
    mistake("paralelism=fsdp", "no such field; did you mean parallelism?"),
    shown_as("+paralelism=fsdp", "paralelism=fsdp: no such field; did you mean parallelism?"),
    mistake("parallelism=fsdpp", "no such option; did you mean fsdp?", "fsdp"),
    mistake("parallelism=null", "no such option; options: cp, ddp, ", "ddp"),
    mistake("parallelism=", "no such option; options: cp, ddp, "),
    mistake("+parallelism=tp", "a group is chosen without +", "parallelism=tp"),
    mistake("++parallelism=tp", "a group is chosen without ++", "parallelism=tp"),
    mistake(
        "~optimizer",
        "every job needs an option of it; would work: optimizer=adam or adamw or ",
        "optimizer=adamw",
    ),
    mistake("model=llama3_7b", "no such option; did you mean llama3_70b?", "llama3_70b"),
    mistake("precision=fp16", "no such option; ", "bf16 fp32"),
    mistake("optimizer=sgd", "no such option; options: adam, adamw, ", "adamw"),
    mistake(
        "optimizer.momentum=0.9", "has no effect with optimizer.kind=adamw; would work: 0.95, or optimizer="
    ),
    mistake(
        "optimizer=lion optimizer.eps=1e-06",
        "has no effect with optimizer.kind=lion; would work: 1e-08, or optimizer=",
    ),
    mistake("schedule=cosin", "no such option; did you mean cosine?", "cosine"),
    mistake("debug=yes", "no such option; options: anomaly, default, ", "deterministic"),
    mistake("experiment=nothing", "no such option; options"),
    *(
        mistake(typed, "has no effect, because Hydra only composes here; would work: hydra.searchpath, ")
        for typed in (
            "hydra/launcher=none",
            "hydra.verbose=true",
            "hydra.sweeper.x=1",
            "hydra={}",
            "+hydra.x.y=1",
        )
    ),
    mistake(
        "model=[llama3_tiny,llama3_8b]",
        "a group takes one option; would work: model=llama3_tiny",
        "llama3_tiny",
    ),
    mistake("model=[a,b]", "a group takes one option; would work: model="),
    shown_as("experiment=[quickstart,nope]", "experiment=nope: no such option; options: "),
    mistake("training.steps", "not an override; would work: field=value"),
    mistake("training.steps:2", "not an override; would work: field=value"),
    mistake("training.steps=[1", "cannot be read"),
    mistake('name="a', "cannot be read"),
    mistake("training.steps=1,2", "has several values; would work: -m "),
    shown_as(
        "training.steps=${training.step}", "training.steps: Interpolation key 'training.step' not found"
    ),
    shown_as("training.steps=???", "training.steps: must be given"),
]

TYPES = [
    mistake("parallelism.tp=two", "must be an integer"),
    shown_as("++parallelism.tp=two", "parallelism.tp=two: must be an integer"),
    mistake("parallelism.tp=2.5", "must be an integer"),
    mistake("parallelism.tp=null", "must be an integer"),
    mistake("parallelism.tp=", "must be an integer"),
    mistake("parallelism.tp=[1,2]", "must be an integer"),
    mistake("parallelism.tp=true", "must be an integer"),
    shown_as("training={steps:many}", "training.steps=many: must be an integer"),
    mistake("cluster.ranks_per_node=all", "must be an integer, or null"),
    mistake("parallelism.sequence_parallel=maybe", "must be true or false"),
    mistake("optimizer.lr=fast", "must be a number"),
    mistake("schedule.decay_ratio=half", "must be a number, or null"),
    mistake("data.paths=corpus", "must be a list of texts, like [a,b]"),
    mistake("data.paths=[null]", "must be a list of texts, like [a,b]"),
    mistake("data.paths=[[a],b]", "must be a list of texts, like [a,b]"),
    mistake("data.paths=[{a:b}]", "must be a list of texts, like [a,b]"),
    mistake("cluster.env={A:[b]}", "must be a mapping of names to text, like {a: b}"),
    mistake("parallelism.pp_modules_per_stage=[[[norm]]]", "must be a list of lists, like [[a,b],[c]]"),
    mistake("model.name=null", "must be text"),
    mistake("model.rope=3", "must be set by its fields, model.rope.theta, "),
    mistake("parallelism.pp_modules_per_stage=[tok_embeddings]", "must be a list of lists, like [[a,b],[c]]"),
    mistake(
        "parallelism.pp_modules_per_stage=[[tok_embeddings],norm]",
        "must be a list of lists, like [[a,b],[c]]",
    ),
]

VALUES = [
    shown_as("name=", "name='': must name a folder inside runs_dir", "name=llama3_debug"),
    mistake("name=/tmp/run", "must name a folder inside runs_dir"),
    mistake("name=../run", "must name a folder inside runs_dir"),
    shown_as(f"name=a/{'x' * 256}", f"name=a/{'x' * 198}... (258 characters): a folder's name has "),
    shown_as("runs_dir=", "runs_dir='': must be non-empty; would work: runs", "runs_dir=runs"),
    mistake("training.steps=0", "must be at least 1"),
    mistake("training.seq_len=0", "must be at least 1", "1"),
    mistake("training.local_batch_size=0", "must be at least 1, or null"),
    mistake("training.global_batch_size=-8", "must be at least 1, or null"),
    mistake(f"training.steps={2**63}", "must be an integer of 64 bits, at most"),
    shown_as("optimizer.eps=1e300", "optimizer.eps=1e+300: must be a finite number of float32, at most"),
    mistake("cluster.network_gbps=inf", "must be a finite number of float32"),
    mistake(
        "compile=on compile.backend=nope",
        "no such choice; would work: inductor, aot_eager, eager, ",
        "inductor aot_eager eager cudagraphs",
    ),
    shown_as("training.max_norm=-1", "training.max_norm=-1.0: must be at least 0", "training.max_norm=0"),
    mistake("training.max_norm=nan", "must be a finite number"),
    mistake("training.gc_interval=-1", "must be at least 0"),
    mistake("validation.interval=-1", "must be at least 0"),
    mistake("validation.steps=0", "must be at least 1"),
    shown_as(
        "validation.interval=5 data.validation_fraction=0",
        "data.validation_fraction=0.0: validation is enabled, but no documents are held out for it",
        "data.validation_fraction=0.02",
    ),
    shown_as(
        "data=local_text data.paths=[] validation.interval=5 data.validation_fraction=0",
        "data.paths=[]: data.kind=local needs at least one file",
    ),
    mistake("precision.param_dtype=fp8", "no such choice", "float32 bfloat16"),
    mistake("precision.reduce_dtype=float16", "no such choice"),
    mistake("precision.linear=int8", "no such choice", "none"),
    mistake(
        "precision.master_dtype=bfloat16",
        "computing in param_dtype=float32",
        "float32",
        "precision=bf16_full",
    ),
    mistake(
        "precision=float8_rowwise precision.emulate=true precision.enable_fsdp_float8_all_gather=true",
        "needs one scale for all shards of a weight",
        "false",
        "precision.linear=float8_tensorwise",
    ),
    mistake(
        "precision=float8_tensorwise precision.emulate=true "
        "precision.precompute_float8_dynamic_scale_for_fsdp=true",
        "applies only to weights gathered",
        "false",
        "precision.enable_fsdp_float8_all_gather=true",
    ),
    mistake(
        "precision=mxfp8 precision.emulate=true precision.auto_filter_small_kn=true",
        "torchao has measurements of float8_tensorwise and float8_rowwise, not of mxfp8",
        "false",
    ),
    mistake("precision.emulate=true", "has no effect, because precision.linear=none"),
    shown_as(
        "precision.filter_fqns=[wq]",
        "precision.filter_fqns=[wq]: has no effect, because precision.linear=none",
    ),
    shown_as(
        "precision=float8_rowwise precision.emulate=true precision.filter_fqns=[wx]",
        "precision.filter_fqns=wx: is in no linear's name",
        "precision.filter_fqns=[wq]",
    ),
    shown_as(
        "precision=float8_rowwise precision.emulate=true precision.auto_filter_small_kn=true",
        "precision.linear=float8_rowwise: no linear is left to convert",
    ),
    shown_as("optimizer.lr=-1", "optimizer.lr=-1.0: must be at least 0"),
    mistake("optimizer.lr=nan", "must be a finite number"),
    mistake("optimizer.lr=inf", "must be a finite number"),
    shown_as("optimizer.beta1=1", "optimizer.beta1=1.0: must be in [0, 1)", "optimizer.beta1=0"),
    mistake("optimizer.beta2=-0.1", "must be in [0, 1)"),
    shown_as("optimizer.eps=0", "optimizer.eps=0.0: must be above 0"),
    mistake("optimizer.weight_decay=-0.1", "must be at least 0"),
    mistake("optimizer.implementation=fast", "no such choice", "auto fused foreach for-loop"),
    mistake("schedule.decay_type=sqroot", "no such choice", "linear sqrt cosine"),
    shown_as("schedule.decay_ratio=2", "schedule.decay_ratio=2.0: must be in [0, 1], or null"),
    shown_as("schedule.min_lr_factor=2", "schedule.min_lr_factor=2.0: must be in [0, 1]"),
    mistake("schedule.warmup_steps=-1", "must be at least 0"),
    mistake(
        "training.steps=1000 schedule.warmup_steps=900",
        "warm-up and decay (200 steps) must fit into training.steps=1000",
        "800",
        "schedule.warmup_steps=900 training.steps=1126",
    ),
    shown_as(
        "schedule=constant schedule.warmup_steps=9 training.steps=3",
        "schedule.warmup_steps=9: warm-up and decay (0 steps) must fit into training.steps=3",
        "training.steps=10",
    ),
    mistake("training.tokens=many", "must be an integer of at least 1", "500M"),
    mistake("training.tokens=0.5", "must be an integer of at least 1", "1e9"),
    mistake("training.tokens=true", "must be an integer or a number or text, or null"),
    mistake(
        "training.steps=8 training.tokens=1M", "replaces training.steps, which is 8", "training.steps=null"
    ),
    mistake("schedule.batch_size={0:8}", "must be a list of mappings, like [{a:1,b:2}]"),
    mistake(
        "schedule.batch_size=[{until_step:5}]",
        "each phase has until_step and sequences, both at least 1",
        "schedule.batch_size=[{until_step:10,sequences:8},{until_step:20,sequences:16}] "
        "training.global_batch_size=16",
    ),
    mistake(
        "schedule.seq_len=[{until_step:0,tokens:8}]", "each phase has until_step and tokens, both at least 1"
    ),
    mistake(
        "schedule.seq_len=[{until_step:9,tokens:8},{until_step:9,tokens:16}]",
        "until_step must rise from phase to phase",
    ),
    shown_as(
        "schedule.batch_size=[{until_step:500,sequences:2}] training.steps=200",
        "schedule.batch_size=[{until_step:500,sequences:2}]: the size after step 500 is never reached: "
        "training.steps is 200; would work: until_step at most 199",
        "training.steps=501",
    ),
    shown_as(
        "schedule.seq_len=[{until_step:5,tokens:8},{until_step:300,tokens:16}] schedule.total_steps=300",
        "schedule.seq_len=[{until_step:5,tokens:8},{until_step:300,tokens:16}]: the size after step 300 "
        "is never reached: schedule.total_steps is 300",
        "schedule.total_steps=301",
    ),
    shown_as(
        "schedule.batch_size=[{until_step:5,sequences:16}]",
        "schedule.batch_size=16: must not exceed training.global_batch_size=8, which applies after all",
    ),
    shown_as(
        "parallelism=ddp schedule.batch_size=[{until_step:5,sequences:3}]",
        "schedule.batch_size=3: must be a multiple of the data-parallel ranks, dp_replicate x dp_shard = 2",
    ),
    shown_as(
        "schedule.batch_size=[{until_step:5,sequences:2}] training.local_batch_size=4",
        "training.local_batch_size=4: must divide a rank's share of every batch: 2, 8 / 1 data-parallel",
        "training.local_batch_size=2",
    ),
    shown_as(
        "schedule.seq_len=[{until_step:5,tokens:48}]",
        "schedule.seq_len=48: must divide training.seq_len=256; would work: 1, 2, 4",
    ),
    shown_as(
        "parallelism=tp parallelism.cp=2 schedule.seq_len=[{until_step:5,tokens:2}]",
        "schedule.seq_len=2: must divide training.seq_len=256 and be a multiple of 4, as the layout and",
    ),
    shown_as(
        "optimizer.in_backward=true training.max_norm=0 schedule.batch_size=[{until_step:5,sequences:4}]",
        "schedule.batch_size=[{until_step:5,sequences:4}]: optimizer.in_backward=true updates in every",
        "schedule.batch_size=[]",
    ),
    mistake("debug.non_finite=ignore", "no such choice", "skip"),
    mistake("debug.max_skipped_steps=0", "must be at least 1"),
    mistake("metrics.console=loud", "no such choice", "plain"),
    mistake("cluster.device=tpu", "no such choice", "cpu"),
    mistake("cluster.kind=cloud", "no such choice", "local"),
    mistake("cluster.ranks_per_node=0", "must be at least 1, or null"),
    mistake("cluster.step_timeout_seconds=0", "must be at least 1"),
    mistake("cluster.accelerator=H1000", "no such choice; would work: A100 SXM 40GB, A100 SXM 80GB, "),
    shown_as("cluster.accelerator=", "cluster.accelerator='': no such choice; would work: A100 SXM 40GB, "),
    mistake(
        "cluster.hardware.memory_gib=96.5",
        "no accelerator is named; would work: cluster.accelerator=NAME",
    ),
    shown_as(
        "cluster.hardware.units=78 cluster.accelerator=H20",
        "cluster.hardware.half_tflops=null: must be given, "
        "because harness/util/hardware.py does not have H20",
    ),
    mistake("cluster.accelerator=L4 cluster.hardware.power_w=0.0", "must be above 0, or null"),
    mistake("cluster.accelerator=L4 cluster.hardware.achieved_half=75.5", "must be in (0, 1], or null"),
    mistake(
        "cluster.accelerator=L4 cluster.hardware.peak_flops=1e15",
        "no such field; did you mean cluster.hardware.half_tflops?",
    ),
    shown_as(
        "cluster.accelerator=L4 cluster.hardware={memory:96}",
        "cluster.hardware.memory: no such field; did you mean cluster.hardware.memory_gib?",
    ),
    mistake("cluster.link_nodes=18", "this machine is one node", "1"),
    mistake(
        "cluster=slurm cluster.network_adapters=4",
        "needs the bandwidth of an adapter, cluster.network_gbps",
        "cluster.network_gbps=400",
    ),
    mistake(
        "cluster=slurm cluster.leaf_nodes=32",
        "has no effect without cluster.oversubscription; would work: cluster.oversubscription=2",
    ),
    mistake("cluster.oversubscription=2.5", "has no effect without cluster.leaf_nodes"),
    mistake("cluster.oversubscription=0.5", "must be at least 1, or null"),
    mistake(
        "cluster=slurm cluster.oversubscription=2 cluster.link_nodes=18 cluster.leaf_nodes=32",
        "must be a multiple of cluster.link_nodes=18",
        "18",
    ),
    mistake("cluster.dollars_per_gpu_hour=0.0", "must be above 0, or null"),
    mistake("cluster.pue=0.9", "must be at least 1, or null"),
    mistake("tokenizer.kind=words", "no such choice"),
]

CHECKPOINTS = [
    mistake("checkpoint.interval=0", "must be at least 1; would work: 500"),
    mistake("checkpoint.async_mode=later", "no such choice; would work: disabled"),
    shown_as(
        "cluster.device=cpu checkpoint=async_pinned",
        "checkpoint.async_mode=async_with_pinned_mem: pinned memory needs a GPU",
    ),
    mistake("checkpoint.export_dtype=bfloat16", "only a model-only last"),
    mistake("checkpoint.last_save_in_hf=true", "Hugging Face's format holds"),
    shown_as(
        "checkpoint.exclude_from_loading=[model]", "checkpoint.exclude_from_loading=model: no such choice"
    ),
    mistake("checkpoint.load_step=-2", "must be at least 0, or -1"),
    mistake("checkpoint.keep_latest_k=-1", "must be at least 0"),
    shown_as("checkpoint.initial_load_in_hf=true", "checkpoint.initial_load_path=null: must be given"),
]

MODELS = [
    mistake("model.n_layers=0", "must be at least 1"),
    mistake("model.n_heads=0", "must be at least 1"),
    mistake("model.n_kv_heads=0", "must be at least 1"),
    mistake(
        "model.n_heads=3",
        "must divide model.dim=256 when model.head_dim is null",
        "16 32 64 128",
        "model.n_heads=3 model.n_kv_heads=3 model.head_dim=16",
    ),
    mistake("model.n_kv_heads=3", "must divide model.n_heads=16", "1 2 4 8 16"),
    mistake("model.head_dim=5", "must be even", "4 6"),
    mistake("model.head_dim=0", "must be even", "2"),
    shown_as("model.dim=48", "model.head_dim=3: must be even", "model.dim=48 model.head_dim=4"),
    shown_as("model.norm_eps=0", "model.norm_eps=0.0: must be above 0"),
    mistake("model.rope.scaling=ntk", "no such choice", "yarn"),
    shown_as("model.rope.factor=0", "model.rope.factor=0.0: must be above 0"),
    shown_as("model.rope.theta=-1", "model.rope.theta=-1.0: must be above 0"),
    shown_as(
        "model.rope.low_freq_factor=5",
        "model.rope.low_freq_factor=5.0: must be below model.rope.high_freq_factor=4.0",
        "model.rope.low_freq_factor=1.0",
    ),
    mistake(
        "model=llama2_7b training.seq_len=8192",
        "must not exceed model.max_seq_len=4096; would work: at most 4096",
        "4096",
    ),
]

LAYOUTS = [
    mistake("parallelism.tp=0", "must be at least 1"),
    mistake("parallelism.pp=-1", "must be at least 1"),
    mistake("parallelism.dp_shard=-2", "must be at least 1, or -1"),
    mistake("parallelism.ep=2", "model=llama3_debug has no experts; would work: 1", "1"),
    mistake(
        f"{MIXTURE} parallelism.dp_shard=4 parallelism.ep=3",
        "must divide model.moe.num_experts=8 and dp_shard x cp = 4; would work: 1, 2, 4",
        "1 2 4",
    ),
    mistake(
        f"{MIXTURE} parallelism.tp=2 parallelism.ep=4",
        "must divide model.moe.num_experts=8 and dp_shard x cp x tp = 2; would work: 1, 2",
        "2",
    ),
    mistake(
        f"{MIXTURE} model.moe.num_experts=12 model.moe.hidden_dim=36 training.global_batch_size=8 "
        "parallelism.dp_shard=8 parallelism.ep=1",
        "12 experts cannot be sharded over 8 ranks, which divide neither their number nor their widths",
        "2",
    ),
    shown_as(
        f"{MIXTURE} parallelism.tp=2 parallelism.sequence_parallel=false",
        "parallelism.expert_tensor_parallel=false: each tensor-parallel rank would route its part of the "
        "sequence, which parallelism.sequence_parallel=false does not split",
        "parallelism.expert_tensor_parallel=true",
        "parallelism.sequence_parallel=true",
    ),
    mistake(
        f"{MIXTURE} model.moe.hidden_dim=33 parallelism.expert_tensor_parallel=true parallelism.tp=2",
        "must divide model.moe.hidden_dim=33; would work: 1",
        "1",
    ),
    shown_as(
        "model=gpt_oss_debug parallelism.cp=2",
        "parallelism.cp_method=ring: its kernels support the causal mask only, and model=gpt_oss_debug has "
        "model.attention.window; would work: ulysses",
        "parallelism.cp_method=ulysses",
    ),
    shown_as(
        f"{MIXTURE} compile=on parallelism.dp_shard=2 parallelism.ep=2 activation_checkpoint=selective_op",
        "activation_checkpoint.mode=selective_op: saves operations by name, which are not visible in blocks "
        "with experts on other ranks, because these are compiled in pieces",
        "activation_checkpoint.mode=full",
        "compile=off",
    ),
    mistake("model.family=gemma", "no such choice", "llama"),
    mistake("model.activation=gelu", "no such choice", "swiglu"),
    mistake("model.attention.kind=mha", "no such choice", "gqa"),
    mistake(
        "model.attention.window=8 model.attention.chunk=8",
        "is one way to attend locally, and model.attention.window another",
    ),
    mistake(
        "model.attention.global_every_nth_layer=2",
        "changes nothing: without window or chunk no layer is",
        "null",
    ),
    mistake("model.attention.kv_lora_rank=8", "is of latent attention, and model.attention.kind is gqa"),
    mistake(f"{MIXTURE} model.moe.top_k=9", "must not exceed the 8 experts"),
    mistake("model.mtp.depth=2", "no such choice; would work: 0, 1"),
    shown_as(
        "model.mtp.depth=1 model.mtp.loss_weight=0",
        "model.mtp.loss_weight=0.0: must be positive; would work: 0.3, or model.mtp.depth=0",
        "model.mtp.loss_weight=0.3",
        "model.mtp.depth=0",
    ),
    mistake(
        "model.mtp.depth=1 parallelism.pp=2",
        "multi-token prediction uses the embedding and the output projection, and the",
        "1",
        "parallelism.pp=2 model.mtp.depth=0",
    ),
    mistake(f"{MIXTURE} model.moe.num_groups=3", "must divide model.moe.num_experts=8"),
    mistake(f"{MIXTURE} model.moe.score=tanh", "no such choice", "sigmoid"),
    mistake(
        f"{MIXTURE} model.moe.first_dense_layers=4",
        "leaves no block of model.n_layers=4 with experts; would work: 0",
        "0",
    ),
    mistake("parallelism.reshard_after_forward=often", "no such choice", "default always never"),
    mistake("model=llama3_8b parallelism.tp=3", "must divide model.n_heads=32", "1 2 4 8"),
    mistake("model=llama3_8b parallelism.tp=16", "must divide model.n_kv_heads=8", "8"),
    mistake(
        "model.ffn_hidden_dim=770 parallelism.tp=4",
        "must divide model.ffn_hidden_dim=770; would work: 1, 2",
        "2",
    ),
    mistake(
        "training.seq_len=100 parallelism.tp=3",
        "must divide model.n_heads=16, model.n_kv_heads=16; would work: 1, 2, 4",
        "4",
    ),
    mistake(
        "parallelism.tp=4 training.seq_len=62",
        "sequence parallel needs a multiple of parallelism.tp=4",
        "60",
        "training.seq_len=62 parallelism.sequence_parallel=false",
    ),
    mistake(
        "parallelism.tp=4 training.seq_len=3", "sequence parallel needs a multiple of parallelism.tp=4", "4"
    ),
    mistake(
        "parallelism.cp=2 training.seq_len=62",
        "must be a multiple of 4: two pieces for each of parallelism.cp=2 ranks",
        "60",
        "training.seq_len=62 parallelism.cp_load_balance=false",
    ),
    mistake(
        "parallelism.cp=4 parallelism.cp_method=ulysses training.seq_len=254",
        "must be a multiple of 4: a piece for each of parallelism.cp=4 ranks",
        "252",
    ),
    mistake(
        "parallelism.cp=2 parallelism.tp=4 training.seq_len=100",
        "must be a multiple of 8: two pieces for each of parallelism.cp=2 ranks, each split over "
        "parallelism.tp=4",
        "96",
        "training.seq_len=100 parallelism.sequence_parallel=false",
    ),
    mistake("parallelism.cp=2 parallelism.cp_method=rings", "no such choice", "ring ulysses"),
    mistake("parallelism.cp_rotate_method=alltoal", "no such choice", "alltoall"),
    mistake(
        "parallelism.cp_method=ulysses parallelism.cp=2 parallelism.cp_rotate_method=alltoall",
        "applies to the ring only, and parallelism.cp_method is ulysses",
        "allgather",
        "parallelism.cp_rotate_method=alltoall parallelism.cp_method=ring",
    ),
    mistake(
        "parallelism.cp_method=ulysses parallelism.cp=2 parallelism.cp_load_balance=false",
        "applies to the ring only",
        "true",
    ),
    mistake(
        "model=llama3_8b parallelism.tp=2 parallelism.cp_method=ulysses parallelism.cp=8",
        "ulysses exchanges heads: it must divide model.n_kv_heads=8 / parallelism.tp=2",
        "4",
        "parallelism.cp=8 parallelism.cp_method=ring",
    ),
    mistake(
        "parallelism.cp=2 data.attend_across_documents=false",
        "parallelism.cp=2 with cp_method=ring supports the causal mask",
        "true",
        "data.attend_across_documents=false parallelism.cp_method=ulysses",
    ),
    mistake(
        "data=synthetic tokenizer=bytes data.attend_across_documents=false",
        "synthetic data has no documents",
        "true",
    ),
    shown_as(
        "data=chat data.paths=[a.jsonl] model=llama4_debug model.vocab_size=2048 training.seq_len=17",
        "training.seq_len=17: model.attention.nope_temperature counts positions from the beginning",
        "training.seq_len=15",
    ),
    shown_as(
        "data=chat data.paths=[a.jsonl] training.seq_len=16 schedule.seq_len=[{until_step:5,tokens:8}]",
        "schedule.seq_len=[{until_step:5,tokens:8}]: shorter sequences are pieces of samples, which would "
        "cut the conversations of data.kind=chat",
    ),
    shown_as(
        "data=chat data.paths=[a.jsonl] parallelism.cp=2",
        "data.attend_across_documents=false: parallelism.cp=2 with cp_method=ring",
        "parallelism.cp_method=ulysses",
    ),
    mistake("training.attention=flash", "no such choice; would work: sdpa, flex, varlen", "sdpa"),
    mistake(
        "cluster.device=cpu training.attention=flex",
        "trains on GPUs only, and the ranks compute on CPUs",
        "sdpa",
    ),
    mistake("training.attention=flex", "trains on GPUs only, and the ranks compute on CPUs"),
    mistake(
        "cluster=slurm model=llama3_tiny training.attention=flex",
        "needs a head dimension of at least 16; model=llama3_tiny has 8; would work: sdpa",
        "sdpa",
        "training.attention=flex model.head_dim=16",
    ),
    mistake(
        "cluster=slurm training.attention=varlen",
        "flash attention over documents needs 16-bit formats, and precision.param_dtype is float32",
        "training.attention=varlen precision=bf16",
        "flex sdpa",
    ),
    mistake(
        "cluster=slurm parallelism.cp=2 training.attention=flex",
        "parallelism.cp=2 with cp_method=ring has kernels of its own",
        "sdpa",
        "training.attention=flex parallelism.cp_method=ulysses",
    ),
    mistake(
        "cluster.ranks_per_node=8 parallelism.tp=2 parallelism.dp_shard=3",
        "the degrees multiply to 6 (dp_shard=3 x tp=2), but there are 8 ranks",
        "4 -1",
        "parallelism.dp_shard=3 cluster.ranks_per_node=6 training.global_batch_size=null",
    ),
    shown_as(
        "cluster.ranks_per_node=8 parallelism.dp_replicate=3",
        "parallelism.dp_shard=1: the degrees multiply to 3 (dp_replicate=3), but there are 8 ranks",
        "cluster.ranks_per_node=3 parallelism.dp_replicate=3 training.global_batch_size=null",
    ),
    mistake(
        "parallelism.tp=2 parallelism.pp=2 cluster.ranks_per_node=6 parallelism.dp_shard=-1",
        "pp=2 x tp=2 does not divide the world size 6",
        "parallelism.dp_shard=-1 cluster.ranks_per_node=4",
    ),
    mistake(
        "parallelism=ddp training.global_batch_size=7",
        "must be a multiple of the data-parallel ranks, dp_replicate x dp_shard = 2; would work: 6, 8, or "
        "1, 7 data-parallel ranks",
        "6 8",
        "training.global_batch_size=7 parallelism.dp_replicate=1",
        "training.global_batch_size=7 parallelism.dp_replicate=7",
    ),
    mistake(
        "parallelism=ddp training.local_batch_size=4 training.global_batch_size=15",
        "must be a multiple of the data-parallel ranks",
        "8 16",
    ),
    mistake(
        "parallelism=hsdp training.global_batch_size=2",
        "must be a multiple of the data-parallel ranks, dp_replicate x dp_shard = 4; would work: 4, or",
        "4",
    ),
    mistake(
        "parallelism=ddp training.global_batch_size=8 training.local_batch_size=3",
        "must divide training.global_batch_size=8 / 2 data-parallel ranks = 4",
        "1 2 4",
    ),
]

PP = "parallelism.pp=2 training.global_batch_size=8"
PIPELINES = [
    mistake(
        "parallelism=pp parallelism.pp_schedule=1f1b",
        "no such choice; would work: GPipe, 1F1B, ",
        "GPipe 1F1B Interleaved1F1B LoopedBFS InterleavedZeroBubble ZBVZeroBubble DualPipeV",
    ),
    mistake("parallelism.pp_schedule=ZB", "no such choice"),
    mistake(
        "training.global_batch_size=32 parallelism.pp=9",
        "9 stages are too many for model.n_layers=6 (embedding and head weigh 1 and 1); would work: at most "
        "8",
        "8",
    ),
    mistake(
        "training.global_batch_size=60 parallelism.pp_schedule=LoopedBFS parallelism.pp=5",
        "10 stages are too many for model.n_layers=6 (embedding and head weigh 1 and 1); would work: at "
        "most 4",
        "4",
    ),
    mistake(
        "model=llama32_1b training.global_batch_size=8 parallelism.pp=2",
        "the model ties its output projection to the embedding table",
        "1",
        "parallelism.pp=2 model.tied_embeddings=false",
    ),
    mistake(f"{PP} parallelism.pp_microbatch_size=3", "must divide training.local_batch_size=8", "1 2 4"),
    mistake(f"{PP} parallelism.pp_microbatch_size=0", "must be at least 1"),
    # 1F1B and DualPipeV: as many microbatches as stages; the interleaved ones: whole rounds.
    shown_as(
        "parallelism.pp=4 training.global_batch_size=2",
        "training.local_batch_size=2: with parallelism.pp_microbatch_size=1 the number of microbatches is "
        "2, but 1F1B needs at least as many microbatches as there are stages, 4",
        "training.local_batch_size=4 training.global_batch_size=4",
    ),
    mistake(
        "parallelism.pp=2 training.global_batch_size=16 parallelism.pp_microbatch_size=4 "
        "training.local_batch_size=4",
        "with parallelism.pp_microbatch_size=4 the number of microbatches is 1, but 1F1B",
        "8 16",
        "training.local_batch_size=4 parallelism.pp_microbatch_size=1",
        "training.local_batch_size=4 parallelism.pp_microbatch_size=2",
    ),
    shown_as(
        "parallelism.pp=2 parallelism.dp_shard=2 parallelism.pp_schedule=DualPipeV "
        "training.global_batch_size=4",
        "training.local_batch_size=2: with parallelism.pp_microbatch_size=1 the number of microbatches is "
        "2, but DualPipeV needs at least as many microbatches as there are stages, 4",
        "training.local_batch_size=4 training.global_batch_size=8",
    ),
    *(
        shown_as(
            f"parallelism.pp=2 parallelism.pp_schedule={schedule} training.global_batch_size=5",
            "training.local_batch_size=5: with parallelism.pp_microbatch_size=1 "
            "the number of microbatches is 5, but "
            f"{schedule} runs 5 microbatches over parallelism.pp=2 in 2 rounds, and needs a multiple of 2",
            "training.global_batch_size=5 training.local_batch_size=1",
            "training.global_batch_size=5 parallelism.pp_microbatch_size=5",
            "training.global_batch_size=6",
        )
        for schedule in ("Interleaved1F1B", "InterleavedZeroBubble")
    ),
    mistake(
        f"{PP} parallelism.pp_layers_per_stage=3",
        "the number of stages, 3, must be a multiple of parallelism.pp=2",
        "4 5 6 7 null",
    ),
    mistake(
        f"{PP} parallelism.pp_layers_per_stage=8",
        "the number of stages, 1, must be a multiple of parallelism.pp=2",
        "4 5 6 7 null",
    ),
    mistake(f"{PP} parallelism.pp_layers_per_stage=0", "must be at least 1, or null", "null"),
    mistake(
        f"{PP} parallelism.pp_schedule=LoopedBFS parallelism.pp_first_stage_less_layers=10 "
        "parallelism.pp_layers_per_stage=1",
        "17 stages are too many for model.n_layers=6 (embedding and head weigh 10 and 1)",
        "3 null",
    ),
    mistake(f"{PP} parallelism.pp_first_stage_less_layers=-1", "must "),
    mistake(f"{PP} parallelism.pp_last_stage_less_layers=-9", "must "),
    mistake(
        f"{PP} parallelism.pp_first_stage_less_layers=9999999967", "must be at least 0 and at most 12, twice"
    ),
    shown_as(
        f"{PP} parallelism.pp_layers_per_stage=2",
        "parallelism.pp_schedule=1F1B: takes one stage per rank, and the split gives 2",
        *(
            f"parallelism.pp_layers_per_stage=2 parallelism.pp_schedule={name}"
            for name in (
                "Interleaved1F1B",
                "LoopedBFS",
                "InterleavedZeroBubble",
                "ZBVZeroBubble",
                "DualPipeV",
            )
        ),
        *(f"parallelism.pp_layers_per_stage={n}" for n in (4, 5, 6, 7, "null")),
    ),
    mistake(
        f"{PP} parallelism.pp_layers_per_stage=1 parallelism.pp_schedule=ZBVZeroBubble",
        "takes two stages per rank, and the split gives 4",
        "Interleaved1F1B LoopedBFS InterleavedZeroBubble",
        "parallelism.pp_schedule=ZBVZeroBubble parallelism.pp_layers_per_stage=2",
    ),
    mistake(
        f"{PP} parallelism.pp_layers_per_stage=4 parallelism.pp_schedule=LoopedBFS",
        "takes two or more stages per rank, and the split gives 1",
        "GPipe 1F1B",
        "parallelism.pp_schedule=LoopedBFS parallelism.pp_layers_per_stage=1",
        "parallelism.pp_schedule=LoopedBFS parallelism.pp_layers_per_stage=2",
    ),
]

TWO = f"{PP} model.n_layers=2 parallelism.pp_modules_per_stage="
NAMED = [
    mistake(
        f"{TWO}[[tok_embeddings,layer.0],[layers.1,norm,output]]",
        "names layer.0, which is not a module, did you mean layers.0?",
    ),
    mistake(
        f"{TWO}[[tok_embeddings,layers.0],[layers.1,layers.2,norm,output]]",
        "names layers.2, which is not a module",
    ),
    mistake(f"{TWO}[[tok_embeddings,layers.0],[layers.1,output]]", "leaves out norm"),
    mistake(
        f"{TWO}[[tok_embeddings,layers.1],[layers.0,norm,output]]",
        "must name every module once, in the order of the model",
    ),
    mistake(
        f"{TWO}[[tok_embeddings,layers.0,layers.0],[layers.1,norm,output]]", "must name every module once"
    ),
    mistake(f"{TWO}[[tok_embeddings,layers.0,layers.1,norm,output],[]]", "has a stage without a module"),
    mistake(
        f"{TWO}[[tok_embeddings,layers.0],[layers.1],[norm,output]]",
        "the number of stages, 3, must be a multiple of parallelism.pp=2; would work: 2 stages",
    ),
    shown_as(
        f"{TWO}[[tok_embeddings],[layers.0],[layers.1],[norm,output]]",
        "parallelism.pp_schedule=1F1B: takes one stage per rank, and the split gives 2",
    ),
]

TRAINING = [
    shown_as(typed, start)
    for typed, start in re.findall(
        r"^(\S.*)\n    (.*)$",
        r"""
debug=anomaly parallelism=fsdp_tp
    debug.anomaly=true: anomaly mode cannot inspect tensors that parallelism.tp=2 shards; would work:
compile=on debug=anomaly
    debug.anomaly=true: compiled blocks cannot be inspected; would work: compile=off
compile=on debug=nan
    debug.nan=true: compiled blocks cannot be inspected; would work: compile=off
training.observers=[sumz]
    training.observers=sumz: no such choice; would work: phases, profiler, flight_recorder, nan_watch,
training.matmul_precision=low
    training.matmul_precision=low: no such choice; would work: highest, high
metrics.log_interval=0
    metrics.log_interval=0: must be at least 1
metrics.warmup_steps=-1
    metrics.warmup_steps=-1: must be at least 0
metrics.wandb_mode=onlin
    metrics.wandb_mode=onlin: no such choice; would work: online, offline, disabled, null
profiling=on profiling.interval=3
    profiling.interval=3: must hold profiling.warmup + profiling.active = 4 steps; would work: 4 or more
training.steps=12 profiling=on profiling.interval=20
    profiling.interval=20: a run of training.steps=12 would write no trace; would work: at most 12
profiling=on profiling.ranks=[0,1]
    profiling.ranks=[0,1]: must be ranks of this job, which has 1; would work: [0] to [0]
profiling=on profiling.active=0
    profiling.active=0: must be at least 1
cluster.device=cpu profiling=on profiling.memory_snapshot=true
    profiling.memory_snapshot=true: snapshots need a GPU, and cluster.device=cpu; would work: false, or
activation_checkpoint.mode=some
    activation_checkpoint.mode=some: no such choice; would work: none, full, selective_op, selective_layer,
activation_checkpoint=memory_budget
    activation_checkpoint.mode=memory_budget: is applied by the compiler's partitioner, and blocks are not
compile=on compile.components=[loss] activation_checkpoint=memory_budget
    activation_checkpoint.mode=memory_budget: is applied by the compiler's partitioner, and blocks are not
activation_checkpoint.memory_budget=2
    activation_checkpoint.memory_budget=2.0: must be in [0, 1]
activation_checkpoint.every_nth_layer=0
    activation_checkpoint.every_nth_layer=0: must be at least 1
parallelism=pp parallelism.pp_schedule=ZBVZeroBubble activation_checkpoint=selective_op
    activation_checkpoint.mode=selective_op: saves results for one backward pass, and the pipeline schedule
compile=on compile.components=[head]
    compile.components=head: no such choice; would work: blocks, loss
compile=on compile.components=[]
    compile.components=[]: nothing is left to compile; would work: compile=off
parallelism.async_tp=true
    parallelism.async_tp=true: needs parallelism.tp and sequence_parallel; would work:
parallelism=tp parallelism.async_tp=true
    parallelism.async_tp=true: is a pass of the compiler, and blocks are not compiled by inductor; would
cluster.device=cpu parallelism=tp compile=on parallelism.async_tp=true
    parallelism.async_tp=true: needs GPUs with symmetric memory, and the ranks compute on CPUs; would work:
cluster=slurm_h100 cluster.ranks_per_node=1 parallelism=tp compile=on parallelism.async_tp=true
    parallelism.async_tp=true: needs tensor-parallel ranks on one node; there are 1 ranks per node; would
optimizer.in_backward=true
    training.max_norm=1.0: optimizer.in_backward=true updates during backward, and the norm of all gradients
training.max_norm=0 optimizer.in_backward=true parallelism=pp
    parallelism.pp=2: optimizer.in_backward=true updates during backward, and a pipeline adds the gradients
training.max_norm=0 optimizer.in_backward=true debug.non_finite=skip
    debug.non_finite=skip: optimizer.in_backward=true updates during backward, and an update cannot be taken
training.max_norm=0 training.global_batch_size=4 optimizer.in_backward=true training.local_batch_size=1
    training.local_batch_size=1: optimizer.in_backward=true updates in every backward pass, and a step has 4;
precision=float8_rowwise precision.emulate=true precision.filter_fqns=[wk] training.loss_chunks=4
    training.loss_chunks=4: chunks multiply the output projection in param_dtype, not in float8_rowwise;
model=llama3_tiny precision=mxfp8 precision.emulate=true precision.filter_fqns=[moe.experts]
    precision.filter_fqns=moe.experts: is in no linear's name; would work: [output], [w1], [w2], [w3], [wk],
parallelism=pp precision=float8_rowwise precision.emulate=true training.seq_len=40
    training.seq_len=40: a linear takes 1 x 40 tokens at once, and float8_rowwise needs a multiple of 16;
optimizer.groups=[{match:nope,lr_factor:2}]
    optimizer.groups[0].match=nope: matches the name of no tensor; would work: a part of a name, such as
optimizer.groups=[{match:wq,lr:2}]
    optimizer.groups[0].lr=2: no such field; optimizer.groups[0] has: betas, kind, lr_factor, match,
optimizer.groups=[{match:'(',lr_factor:2}]
    optimizer.groups[0].match=(: no regular expression: missing ), unterminated subpattern at position 0;
optimizer.groups=[{lr_factor:2}]
    optimizer.groups[0].match=null: must be given
optimizer.groups=[{match:wq}]
    optimizer.groups[0]={match:wq}: changes nothing; would work: {match: wq, weight_decay: 0}
optimizer.groups=[{match:wq,lr_factor:-1}]
    optimizer.groups[0].lr_factor=-1: must be at least 0, or null
optimizer.groups=[{match:wq,betas:[0.5]}]
    optimizer.groups[0].betas=[0.5]: must be two numbers; would work: [0.9,0.95]
optimizer.groups=[{match:wq,betas:[0.5,1]}]
    optimizer.groups[0].betas=1: must be in [0, 1), or null
optimizer.groups=[{match:wq,kind:sgd}]
    optimizer.groups[0].kind=sgd: no such choice; would work: adamw, adam, lion, muon, null, or install the
optimizer.groups=[{match:norm,kind:muon}]
    optimizer.groups[0].kind=muon: muon updates matrices, and norm matches the vector
optimizer=muon optimizer.groups=[{match:wq,betas:[0,0]}]
    optimizer.groups[0].betas=[0,0]: muon updates all these tensors, and has no betas; would work:
optimizer.groups=[{match:wq,kind:[lion]}]
    optimizer.groups[0].kind=[lion]: must be text, or null
optimizer=lion optimizer.groups=[{match:wq,kind:muon}] optimizer.eps=1e-3
    optimizer.eps=0.001: has no effect with optimizer.kind=lion; would work: 1e-08, or optimizer=adamw
optimizer.groups=[{match:wq,kind:muon}] optimizer.state_dtype=bfloat16 optimizer.momentum=0.999
    optimizer.momentum=0.999: a running mean in bfloat16 (eight bits) would lose its updates to rounding;
optimizer=muon optimizer.in_backward=true
    optimizer.in_backward=true: updates single shards during backward, and muon updates complete matrices;
optimizer=lion optimizer.implementation=foreach
    optimizer.implementation=foreach: torch has no lion; would work: auto
optimizer.state_dtype=bfloat16 optimizer.groups=[{match:wq,betas:[0.9,0.999]}]
    optimizer.groups[0].betas=[0.9,0.999]: a running mean in bfloat16 (eight bits) would lose its updates to
optimizer=muon optimizer.state_dtype=bfloat16 optimizer.momentum=0.999
    optimizer.momentum=0.999: a running mean in bfloat16 (eight bits) would lose its updates to rounding;
optimizer.state_dtype=float16
    optimizer.state_dtype=float16: no such choice; would work: float32, bfloat16, null
optimizer.state_dtype=bfloat16 optimizer.beta2=0.999
    optimizer.beta2=0.999: a running mean in bfloat16 (eight bits) would lose its updates to rounding; would
precision=bf16_full optimizer.implementation=fused
    optimizer.implementation=fused: torch's AdamW does not update bfloat16 parameters or state in float32;
precision=bf16_full optimizer.state_dtype=float32 optimizer.implementation=foreach
    optimizer.implementation=foreach: torch's AdamW does not update bfloat16 parameters or state in float32;
model=llama3_tiny model.mup.base_dim=20
    model.mup.base_dim=20: model.n_heads=8 x 20 / 64 is no integer; would work: a multiple of 16, or
model=llama3_tiny model.mup.base_widths={n_heads:2}
    model.mup.base_widths={n_heads:2}: has no effect without model.mup.base_dim; would work: {}, or
model=llama3_tiny model.mup.base_dim=32 model.mup.base_widths={depth:2}
    model.mup.base_widths=depth: no such width of model=llama3_tiny; would work: n_heads, n_kv_heads,
model=llama3_tiny model.mup.base_dim=32 model.mup.base_widths={n_kv_heads:3}
    model.mup.base_widths={n_kv_heads:3}: makes a base model that is not possible: model.n_kv_heads=3: must
model.mup.base_dim=0
    model.mup.base_dim=0: must be at least 1, or null
model=llama3_tiny model.mup.base_dim=32 optimizer=adam optimizer.weight_decay=0.1
    optimizer.weight_decay=0.1: Adam's weight decay is a part of the gradient, for which muP has no rule;
model=llama3_tiny model.mup.base_dim=32 optimizer.kind=adam optimizer.weight_decay=0.1
    optimizer.weight_decay=0.1: Adam's weight decay is a part of the gradient, for which muP has no rule;
""",
        re.MULTILINE,
    )
]
MISTAKES = [*FIELDS_AND_GROUPS, *TYPES, *VALUES, *CHECKPOINTS, *MODELS, *LAYOUTS, *PIPELINES, *NAMED]
MISTAKES += TRAINING


pytestmark = pytest.mark.usefixtures("alone")


def message(overrides: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        compose_job(overrides)
    assert caught.value.exit_code == EXIT_USER
    return str(caught.value)


def test_a_job_with_parts_of_its_own() -> None:
    """Errors about a verb's own fields have the same form."""
    for typed, start in (
        ("parity.steps=few", "parity.steps=few: must be an integer"),
        ("parity.step=3", "parity.step=3: no such field; did you mean parity.steps?"),
    ):
        with pytest.raises(UserError, match=f"^{re.escape(start)}$"):
            compose_job([typed], config_name="parity", schema=ParityJob)
    done = python("-m", "harness", "parity", "parity.steps=few")
    assert (done.returncode, done.stderr) == (EXIT_USER, "error: parity.steps=few: must be an integer\n")


@pytest.mark.parametrize(
    ("against", "start"),
    [
        ("parallelism.tp=3", "against: parallelism.tp=3: must divide model.n_heads=16, "),
        ("parallelism.tpp=2", "against: parallelism.tpp=2: no such field; did you mean parallelism.tp?"),
        ("tp", "against: tp: not an override; would work: field=value"),
        ("parallelism.tp=1", "against=parallelism.tp=1: does not change the job; would work: "),
        ("", "against='': does not change the job; would work: "),
        ("name='a", "against=name='a: cannot be read: No closing quotation; would work: "),
        ("search=true", "against=search=true: compares plans, and search asks for more; would work: "),
    ],
)
def test_a_job_to_compare_with(against: str, start: str) -> None:
    typed = [f"against={against}"]
    job = compose_job(typed, config_name="plan", schema=PlanJob)
    with pytest.raises(UserError, match=f"^{re.escape(start)}") as caught:
        job_against(job, typed)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("top=0", "top=0: must be at least 1"),
        ("search=true rehearse=true", "rehearse=true: cannot be .*; would work: search=false"),
        ("sweep_file=a.yaml", "sweep_file=a.yaml: is used by a search only; would work: search=true"),
        ("headroom=0.1", "headroom=0.1: is used by a search only; would work: search=true"),
        ("search=true sweep_file=a.txt", "sweep_file=a.txt: must end in .yaml; .*: plan.yaml"),
        ("picture=plan.pdf", "picture=plan.pdf: must end in .png; would work: plan.png"),
        ("picture=nowhere/plan.png", "picture=nowhere/plan.png: there is no folder nowhere; .*"),
        ("calibrate=r search=true", "calibrate=r: .* plans no job; .*: calibrate alone, then search without"),
        ("calibrate=r calibration=nowhere/c.json", "calibration=nowhere/c.json: there is no folder .*"),
        *(
            (f"against=seed=2 {other}=true", f"against=seed=2: compares the .*: against without {other}")
            for other in ("search", "rehearse")
        ),
        ("against=seed=2 picture=a.png", "against=seed=2: compares the .*: against without picture"),
    ],
)
def test_options_of_a_plan(typed: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}$"):
        compose_job(typed.split(), config_name="plan", schema=PlanJob)


def test_degrees_that_split_neither_heads_nor_sequence_are_not_named() -> None:
    assert message(["training.seq_len=100", "parallelism.tp=3"]).endswith("would work: 1, 2, 4")
    plain = message(["training.seq_len=100", "parallelism.sequence_parallel=false", "parallelism.tp=3"])
    assert plain.endswith("would work: 1, 2, 4, 8, 16")


def contains_value(error: str, value: str) -> bool:
    """Whether a message contains this value, not only as a part of another one."""
    return re.search(rf"(?<![\w.-]){re.escape(value)}(?![\w.]\w)", error) is not None


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.typed)
def test_each_mistake_is_one_line(mistake: Mistake) -> None:
    *right, wrong = mistake.typed.split(" ")
    error = message([*right, wrong])
    assert error.startswith(mistake.start)
    assert "\n" not in error
    for instead in mistake.works:
        compose_job([*right, *instead.split(" ")])
        new = [
            override.split("=") for override in instead.split(" ") if override not in mistake.typed.split()
        ]
        assert any(contains_value(error, value) or f"{field} set" in error for field, value in new), instead


def schedule_file(folder: Path, rows: str) -> str:
    path = folder / "schedule.csv"
    path.write_text(rows)
    return f"parallelism.pp_schedule_csv={path}"


GOOD_ROWS = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize(
    ("rows", "rule"),
    [
        (GOOD_ROWS + "2F0,2B0,2F1,2B1\n", "has 3 rows; needs one per pipeline rank, parallelism.pp=2"),
        ("0F0,0B0\n1F0,1X0\n", "cell '1X0' is not <stage><F|B|I|W><microbatch>, like 0F0"),
        ("0F0,0B0\n1F,1B0\n", "cell '1F' is not <stage><F|B|I|W><microbatch>, like 0F0"),
        ("0F0,0B0\n1F0,1SEND_B0,1B0\n", "cell '1SEND_B0' is not <stage>"),
        ("0F0,0B0\n2F0,2B0\n", "stages [0, 2] are not 0, 1, 2, ... each on one rank"),
        ("0F0,0B0\n0F1,0B1\n", "stages [0, 0] are not 0, 1, 2, ... each on one rank"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0\n", "every stage needs one F of each of the microbatches 0 to 1"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0\n", "every stage and microbatch needs one B, or one I and one W"),
        ("0F0,0B0\n1F0,1I0\n", "every stage and microbatch needs one B, or one I and one W"),
        ("0F0,0B0,0W0\n1F0,1B0\n", "every stage and microbatch needs one B, or one I and one W"),
        ("0F0,0B0\n1F0,1W0,1I0\n", "every stage and microbatch needs one B, or one I and one W after it"),
        ("0F0,0F0,0B0\n1F0,1B0\n", "every stage needs one F of each of the microbatches 0 to 0"),
        ("0F0,0B0,0B0\n1F0,1B0\n", "every stage and microbatch needs one B, or one I and one W"),
        ("0F0,1B0\n1F0,0B0\n", "stages [0, 0, 1, 1] are not 0, 1, 2, ... each on one rank"),
        (
            "0F0,0B0\n1B0,1F0\n",
            "the ranks wait for each other, or for themselves, for ever: 0B0 for 1B0, 1B0 for 1F0;",
        ),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
            "the ranks wait for each other, or for themselves, for ever: 0B0 for 1B0, 1F1 for 0F1;",
        ),
    ],
)
def test_csv_schedule_malformed(rows: str, rule: str, tmp_path: Path) -> None:
    typed = schedule_file(tmp_path, rows)
    error = message(["parallelism.pp=2", "training.global_batch_size=2", typed])
    assert error.startswith(f"{typed}: {rule}")
    assert "\n" not in error


def test_csv_schedule_missing() -> None:
    error = message([*PP.split(), "parallelism.pp_schedule_csv=nowhere.csv"])
    assert error == "parallelism.pp_schedule_csv=nowhere.csv: no such file"


def test_csv_schedule_of_another_batch(tmp_path: Path) -> None:
    typed = schedule_file(tmp_path, GOOD_ROWS)
    path = typed.split("=")[1]
    base = ["parallelism.pp=2", typed, "training.global_batch_size=4"]
    error = message(base)
    assert error == (
        "training.local_batch_size=4: with parallelism.pp_microbatch_size=1 "
        "the number of microbatches is 4, but "
        f"{path} runs 2 microbatches; would work: 2, or parallelism.pp_microbatch_size=2, "
        "or 2 with training.global_batch_size=2"
    )
    for works in ("training.local_batch_size=2", "parallelism.pp_microbatch_size=2"):
        compose_job([*base, works])
    compose_job([*base[:2], "training.global_batch_size=2", "training.local_batch_size=2"])


def test_csv_schedule_with_another_number_of_stages(tmp_path: Path) -> None:
    typed = schedule_file(tmp_path, GOOD_ROWS)
    three = "parallelism.pp_modules_per_stage=[[tok_embeddings],[layers.0],[norm,output]]"
    error = message(["parallelism.pp=2", "training.global_batch_size=2", "model.n_layers=1", three, typed])
    assert error == f"{typed}: runs 2 stages, but parallelism.pp_modules_per_stage makes 3"
    rows = ["".join(f"{stage}F0," for stage in stages) for stages in ((0, 2), (1, 3))]
    back = ["".join(f"{stage}B0," for stage in stages) for stages in ((2, 0), (3, 1))]
    typed = schedule_file(tmp_path, "\n".join(f + b for f, b in zip(rows, back, strict=True)))
    error = message(["parallelism.pp=2", "training.global_batch_size=1", "model.n_layers=1", typed])
    assert error == f"{typed}: runs 4 stages, but model.n_layers=1 makes at most 3"


@pytest.mark.parametrize(
    ("file", "text", "typed", "start"),
    [
        ("model/mine", "dimm: 3", "model=mine", "model.dimm: no such field; did you mean model.dim?"),
        ("model/mine", "dim: wide", "model=mine", "model.dim=wide: must be an integer (in model/mine.yaml)"),
        ("parallelism/mine", "tp: null", "parallelism=mine", "parallelism.tp=null: must be an integer (in "),
        (
            "model/mine",
            "name: mine\ndim: 64\nn_layers: 2\nn_heads: 4\nmax_seq_len: 64",
            "model=mine",
            "model.ffn_hidden_dim, model.n_kv_heads, model.vocab_size: must be given",
        ),
        ("model/mine", "dim: 64", "model=mine", "model.ffn_hidden_dim, model.max_seq_len, "),
        (
            "experiment/mine",
            "# @package _global_\ntraining:\n  stepz: 3",
            "experiment=mine",
            "training.stepz: no such field; did you mean training.steps? (in experiment/mine.yaml)",
        ),
        (
            "experiment/mine",
            "training:\n  steps: 3",
            "experiment=mine",
            "In 'experiment/mine': the file must begin with '# @package _global_'",
        ),
        (
            "experiment/mine",
            "# @package _global_\ndefaults:\n  - override /parallelism: fsdpp",
            "experiment=mine",
            "parallelism=fsdpp: no such option; options: cp, ddp, ",
        ),
        (
            "experiment/mine",
            "# @package _global_\ndefaults:\n  - /parallelism: fsdp",
            "experiment=mine",
            "parallelism: two files choose an option of this group; would work: '- override /parallelism: ",
        ),
    ],
)
def test_mistakes_in_files(file: str, text: str, typed: str, start: str, tmp_path: Path) -> None:
    written = tmp_path / f"{file}.yaml"
    written.parent.mkdir(exist_ok=True)
    written.write_text(text + "\n")
    with using_folders([tmp_path]):
        error = message([typed])
    assert error.startswith(start)
    assert "\n" not in error


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (
            ["model=llama3_8b", "parallelism.tp=3"],
            "parallelism.tp=3: must divide model.n_heads=32, model.n_kv_heads=8, "
            "model.ffn_hidden_dim=14336; would work: 1, 2, 4, 8",
        ),
        (["parallelism.tp=two"], "parallelism.tp=two: must be an integer"),
        (["+parallelism.tpp=2"], "parallelism.tpp=2: no such field; did you mean parallelism.tp?"),
    ],
)
def test_command_line_fails_fast(typed: list[str], expected: str, tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = python("-m", "harness.train", *typed, f"runs_dir={tmp_path}/runs")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == EXIT_USER
    assert done.stderr == f"error: {expected}\n"
    assert done.stdout == ""
    assert not (tmp_path / "runs").exists()
    # CPU time, because other tests may use the cores.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_composing_and_refusing_import_no_torch() -> None:
    code = (
        "import sys, harness.config.job\n"
        "from harness.compose.composer import compose_job\n"
        "compose_job(['parallelism=fsdp_tp_pp', 'training.global_batch_size=8'])\n"
        "try: compose_job(['parallelism.tp=3'])\n"
        "except Exception as error: assert 'must divide' in str(error)\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
