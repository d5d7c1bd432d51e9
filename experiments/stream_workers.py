"""Measures the tokens per second of a stream with 0, 1, 2, ... processes that read ahead.

    python experiments/stream_workers.py --workers 0,1,2 --rounds 5

Reads the standard library's sources from JSONL shards with `datasets`, tokenizes them with the shipped
tokenizer of 2,048 tokens, and does nothing else. The configurations take turns in every round; their start
does not count. Prints the median and range of tokens per second and of the ratio to the first configuration,
and the processor seconds that the rank itself needs for a million tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path

from harness.config.data import DataConfig, TokenizerConfig
from harness.data.loader import Loader, build_loader
from harness.data.tokenizer import build_tokenizer

ROWS = 8
SEQ_LEN = 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", default="0,1,2", help="numbers of processes, the first is the reference")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--batches", type=int, default=100, help=f"batches of {ROWS * SEQ_LEN} tokens in a round"
    )
    parser.add_argument("--shards", type=int, default=8)
    arguments = parser.parse_args()
    numbers = [int(number) for number in arguments.workers.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        files = write_shards(Path(folder), arguments.shards)
        loaders = {number: loader_of(files, number) for number in numbers}
        speeds: dict[int, list[float]] = {number: [] for number in numbers}
        seconds: dict[int, list[float]] = {number: [] for number in numbers}
        for _ in range(arguments.rounds):
            for number, loader in loaders.items():
                speed, processor = measure(loader, arguments.batches)
                speeds[number].append(speed)
                seconds[number].append(processor)
    print(f"{'workers':>7} {'tokens/s':>10} {'range':>21} {'ratio':>6} {'range':>12} {'rank s/Mtoken':>13}")
    for number in numbers:
        ratios = [a / b for a, b in zip(speeds[number], speeds[numbers[0]], strict=True)]
        print(
            f"{number:>7} {statistics.median(speeds[number]):>10,.0f} "
            f"{min(speeds[number]):>10,.0f}{max(speeds[number]):>11,.0f} "
            f"{statistics.median(ratios):>6.2f} {min(ratios):>6.2f}{max(ratios):>6.2f} "
            f"{statistics.median(seconds[number]):>13.2f}"
        )


def write_shards(folder: Path, shards: int) -> list[str]:
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [source.read_text("utf-8", errors="replace") for source in sources]
    for shard in range(shards):
        lines = (json.dumps({"text": text}) + "\n" for text in texts[shard::shards])
        (folder / f"{shard}.jsonl").write_text("".join(lines))
    return [str(folder / f"{shard}.jsonl") for shard in range(shards)]


def loader_of(files: list[str], workers: int) -> Loader:
    """Return a loader of all rows, with its processes started."""
    tokenizer = build_tokenizer(TokenizerConfig("sentencepiece", "asset:python_2k.model"))
    data = DataConfig("hub", dataset="json", data_files=files, streaming=True, shuffle=False, workers=workers)
    loader = build_loader(
        data,
        tokenizer,
        seq_len=SEQ_LEN,
        global_batch_size=ROWS,
        seed=0,
        rows=range(ROWS),
        model_vocab_size=tokenizer.vocab_size,
    )
    loader.next()
    return loader


def measure(loader: Loader, batches: int) -> tuple[float, float]:
    """Return tokens per second, and processor seconds of this process for a million tokens."""
    # What was read ahead since the last round does not count.
    for _ in range(10):
        loader.next()
    started, processor = time.perf_counter(), time.process_time()
    for _ in range(batches):
        loader.next()
    tokens = batches * ROWS * SEQ_LEN
    return tokens / (time.perf_counter() - started), (time.process_time() - processor) / tokens * 1e6


if __name__ == "__main__":
    main()
