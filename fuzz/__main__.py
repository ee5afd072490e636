"""`python -m fuzz`: let the coverage-guided engine look for faults, target after target, from the corpus on."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fuzz.driver import CORPUS, inputs_in

TARGETS: Final = ("codec", "framing", "worker", "client", "endpoint")
ROOT: Final = Path(__file__).parent.parent
# What a campaign finds beyond the committed corpus is kept here from one to the next.
WORK: Final = ROOT / "build" / "fuzz"


@dataclass(frozen=True, slots=True)
class Campaign:
    """What one target's campaign came to."""

    target: str
    inputs: int
    seconds: float
    output: str
    is_clean: bool

    def __str__(self) -> str:
        covered = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", self.output)
        places, features, kept = covered[-1] if covered else ("-", "-", "-")
        return (
            f"{self.target:8} {self.inputs:>10,} inputs {self.seconds:7.1f} s {self.inputs / self.seconds:9,.0f} /s   "
            f"{places} places, {features} features, {kept} inputs kept   {'no fault' if self.is_clean else 'FAULT'}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("targets", metavar="TARGET", nargs="*", help=f"of {', '.join(TARGETS)}; left out: all")
    parser.add_argument(
        "--inputs", metavar="COUNT", type=int, default=0, help="for each target; 0: until the time is up"
    )
    parser.add_argument(
        "--seconds", metavar="SECONDS", type=int, default=60, help="for each target, at most; 0: no bound"
    )
    parser.add_argument(
        "--seed", metavar="NUMBER", type=int, default=0, help="of the engine's choices; 0: another each time"
    )
    parser.add_argument(
        "--throw-away", action="store_true", help=f"keep nothing of what is found under {WORK.relative_to(ROOT)}"
    )
    parser.add_argument(
        "--merge", action="store_true", help="afterwards add to fuzz/corpus what reaches more than it does"
    )
    options = parser.parse_args()
    targets = options.targets or list(TARGETS)
    for target in targets:
        if target not in TARGETS:
            parser.error(f"no target {target!r}; expected {', '.join(TARGETS)}")
    if not options.inputs and not options.seconds:
        parser.error("--inputs 0 and --seconds 0 would never end")
    if importlib.util.find_spec("atheris") is None:
        parser.error(
            "the engine is not there: pip install -e '.[dev]', which brings atheris where it exists (x86_64). Without it "
            "inputs can still be run: python -m fuzz.codec fuzz/corpus/codec"
        )
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch) if options.throw_away else WORK
        for target in targets:
            results.append(fuzz(target, work, options.inputs, options.seconds, options.seed))
            print(results[-1], flush=True)
            if not results[-1].is_clean:
                report(results[-1], work)
            elif options.merge:
                merge(target, work)
    return 0 if all(result.is_clean for result in results) else 1


def fuzz(target: str, work: Path, inputs: int, seconds: int, seed: int) -> Campaign:
    kept = work / target
    kept.mkdir(parents=True, exist_ok=True)
    arguments = [
        f"-artifact_prefix={work}/{target}-",
        "-print_final_stats=1",
        f"-max_total_time={seconds}",
        f"-seed={seed}",
    ]
    if inputs:
        arguments.append(f"-runs={inputs}")
    began = time.monotonic()
    done = _driver(target, kept, CORPUS / target, *arguments)
    took = time.monotonic() - began
    counted = re.search(r"stat::number_of_executed_units: (\d+)", done.stdout)
    return Campaign(target, int(counted[1]) if counted else 0, took, done.stdout, done.returncode == 0)


def report(campaign: Campaign, work: Path) -> None:
    """The traceback, and how to see it again. What was found is kept even where the rest is thrown away."""
    print(campaign.output[-6000:])
    WORK.mkdir(parents=True, exist_ok=True)
    for found in sorted(work.glob(f"{campaign.target}-*")):
        kept = WORK / found.name
        if kept != found:
            shutil.copy(found, kept)
        print(f"again: python -m fuzz.{campaign.target} {kept.relative_to(ROOT)}")


def merge(target: str, work: Path) -> None:
    """The smallest set of inputs that reaches all that the corpus and the campaigns reached becomes the corpus."""
    corpus = CORPUS / target
    with tempfile.TemporaryDirectory() as merged:
        done = _driver(target, Path(merged), corpus, work / target, "-merge=1")
        files = inputs_in([Path(merged)])
        if done.returncode != 0 or not files:
            raise SystemExit(f"{target}: merging failed\n{done.stdout[-2000:]}")
        shutil.rmtree(corpus, ignore_errors=True)
        corpus.mkdir(parents=True)
        for file in files:
            shutil.copy(file, corpus / file.name)
        total_bytes = sum(file.stat().st_size for file in files)
    print(f"{target:8} corpus of {len(files)} inputs, {total_bytes:,} bytes")


def _driver(target: str, first: Path, *arguments: Path | str) -> subprocess.CompletedProcess[str]:
    folders = [argument for argument in arguments if isinstance(argument, str) or argument.is_dir()]
    return subprocess.run(
        [sys.executable, "-m", "fuzz.driver", target, str(first), *map(str, folders)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=ROOT,
    )


if __name__ == "__main__":
    sys.exit(main())
