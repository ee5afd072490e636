"""`python -m tests.sim --rounds 20000`: random programs until so many rounds have run; exit code 1 on any mismatch or hang."""

from __future__ import annotations

import argparse
import logging
import random
import secrets
import sys

from tests.sim.program import Mismatch, Tally, random_program, run, shrink


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000, help="at least so many (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the first program; a random one is printed otherwise")
    parser.add_argument("--length", type=int, default=200, help="operations per program (default: %(default)s)")
    arguments = parser.parse_args()
    # What is injected here is not news.
    logging.disable(logging.CRITICAL)
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    tally = Tally()
    print(f"first seed {seed}", flush=True)
    mismatches = 0
    while tally.rounds < arguments.rounds and not mismatches:
        program = list(random_program(random.Random(seed), arguments.length))
        try:
            run(program, tally, seed=seed)
        except Mismatch as mismatch:
            mismatches = 1
            print(f"seed {seed}: {mismatch}\nshrinking …", flush=True)
            for op in shrink(program, seed):
                print(f"  {op}")
        seed += 1
        if sys.stdout.isatty():
            print(f"\r{tally.rounds} of {arguments.rounds} rounds", end="", flush=True)
    print(f"\r{tally}\nmismatches: {mismatches}")
    return 1 if mismatches or tally.hangs else 0


if __name__ == "__main__":
    sys.exit(main())
