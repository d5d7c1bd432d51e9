"""What command lines of the fuzzer are made of: values of every wrong kind, flags, files and environments."""

LONG = "x" * 300
MANY_DIGITS = "9" * 300


def words(text):
    """The words of a text."""
    return text.split()


# Relative to the folder that a line is run in, which has these files (``fuzz_server.make_folder``).
PATHS = words("""
    file file/x folder folder/x unreadable loop loop/x dangling nowhere/x . /dev/zero /dev/null /dev/full
    /etc/passwd/x /proc/self/mem fifo ~/x binary empty.json list.json deep.json broken.yaml ü picture.png
    folder/picture.png /nowhere/a.png plan.yaml /proc/a.yaml s3://bucket/x file:///etc/passwd http://[
    memory://a -x folder/../file
""")
PATHS += ["", "a b", LONG, f"a/{LONG}"]

WEIGHTS = ["run", "run/checkpoints", "run/checkpoints/step-2", "hf"]

NUMBERS = words("""
    0 -1 1 2 3 7 99 1000003 9999999967 100000000000 1e999 -1e999 1e300 1e-300 inf -inf nan -0.0 1e3 0.5 1.5
    2147483648 9223372036854775807 9223372036854775808 18446744073709551616 0x10 010 1_000 1_ +1 １
""")
NUMBERS += [MANY_DIGITS, f"-{MANY_DIGITS}", "9" * 5000, f"0.{'0' * 299}1"]

WORDS = words(r"""
    null true false yes on ~ None two '' "" ??? _target_ ü 日本語 a\tb 😀 'a\nb' a'b a"b a\ a#b a%sb {} %j *
    inductor sdpa bytes float32 1:00:00 99-99:99:99 auto cpu slurm local hf
""")
WORDS += [LONG, '" "', "a b", "\u2028", "a\nb", "a\rb", "\x1b[31m", "\x07", "a\tb"]

LISTS = words("""
    [] [[]] [a,b] [[a]] [[a],b] [1,null] {a:1} {a:{b:c}} {a:[1]} {} [inf] {1:2} {null:1} {a:inf} [a,[b,[c]]]
    [tok_embeddings] [[tok_embeddings],[output]]
""")
LISTS += ["[" * 2000 + "]" * 2000, "{a:" * 60 + "1" + "}" * 60, f"[{','.join(['a'] * 500)}]"]

BROKEN = words("""
    [ ] { } [1 {a ' " 'a "a [a, {a:} (1) a=b = , ,, a,b 1,2 range(1,3) range(1 choice(a,b) glob(*)
    interval(0,1) int(3) str( sort(3,1) a:b !x
""")

INTERPOLATIONS = words("""
    ${nope} ${ ${} ${a.b.c} ${..x} ${name} ${training.steps} ${model} ${oc.env:NOPE} ${oc.env:PATH} $x
    ${hydra:runtime.cwd} ${oc.decode:x} ${nope:1} ${${name}} ${oc.env:} ${training} ${.name} \\${x}
    ${oc.create:[1,2]} ${oc.select:nope} ${oc.env:A,B,C}
""")

KINDS = (PATHS, NUMBERS, NUMBERS, WORDS, LISTS, BROKEN, INTERPOLATIONS)

ODD = [*words("nope [a,b] [llama3_tiny] null a/b ../train /etc/passwd ü {a:b} ."), "", LONG]

HYDRA = words("""
    hydra=3 hydra.output_subdir=x hydra.mode=MULTIRUN hydra.mode=nope hydra/job_logging=default hydra.
    hydra.run.dir=x hydra/launcher=basic hydra.searchpath=[file://x] hydra.searchpath=[pkg://x] hydra={}
    hydra.searchpath=[.] hydra.searchpath=3 ~hydra.searchpath hydra.searchpath=null hydra.searchpath=[[a]]
    hydra.searchpath=[s3://a] hydra.searchpath=[a hydra.verbose=true +hydra.x=1 ~hydra.run
    hydra.sweeper.params={training.steps:'1,2'} hydra.sweeper.params=3 hydra.sweeper.params.points=nope
    hydra.callbacks={a:{b:c}} ++hydra.sweeper.params.nope=1,2
""")

NO_OVERRIDES = words("""
    = == a =1 + ~ ++ ~= @ a@b=c model@x=llama3_tiny 1=2 ü=1 .=1 model..dim=1 model.=1 .model=1 model.dim.=3
    a:b training.steps:3 model/dim=3 ~model ~training.steps=3 +model=llama3_tiny training
    training=3 training=null
""")
NO_OVERRIDES += ["", " ", "a b=c", LONG, f"{LONG}=1"]

STRUCTURES = words("""
    {part}=3 {part}=null {part}=[] {part}={{}} {part}={{{name}:1}} {part}={{{name}:{{a:b}}}} {part}.{name}.x=1
    ~{part} +{part}.{name}x=1 ++{part}.x.y.z=1 {part}={{1:2}} {part}=${{model}}
""")

PARTS = {
    "path": PATHS,
    "weights": [*WEIGHTS * 30, *PATHS],
    "target": [*["new"] * 100, *PATHS],
    "widths": ["[64,128]", *LISTS],
    "repo": ["Qwen/Qwen3-8B", "a", "https://huggingface.co/a/b", "../..", "ü/ü"],
    "layouts": words("[fsdp_2] [tp_2] [[a]] [nope] [] a [null] {a:b}"),
    "prompt": ["prompt=a", "prompt='a b'", "generate.prompts=[a,b]", "generate.prompt_file=file"],
}
"""What the words of STARTS are filled with."""

