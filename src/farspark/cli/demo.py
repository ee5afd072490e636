"""`farspark demo`: the main job on one machine."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from farspark.errors import ConfigError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from farspark.demo.prompts import PROMPTS

    parser = subparsers.add_parser(
        "demo",
        help="real vLLM with remote drafts on this machine, and the proof that the text is the target's own",
        description="Starts a drafter worker and a real vLLM (CPU) with SmolLM2-135M-Instruct in capacity mode, streams the "
        "answers to some prompts, then asks the target alone and compares every token.",
    )
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt of your own; may be repeated")
    parser.add_argument("--max-tokens", type=int, default=192, metavar="N", help="per prompt (default: %(default)s)")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of the target; in float32 it never disagrees with itself (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report as JSON")
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="where the converted target is kept between runs (default: farspark in XDG_CACHE_HOME, else ~/.cache/farspark)",
    )
    parser.set_defaults(run=run, prompts=PROMPTS)


def run(arguments: argparse.Namespace) -> int:
    try:
        from farspark.demo.process import left_in_order
        from farspark.demo.run import DemoSettings, run_demo
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed; the demo runs in the environment that `make demo` sets up"
        ) from error

    if arguments.max_tokens < 1:
        raise ConfigError(f"--max-tokens {arguments.max_tokens}: expected 1 or more")
    if arguments.json is not None and (arguments.json.is_dir() or not arguments.json.absolute().parent.is_dir()):
        raise ConfigError(f"--json {arguments.json}: expected a file in a folder that exists")
    settings = DemoSettings(
        prompts=arguments.prompt or arguments.prompts,
        max_tokens=arguments.max_tokens,
        dtype=arguments.dtype,
        cache=arguments.cache or _user_cache(),
    )
    with left_in_order():
        report = run_demo(settings, TerminalScreen())
    print(f"\n{report.as_text()}")
    if arguments.json is not None:
        try:
            arguments.json.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {arguments.json}: {error.strerror}") from error
    return 0 if report.text_equal else 1


def _user_cache() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "farspark"
    except RuntimeError as error:
        raise ConfigError(f"this user has no home folder ({error}); give --cache DIR") from error


class TerminalScreen:
    """Steps and streamed text on standard output; waiting is one line that is rewritten where there is a terminal."""

    def __init__(self) -> None:
        self._rewrites = sys.stdout.isatty()
        self._is_waiting = False

    def step(self, text: str) -> None:
        self._end_waiting()
        print(f"· {text}", flush=True)

    def waiting(self, text: str, seconds: float) -> None:
        if self._rewrites:
            print(f"\r\x1b[K· {text} … {seconds:.0f} s", end="", flush=True)
            self._is_waiting = True

    def prompt(self, text: str) -> None:
        self._end_waiting()
        print(f"\n› {text}", flush=True)

    def text(self, text: str) -> None:
        print(text, end="", flush=True)

    def _end_waiting(self) -> None:
        if self._is_waiting:
            print("\r\x1b[K", end="")
            self._is_waiting = False
