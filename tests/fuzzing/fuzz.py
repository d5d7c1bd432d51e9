"""Tries drawn command lines, and shows those that end badly.

    python tests/fuzzing/fuzz.py --seed 3 --lines 2000

It needs the checkout and this folder in PYTHONPATH.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time

from fuzz_lines import Line, line, lines
from fuzz_server import STARTED, Ended, Server

from harness.util.errors import EXIT_MACHINE, EXIT_OK, EXIT_USER

LONGEST_LINE = 4000


def judged(made: Line, ended: Ended) -> str:
    """What is wrong with how a line ended; empty when nothing is."""
    if ended.code == -signal.SIGXCPU or ended.code == -signal.SIGKILL:
        return f"hangs: {ended.cpu_seconds:.0f} s of CPU"
    if "Traceback" in ended.err:
        return "traceback"
    if ended.code not in (EXIT_OK, EXIT_USER, EXIT_MACHINE):
        return f"exit code {ended.code}"
    # What is listed below an error is indented.
    told = [each for each in ended.err.splitlines() if not each.startswith("  ")]
    errors = [each for each in told if each.startswith("error: ")]
    if ended.code == EXIT_OK:
        return "reports an error and ends with 0" if errors else ""
    if 2 in made.closed:
        return ""
    if len(errors) != 1 or told[-1] != errors[0]:
        return f"{len(errors)} errors in {len(told)} lines"
    if ended.code == EXIT_USER and [each for each in told[:-1] if not each.startswith("note: ")]:
        return f"{len(told)} lines for one mistake"
    if len(errors[0]) > LONGEST_LINE:
        return f"a line of {len(errors[0])} characters"
    if not errors[0].isprintable():
        return "control characters"
    if STARTED not in ended.out and ended.left:
        return f"leaves {', '.join(ended.left)}"
    return ""


def main() -> int:
    """Tries the lines; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--only", help="one line by its own seed, e.g. 3.17; shows how it ended")
    typed = parser.parse_args()
    began, bad, cpu = time.monotonic(), 0, 0.0
    with Server() as server:
        for made in [line(typed.only)] if typed.only else lines(typed.seed, typed.lines):
            ended = server.run(made)
            cpu += ended.cpu_seconds
            wrong = judged(made, ended)
            if typed.only:
                sys.stdout.write(f"{made}\n{ended}\n")
            if wrong:
                bad += 1
                sys.stdout.write(f"{shown(made, ended, wrong)}\n")
                sys.stdout.flush()
    sys.stdout.write(f"{bad} bad; {time.monotonic() - began:.0f} s, {cpu:.0f} s of CPU in the commands\n")
    return 1 if bad else 0


def shown(made: Line, ended: Ended, wrong: str) -> str:
    """A line and what is wrong with it, in words."""
    last = "\n    ".join(ended.err.strip().splitlines()[-6:])
    facts = [f"{name}={value!r}" for name, value in (*made.environment.items(), *made.files.items())]
    facts += [f"closed {made.closed}"] if made.closed else []
    arguments = " ".join(repr(each) for each in made.arguments)
    return f"[{made.seed}] {wrong}: harness.{made.verb} {arguments} {' '.join(facts)}\n    {last}"[:2500]


if __name__ == "__main__":
    sys.exit(main())
