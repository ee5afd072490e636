"""Runs a target: on given inputs with nothing but the project, or by the million under the coverage-guided engine.

The engine is atheris, which is libFuzzer for Python's own bytecode. It leads a process of its own and never returns, so each
campaign runs in one.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

Target = Callable[[bytes], None]

CORPUS: Final = Path(__file__).parent / "corpus"
MAX_INPUT_BYTES: Final = 4096
# One input takes microseconds to a few milliseconds; a hang is found in this time. Memory is what the process may have in all.
SECONDS_PER_INPUT: Final = 10
RSS_LIMIT_MIB: Final = 512


def reproduce(target: Target) -> int:
    """`python -m fuzz.TARGET FILE ...`: the exit code. An input that is a fault ends in its traceback."""
    parser = argparse.ArgumentParser(description=(sys.modules["__main__"].__doc__ or "").splitlines()[0])
    parser.add_argument("inputs", metavar="FILE", nargs="+", type=Path, help="an input, or a folder of inputs")
    options = parser.parse_args()
    files = inputs_in(options.inputs)
    for file in files:
        print(f"{file}: {file.stat().st_size} bytes", flush=True)
        target(file.read_bytes())
    print(f"{len(files)} inputs, no fault")
    return 0


def inputs_in(paths: list[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        files += sorted(path.iterdir()) if path.is_dir() else [path]
    return files


def campaign(name: str, arguments: list[str]) -> None:
    """Let the engine lead this process: libFuzzer's own arguments, the corpus first. Never returns."""
    import importlib

    import atheris

    # Only Farspark's own code leads the search.
    with atheris.instrument_imports(include=["farspark"]):
        module = importlib.import_module(f"fuzz.{name}")
    logging.getLogger("farspark").setLevel(logging.INFO)
    atheris.Setup(
        [
            # Merging runs this in processes of its own, by the shell.
            f"{sys.executable} -m fuzz.driver {name}",
            f"-max_len={MAX_INPUT_BYTES}",
            f"-timeout={SECONDS_PER_INPUT}",
            f"-rss_limit_mb={RSS_LIMIT_MIB}",
            *arguments,
        ],
        module.run,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    campaign(sys.argv[1], sys.argv[2:])
