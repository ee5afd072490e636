"""`farspark run`: check a launch config, say what it will do, and become the command."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

from farspark.engine.config import PREFIX, Policy
from farspark.engine.launch import Launch, explain, parse_launch, prepare, refuse_unloadable
from farspark.errors import ConfigError

_POLICIES = {
    Policy.SHADOW: "the local drafter's drafts are verified, the worker's are compared with them",
    Policy.RESILIENCE: "the worker's drafts are verified, the local drafter's where the worker failed",
    Policy.CAPACITY: "no local drafter; the worker's drafts or none",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "run",
        help="start vLLM with a launch config, checked first",
        usage="farspark run [-h] [--explain | --dry-run] CONFIG.env -- COMMAND ...",
        description="Read KEY=VALUE lines, check them as the engine would, say what will be started, and become the "
        "command. A variable that exists in the environment wins over the file, an empty one too.",
    )
    add_start_arguments(parser)
    parser.set_defaults(run=run)


def add_start_arguments(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """What `start` needs; `optional`: the command may be asked for something else instead."""
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--explain", action="store_true", help="print every value in force and where it comes from; start nothing"
    )
    how.add_argument("--dry-run", action="store_true", help="print the environment and the command; start nothing")
    parser.add_argument(
        "file", metavar="CONFIG.env", type=Path, nargs="?" if optional else None, help="the launch config"
    )
    parser.add_argument(
        "command",
        metavar="-- COMMAND ...",
        nargs=argparse.REMAINDER,
        help="what to start, as in `-- vllm serve TARGET`",
    )


def run(options: argparse.Namespace) -> int:
    return start(options, launch_of(options.file, os.environ))


def launch_of(file: Path, environ: Mapping[str, str]) -> Launch:
    """The launch config `file` in this environment. Raises ConfigError."""
    return prepare(parse_launch(_read(file), str(file)), environ)


def start(options: argparse.Namespace, launch: Launch) -> int:
    """Become the command, or only say what it would be; `options` has `file`, `command`, `explain` and `dry_run`."""
    command = _command(options.command)
    if options.explain:
        _print_rows(launch)
        refuse_unloadable(launch)
        return 0
    refuse_unloadable(launch)
    program = _program(command, launch)
    if options.dry_run:
        _print_command(command, launch)
        return 0
    _print_plan(options.file, command, launch)
    try:
        os.execvpe(program, command, dict(launch.environ))
    except OSError as error:
        raise ConfigError(f"{program} cannot be started: {error.strerror}") from error


def _command(words: list[str]) -> list[str]:
    if words and words[0] == "--":
        return words[1:]
    if words and words[0].startswith("-"):
        raise ConfigError(f"{words[0]} stands after CONFIG.env; options stand before it, and the command after `--`")
    return words


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file: {error}") from error


def _program(command: list[str], launch: Launch) -> str:
    if not command:
        raise ConfigError("there is no command to start; add one, as in `-- vllm serve TARGET`")
    program = shutil.which(command[0], path=launch.environ.get("PATH", os.defpath))
    if program is None:
        raise ConfigError(f"{command[0]} is not a program in this PATH; expected something like `-- vllm serve TARGET`")
    return program


def _print_rows(launch: Launch) -> None:
    rows = list(explain(launch))
    name_width, value_width = max(len(row.name) for row in rows), max(len(row.value) for row in rows)
    for row in rows:
        _say(f"{row.name:{name_width}}  {row.value:{value_width}}  {row.origin}")
    _print_overridden(launch)


def _print_command(command: list[str], launch: Launch) -> None:
    """Lines that a shell takes as they are."""
    named = {*launch.origins, *(name for name in launch.environ if name.startswith(PREFIX))}
    for name in sorted(named):
        _say(f"{name}={shlex.quote(launch.environ[name])} \\")
    _say(shlex.join(command))


def _print_plan(file: Path, command: list[str], launch: Launch) -> None:
    config = launch.config
    _say(f"config      {file}")
    if config is None:
        _say(f"policy      none: {PREFIX} is not set, vLLM drafts by itself")
    else:
        markov = _shortened(config.markov_identity) if any(config.markov_identity) else "not checked"
        _say(f"policy      {config.policy.value}: {_POLICIES[config.policy]}")
        _say(f"endpoint    {', '.join(map(str, config.endpoints))}")
        _say(f"identity    {_shortened(config.identity)}, Markov identity {markov}")
    _print_overridden(launch)
    _say(f"command     {shlex.join(command)}")


def _print_overridden(launch: Launch) -> None:
    for assignment in launch.overridden:
        _say(f"note        the environment's {assignment.name} wins over {assignment.place}")
    if launch.without_effect:
        _say(f"note        without {PREFIX} no effect: {', '.join(launch.without_effect)}")


def _shortened(identity: bytes) -> str:
    return f"{identity.hex()[:8]}…{identity.hex()[-4:]}"


def _say(line: str) -> None:
    # Flushed: what is still buffered is lost when this process becomes another.
    print(line, flush=True)