STARTS = {
    "plan": [
        (0.4, "search=true cluster.ranks=8 cluster.accelerator=L4 sweep_file=sweep/found.yaml")
    ],
    "train": [(0.3, "cluster=slurm_cpu cluster.dry_run=true")],
    "convert": [(0.7, "convert.source={weights} convert.target={target}")],
    "generate": [(0.9, "checkpoint={weights}"), (0.7, "{prompt}")],
    "evaluate": [
        (0.9, "checkpoint={weights}"),
        (0.3, "evaluate.tasks=[data]"),
        (0.7, "data=local_text data.paths=[file] evaluate.split=all"),
    ],
    "encode": [(0.7, "encode.samples=2"), (0.8, "encode.target={target}")],
    "tokenize": [
        (0.8, "tokenize.target={target}"),
        (0.7, "data=local_text tokenizer=bytes data.paths=[file]"),
        (0.2, "data=local_jsonl data.paths=[{path}]"),
    ],
    "coordcheck": [(1.0, "coordcheck.widths={widths}")],
    "download": [(1.0, "repo={repo}")],
    "parity": [(1.0, "parity.layouts={layouts}")],
}
"""Overrides that lead to the code that a verb is about, and how often they are typed."""

FLAGS = [
    *words(
        "-h --help --cfg -m -sc --info --package --run --resolve --jsn --json -x -- --- --cfg=job=x"
    ),
    *words("-m=3 -ü --version -hx -cn --hydra-help -mc --multirun -1 -cd=folder --cfg=job"),
    *(
        "--cfg job",
        "--cfg nope",
        "-c all",
        "--cfg job --resolve",
        "-m -m",
        "--cfg job -p nope",
        "-m --cfg",
    ),
    *(
        "--cfg job --package model.rope",
        "-m --cfg job",
        "-m --help",
        "-sc install=bash",
        "-cd /nowhere",
    ),
    *(
        "-cd .",
        "-cd file",
        "-cp x",
        "-cn nope",
        "-cn plan",
        "--experimental-rerun x",
        "-cn x" + LONG,
    ),
    *("--cfg job -p hydra", "--cfg job -p ''"),
]

PARSED_FLAGS = words(
    "--newest --json --out --out=file/x --out=/dev/full --runs=x --calibration=folder -x"
)

GLOBAL = [
    *("training:\n steps: 3\n   x: 4", "training:\n\tsteps: 3", "name: [a", "name: a\nname: b"),
    *("- a", "name: *nope", "name: &a [*a]", "name: !!python/object:os.system x", "1: 2", "? a"),
    *("name: yes", "name: \xff\xfe"),
    *(
        "training: 3",
        "training: null",
        "training: [1]",
        "name: ${nope}",
        "name: ${",
        f"name: {LONG}",
    ),
    *(
        "defaults: 3",
        "defaults: [nope]",
        "defaults: [override /nope: a]",
        "defaults: [/experiment: mine]",
    ),
    *("defaults: [{a: b, c: d}]", "hydra: {output_subdir: x}", "hydra: 3", "hydra: {mode: X}"),
    *("hydra: {sweeper: {params: 3}}", "hydra: {sweeper: {params: {points: 3}}}"),
    "hydra: {sweeper: {params: {training.steps: [1, 2], nope: '3,4'}}}",
    'hydra: {sweeper: {params: {points: "training.steps=3\\n-m"}}}',
    f"a: {'[' * 300}{']' * 300}",
]
"""Texts after the line that an experiment begins with."""

FILES = [
    *(f"# @package _global_\n{text}\n" for text in GLOBAL),
    *(
        "name: 'a\n",
        "\xff\xfea\x00b\x00",
        "",
        "3",
        "[a, b]",
        "text",
        "null",
        "%x\n",
        "# @package a..b\n",
    ),
    *(
        "dim: 1e999\n",
        "dim: .inf\n",
        "dim: 2026-01-01\n",
        "name: a\x00b\n",
        "name: a\x07b\n",
        "{" * 300,
    ),
    "---\na: 1\n---\nb: 2\n",
]

ENVIRONMENTS = [
    *words(
        "HOME=/nowhere HOME= USER= PATH= LANG=C TMPDIR=/nowhere COLUMNS=x CUDA_VISIBLE_DEVICES=nope TERM=dumb"
    ),
    *words(
        "HYDRA_FULL_ERROR=x OMP_NUM_THREADS=x NO_COLOR=1 SLURM_CONF=/nowhere SLURM_JOB_ID=x COMP_LINE=x"
    ),
]
LOCAL = "MASTER_ADDR=127.0.0.1 MASTER_PORT=29500"
LAUNCHERS = [
    *words(
        "WORLD_SIZE=abc LOCAL_RANK=x RANK= RANK=0 SLURM_PROCID=0 HARNESS_CONTROLLER=1 TORCHELASTIC_RUN_ID=x"
    ),
    *words("GLOO_SOCKET_IFNAME=nope0 GLOO_SOCKET_IFNAME= NCCL_SOCKET_IFNAME=nope0"),
    *("RANK=x WORLD_SIZE=1", "RANK=0 WORLD_SIZE=abc", "RANK=0 WORLD_SIZE=1", "RANK=0 WORLD_SIZE=2"),
    *(
        "RANK=0 WORLD_SIZE=1 LOCAL_RANK=-1",
        "RANK=0 WORLD_SIZE=2 MASTER_PORT=29500",
        f"RANK=0 WORLD_SIZE=2 {LOCAL}",
    ),
    *(
        f"RANK=2 WORLD_SIZE=2 {LOCAL}",
        f"RANK=0 WORLD_SIZE=2 {LOCAL}9",
        "WORLD_SIZE=4 MASTER_ADDR=nowhere",
    ),
    *(f"RANK=0 WORLD_SIZE={'9' * 5000}", "RANK=0 WORLD_SIZE=\u0663"),
]
"""What launchers set, or part of it."""
