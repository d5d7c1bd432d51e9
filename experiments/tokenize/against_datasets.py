"""Compare ``harness tokenize`` with ``datasets.map``: the same fast tokenizer, JSON lines and processes.

    python experiments/tokenize/against_datasets.py --megabytes 64 --workers 2 --rounds 3
    python experiments/tokenize/against_datasets.py --memory 1024      peak memory on a file of 1 GiB

The programs take turns. Compared are the seconds of the work itself (of ``datasets``: ``map``, whose input is
in Arrow files before), of the complete programs with imports and reading, and of the CPU in the complete
programs, which does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

VOCABULARY = 8000
_MAP = """
import sys, time
import datasets, transformers
file, tokenizer, workers, cache = sys.argv[1:]
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=tokenizer)
rows = datasets.load_dataset("json", data_files=file, split="train", cache_dir=cache)
loaded = time.monotonic()
mapped = rows.map(
    lambda batch: {"input_ids": tokenizer(batch["text"], return_attention_mask=False)["input_ids"]},
    batched=True, num_proc=int(workers), remove_columns=["text"],
)
ended = time.monotonic()
print("seconds", ended - loaded)
"""


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=64.0, help="size of the JSON lines")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=float, help="MiB of a file, on which only the memory is measured")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tokenize-speed-") as name:
        folder = Path(name)
        tokenizer = train_tokenizer(folder / "tokenizer.json")
        if options.memory is not None:
            size = write_lines(folder / "text.jsonl", options.memory * 2**20)
            peaks: dict[int, int] = {}
            seconds = run_harness(folder, tokenizer, options.workers, peaks)
            sys.stdout.write(
                f"{size / 2**20:.0f} MiB in {seconds:.0f} s, peak of each process (MiB, the first starts the "
                f"others): {', '.join(f'{peak / 2**20:.0f}' for peak in peaks.values())}\n"
            )
            return
        size = write_lines(folder / "text.jsonl", options.megabytes * 1e6)
        compare(folder, tokenizer, options, size)


def compare(folder: Path, tokenizer: Path, options: argparse.Namespace, size: int) -> None:
    """Run both programs in turn, and print the ratios."""
    ratios: list[list[float]] = []
    for number in range(options.rounds):
        ours, theirs = (
            timed(partial(run, folder, tokenizer, options.workers)) for run in (run_harness, run_map)
        )
        ratios.append([b / a for a, b in zip(ours, theirs, strict=True)])
        speeds = [f"{size / 1e6 / a:.2f} and {size / 1e6 / b:.2f}" for a, b in zip(ours, theirs, strict=True)]
        sys.stdout.write(
            f"round {number + 1}: harness tokenize and datasets.map, MB/s: {'; '.join(speeds)}\n"
        )
        sys.stdout.flush()
    medians = [statistics.median(each) for each in zip(*ratios, strict=True)]
    sys.stdout.write("median ratio: work {:.2f}, program {:.2f}, CPU {:.2f}\n".format(*medians))


def timed(run: Callable[[], float]) -> list[float]:
    """Return the seconds that ``run`` returns, its seconds, and the seconds of CPU of its processes."""
    cpu, started = cpu_seconds(), time.monotonic()
    work = run()
    return [work, time.monotonic() - started, cpu_seconds() - cpu]


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def texts() -> Iterator[str]:
    """Yield random parts of the standard library's sources, for ever."""
    files = [
        path.read_text(errors="ignore") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    ]
    chosen = random.Random(0)
    while True:
        text = chosen.choice(files)
        start = chosen.randrange(max(1, len(text) - 4000))
        yield text[start : start + chosen.randrange(200, 4000)]


def write_lines(path: Path, size: float) -> int:
    """Write JSON lines of about ``size`` bytes; return the exact size."""
    with path.open("w") as file:
        for text in texts():
            if file.tell() >= size:
                break
            file.write(json.dumps({"text": text}) + "\n")
    return path.stat().st_size


def train_tokenizer(path: Path) -> Path:
    """Write a byte-level BPE of VOCABULARY tokens."""
    import tokenizers

    model = tokenizers.ByteLevelBPETokenizer()
    some = (text for text, _ in zip(texts(), range(1000), strict=False))
    model.train_from_iterator(some, vocab_size=VOCABULARY, special_tokens=["<eos>"], show_progress=False)
    model.save(str(path))
    return path


def run_harness(folder: Path, tokenizer: Path, workers: int, peaks: dict[int, int] | None = None) -> float:
    """Run the command; return the seconds of its work, and add its processes' peak memory to ``peaks``."""
    target = folder / "corpus"
    shutil.rmtree(target, ignore_errors=True)
    command = [
        *(
            sys.executable,
            "-m",
            "harness",
            "tokenize",
            "data=local_jsonl",
            f"data.paths=[{folder}/text.jsonl]",
        ),
        *("data.validation_fraction=0", "tokenizer.kind=huggingface", f"tokenizer.path={tokenizer}"),
        *("tokenizer.bos=", "tokenizer.eos='<eos>'", f"tokenize.workers={workers}"),
        *(f"tokenize.target={target}", "--json"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    while peaks is not None and process.poll() is None:
        for pid in (process.pid, *children_of(process.pid)):
            peaks[pid] = max(peaks.get(pid, 0), peak_of(pid))
        time.sleep(0.05)
    answer, _ = process.communicate()
    if process.returncode:
        sys.exit(f"harness tokenize ended with exit code {process.returncode}")
    return float(json.loads(answer)["seconds"])


def children_of(pid: int) -> list[int]:
    """Process ids of a process's children."""
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def peak_of(pid: int) -> int:
    """Peak memory of a process in bytes; 0 if it has ended."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def run_map(folder: Path, tokenizer: Path, workers: int) -> float:
    """Run ``datasets.map``; return its seconds."""
    cache = folder / "datasets"
    shutil.rmtree(cache, ignore_errors=True)
    ended = subprocess.run(
        [sys.executable, "-c", _MAP, str(folder / "text.jsonl"), str(tokenizer), str(workers), str(cache)],
        capture_output=True,
        text=True,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
    )
    found = re.search(r"seconds (\S+)", ended.stdout)
    if found is None:
        sys.exit(ended.stderr)
    return float(found[1])


if __name__ == "__main__":
    main()
