"""The command `farspark`: its subcommands, and what an error becomes.

Exit codes: 0 done, 1 it went wrong while running, 2 something that a person must put right (usage, settings, files),
130 interrupted, 141 nobody reads the output any more.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Final

import farspark
from farspark.cli.output import open_streams, say, written_out
from farspark.errors import ConfigError, FarsparkError

# Each is a module of this package with `add_parser(subparsers)`, which sets `run`.
COMMANDS: Final = (
    "worker",
    "identity",
    "export",
    "run",
    "overlay",
    "probe",
    "mock_worker",
    "stats",
    "capture",
    "replay",
    "check",
    "demo",
)

# What a command may need that the package itself does not, and the extra that brings it.
_EXTRAS = {"torch": "worker", "safetensors": "worker", "numpy": "worker"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Usage errors, and output that cannot be written, leave by SystemExit."""
    open_streams()
    with written_out():
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    try:
        # Importing the commands takes a while too.
        options = make_parser().parse_args(argv)
        code: int = options.run(options)
    except ConfigError as error:
        return _say(error, 2)
    except (FarsparkError, TimeoutError) as error:
        return _say(error, 1)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(error.name or "")
        if extra is None:
            raise
        return _say(f"this command needs {error.name}, which is not installed: pip install 'farspark[{extra}]'", 2)
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    return code


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="farspark",
        description="Run vLLM's DSpark speculative drafter on another machine.",
        epilog="farspark COMMAND --help says what a command does and takes.",
    )
    parser.add_argument("--version", action="version", version=f"farspark {farspark.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"farspark.cli.{name}").add_parser(subparsers)
    return parser


def _say(message: object, code: int) -> int:
    say(f"farspark: {message}", sys.stderr)
    return code
