"""What command lines of the fuzzer are made of: values of every wrong kind, flags, files and environments."""

from __future__ import annotations

# Packed, because one to a line would be a long column of little sense.
# fmt: off

LONG = "x" * 300

MANY_DIGITS = "9" * 300

# Relative to the folder that a line is run in, which has these files (``fuzz_server.make_folder``).
PATHS = (
    "file", "file/x", "folder", "folder/x", "unreadable", "loop", "loop/x", "dangling", "nowhere/x", "", ".",
    "/dev/zero", "/dev/null", "/dev/full", "/etc/passwd/x", "/proc/self/mem", "/root/../proc", "fifo", "~/x",
    "binary", "empty.json", "list.json", "deep.json", "broken.yaml", "x" * 300, f"a/{LONG}", "ü", "a b",
    "picture.png", "folder/picture.png", "/nowhere/a.png", "file/a.png", "plan.yaml", "/proc/a.yaml",
    "s3://bucket/x", "file:///etc/passwd", "http://[", "memory://a", "-x", "folder/../file",
)

WEIGHTS = ("run", "run/checkpoints", "run/checkpoints/step-2", "hf")

NUMBERS = (
    "0", "-1", "1", "2", "3", "7", "99", "1000003", "9999999967", "100000000000", "1e999", "-1e999",
    MANY_DIGITS, f"-{MANY_DIGITS}", "9" * 5000, f"0.{'0' * 299}1", "1e300", "1e-300", "inf", "-inf", "nan",
    "9223372036854775807", "9223372036854775808", "18446744073709551616", "0x10", "010", "1_000", "1.5",
    "-0.0", "1e3", "0.5", "2147483648", "1_", "+1", "１",
)

WORDS = (
    "null", "true", "false", "yes", "on", "~", "None", "two", "''", '""', '" "', "???", "_target_", LONG,
    "ü", "日本語", "a b", "a\\tb", "😀", "\u2028", "'a\\nb'", "a'b", 'a"b', "a\\", "a#b", "a%sb", "{}", "%j",
    "*", "inductor", "sdpa", "bytes", "float32", "1:00:00", "99-99:99:99", "auto", "cpu", "slurm", "local",
    "hf", "a\nb", "a\rb", "\x1b[31m", "\x07", "a\tb",
)

LISTS = (
    "[]", "[[]]", "[a,b]", "[[a]]", "[[a],b]", "[1,null]", "[{a: b}]", "{a: b}", "{a: {b: c}}", "{a: [1]}",
    "{}", "[" * 50 + "]" * 50, "[" * 2000 + "]" * 2000, "{a:" * 60 + "1" + "}" * 60, "[inf]", "{1: 2}",
    "{null: 1}", "[a,[b,[c]]]", "[tok_embeddings]", "[[tok_embeddings],[output]]",
    f"[{','.join(['a'] * 500)}]", "{a: inf}",
)

BROKEN = (
    "[", "]", "{", "}", "[1", "{a", "'", '"', "'a", '"a', "[a,", "{a:}", "(1)", "a=b", "=", ",", ",,", "a,b",
    "1,2", "range(1,3)", "range(1", "choice(a,b)", "glob(*)", "interval(0,1)", "int(3)", "str(", "sort(3,1)",
    "a:b", "!x",
)

INTERPOLATIONS = (
    "${nope}", "${", "${}", "${a.b.c}", "${..x}", "${name}", "${training.steps}", "${model}",
    "${oc.env:NOPE}", "${oc.env:PATH}", "${hydra:runtime.cwd}", "${oc.decode:x}", "${nope:1}", "${${name}}",
    "${oc.env:}", "$x", "${training}", "${.name}", "${oc.create:[1,2]}", "${oc.select:nope}", "\\${x}",
    "${oc.env:A,B,C}",
)

KINDS = (
    PATHS, NUMBERS, NUMBERS, WORDS, LISTS, BROKEN, INTERPOLATIONS,
)

ODD = (
    "nope", "[a,b]", "[llama3_tiny]", "null", "", "a/b", "../train", "/etc/passwd", LONG, "ü", "{a: b}",
    "a.yaml", ".",
)

HYDRA = (
    "hydra=3", "hydra.output_subdir=x", "hydra.mode=MULTIRUN", "hydra.mode=nope",
    "hydra/job_logging=default", "hydra.run.dir=x", "hydra/launcher=basic", "hydra.searchpath=[file://x]",
    "hydra.searchpath=[pkg://x]", "hydra.searchpath=[.]",
    "hydra.searchpath=3", "~hydra.searchpath", "hydra.searchpath=null", "hydra.searchpath=[[a]]",
    "hydra.searchpath=[pkg://torch..x]", "hydra.searchpath=[s3://a]", "hydra.searchpath=[a",
    "hydra.verbose=true", "hydra={}", "hydra.sweeper.params={training.steps: '1,2'}", "+hydra.x=1",
    "~hydra.run", "hydra.callbacks={a: {b: c}}", "hydra.sweeper.params=3",
    "hydra.sweeper.params.points=nope", "++hydra.sweeper.params.nope=1,2", "hydra.",
)

NO_OVERRIDES = (
    "", " ", "=", "==", "a", "=1", "+", "~", "++", "~=", "@", "a@b=c", "model@x=llama3_tiny", "1=2", "ü=1",
    "a b=c", ".=1", "model..dim=1", "model.=1", ".model=1", "model.dim.=3", LONG, f"{LONG}=1", "a:b",
    "training.steps:3", "model/dim=3", "~model", "~training.steps=3", "+model=llama3_tiny", "training",
    "training=3", "training=null",
)

