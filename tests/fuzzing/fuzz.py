"""Try drawn command lines, and show those that end badly.

    python tests/fuzzing/fuzz.py --seed 3 --lines 2000

It needs the checkout and tests/ in PYTHONPATH.
"""

from __future__ import annotations

import argparse
import signal
import sys

from fuzz_lines import line
from fuzz_server import STARTED, serving

from harness.util.errors import EXIT_MACHINE, EXIT_OK, EXIT_USER

LONGEST_LINE = 4000


def judged(made, ended):
    """What is wrong with how a line ended; empty when nothing is."""
    if ended.code in (-signal.SIGXCPU, -signal.SIGKILL):
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
    if made.verb == "verify" and ": damaged: " in ended.out:
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


def main():
    """Try the lines; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--only", help="one line by its own seed, e.g. 3.17; shows how it ended")
    typed = parser.parse_args()
    seeds = (
        [typed.only] if typed.only else [f"{typed.seed}.{number}" for number in range(typed.lines)]
    )
    bad = 0
    with serving() as run:
        for made in map(line, seeds):
            ended = run(made)
            if typed.only:
                sys.stdout.write(f"{made}\n{ended}\n")
            if wrong := judged(made, ended):
                bad += 1
                sys.stdout.write(f"{wrong}: {made}\n    {ended.err.strip()[-500:]}\n")
                sys.stdout.flush()
    sys.stdout.write(f"{bad} bad\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