STRUCTURES = (
    "{part}=3", "{part}=null", "{part}=[]", "{part}={{}}", "{part}={{{name}: 1}}",
    "{part}={{{name}: {{a: b}}}}", "{part}.{name}.x=1", "~{part}", "+{part}.{name}x=1", "++{part}.x.y.z=1",
    "{part}={{1: 2}}", "{part}=${{model}}",
)

LAYOUTS = (
    "[fsdp_2]", "[tp_2]", "[[a]]", "[nope]", "[]", "a", "[null]", "{a: b}",
)

VARIANTS = (
    "'hydra.mode=MULTIRUN'", "'training.steps=1,2'", "'nope=1'", "-m", "'bench.rounds=2'", "[a]", "3",
    "null", "a=b", "'hydra=3'", "'parallelism=tp'", "'name=${nope}'", "'x y z'", "'training.steps=0'",
    "--cfg", "''", "'model=[a]'",
)

FLAGS = (
    "-h", "--help", "--cfg", "--cfg job", "--cfg nope", "-c all", "--cfg=hydra", "--cfg job --resolve", "-m",
    "-m -m", "--cfg job -p nope", "--cfg job --package model.rope", "--package", "-m --cfg", "-m --cfg job",
    "-m --help", "-sc", "-sc install=bash", "--info",
    "--run", "--resolve", "-cd /nowhere", "-cd .",
    "-cd file", "-cd=folder", "-cp x", "-cn nope", "-cn plan",
    "-cn ../conf/train", "--experimental-rerun x", "--jsn", "--json", "-x", "--", "---", "--cfg=job=x",
    "-m=3", "-ü", "--version", "-hx", "-cn", "-cn x" + LONG, "--cfg all -p hydra", "--cfg job -p ''",
    "--hydra-help", "-mc", "--multirun", "-1",
)

PARSED_FLAGS = (
    "--newest", "--json", "--out", "--out=file/x", "--out=/dev/full", "--runs=x", "--calibration",
    "--calibration=folder", "-x",
)

HEAD = "# @package _global_\n"

FILES = (
    f"{HEAD}training:\n steps: 3\n   x: 4\n", f"{HEAD}training:\n\tsteps: 3\n", f"{HEAD}name: [a\n",
    "name: 'a\n", f"{HEAD}name: a\nname: b\n", f"{HEAD}name: \xff\xfe\n", "\xff\xfea\x00b\x00", "", "3",
    "[a, b]", "text", "null", f"{HEAD}- a\n", f"{HEAD}name: *nope\n", f"{HEAD}name: &a [*a]\n",
    f"{HEAD}name: !!python/object:os.system x\n", f"{HEAD}defaults: 3\n", f"{HEAD}defaults: [nope]\n",
    f"{HEAD}defaults:\n  - override /nope: a\n", "%x\n", f"{HEAD}defaults:\n  - /experiment: mine\n",
    f"{HEAD}defaults:\n  - {{a: b, c: d}}\n", f"{HEAD}1: 2\n", f"{HEAD}training: 3\n",
    f"{HEAD}training: null\n", f"{HEAD}training: [1]\n", f"{HEAD}name: ${{nope}}\n", f"{HEAD}name: ${{\n",
    f"{HEAD}hydra:\n  output_subdir: x\n", f"{HEAD}hydra: 3\n", f"{HEAD}hydra:\n  mode: X\n",
    f"{HEAD}hydra:\n  sweeper:\n    params: 3\n",
    f"{HEAD}hydra:\n  sweeper:\n    params:\n      points: 3\n",
    f"{HEAD}hydra:\n  sweeper:\n    params:\n      training.steps: [1, 2]\n      nope: 3,4\n",
    "# @package a..b\n",
    f"{HEAD}hydra:\n  sweeper:\n    params:\n      points: |\n        training.steps=3\n        -m\n",
    f"{HEAD}? a\n", f"{HEAD}name: {LONG}\n", "dim: 1e999\n", "dim: .inf\n", "dim: 2026-01-01\n",
    "name: a\x00b\n", "name: a\x07b\n", "{" * 300 + "\n", f"{HEAD}a: {'[' * 300}{']' * 300}\n",
    "---\na: 1\n---\nb: 2\n", f"{HEAD}name: yes\n",
)

ENVIRONMENTS: tuple[tuple[str, str | None], ...] = (
    ("HOME", None), ("HOME", "/nowhere"), ("PATH", ""), ("LANG", "C"),
    ("TMPDIR", "/nowhere"), ("COLUMNS", "x"),
    ("CUDA_VISIBLE_DEVICES", "nope"), ("HYDRA_FULL_ERROR", "x"), ("OMP_NUM_THREADS", "x"), ("TERM", "dumb"),
    ("SLURM_CONF", "/nowhere"), ("SLURM_JOB_ID", "x"), ("COMP_LINE", "x"), ("USER", None), ("NO_COLOR", "1"),
)

# What launchers set, or part of it.
LAUNCHERS: tuple[dict[str, str | None], ...] = (
    {"WORLD_SIZE": "abc"}, {"WORLD_SIZE": "4", "MASTER_ADDR": "nowhere"}, {"LOCAL_RANK": "x"},
    {"RANK": ""}, {"RANK": "x", "WORLD_SIZE": "1"}, {"RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "abc"},
    {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "-1"},
    {"RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"},
    {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99999"},
    {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
    {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
    {"RANK": "0", "WORLD_SIZE": "9" * 5000}, {"RANK": "0", "WORLD_SIZE": "\u0663"},
    {"SLURM_PROCID": "0"}, {"HARNESS_CONTROLLER": "1"}, {"TORCHELASTIC_RUN_ID": "x"},
    {"GLOO_SOCKET_IFNAME": "nope0"}, {"GLOO_SOCKET_IFNAME": ""}, {"NCCL_SOCKET_IFNAME": "nope0"},
)
