"""`farspark check`: one of the in-engine checks against a live server."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from farspark.check.findings import Finding, exit_code
from farspark.check.judge import cost_settings
from farspark.check.measurement import read_measurement
from farspark.check.run import BY_NAME, CHECKS, DRILLS, NEEDS_STATS, Settings, StatsFile, read_log, run_check
from farspark.check.server import Server
from farspark.cli.output import say
from farspark.cli.progress import shown_progress
from farspark.demo.prompts import PROMPTS
from farspark.engine.config import PREFIX
from farspark.errors import ConfigError

_ROUND_MS: Final = "VLLM_DSPARK_ROUND_MS"
# A start command that runs on in the foreground is the worker itself; one that ends at once has failed or gone behind.
_START_GRACE_S: Final = 1.0
_STOP_TIMEOUT_S: Final = 120.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "check",
        help="make one of the in-engine checks against a live server",
        usage="farspark check [-h] --list | NAME [options]",
        description="Ask a vLLM that is up the same few prompts, read what its rank 0 counts, and say for every criterion PASS, "
        "FAIL or SKIP, with the value and the bound. Nobody else should use the server meanwhile. Exit code 0: something "
        "passed and nothing failed; 1: something failed; 2: nothing could be judged, and why.",
        epilog="checks, in the order in which they are made (--list says more):\n"
        + "\n".join(f"  {check.name:14} {check.title}" for check in CHECKS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", nargs="?", choices=list(BY_NAME), help="the check, see below")
    parser.add_argument("--list", action="store_true", help="say of every check what it needs, does and passes")
    parser.add_argument(
        "--url", metavar="URL", default="http://127.0.0.1:8000", help="the engine's server; default %(default)s"
    )
    parser.add_argument(
        "--stats",
        metavar="FILE",
        type=Path,
        help=f"the engine's stats file; default {PREFIX}_STATS_FILE, else the newest farspark-stats-*.json in the temporary "
        "directory",
    )
    parser.add_argument("--baseline", metavar="FILE", type=Path, help="an earlier measurement to compare with")
    parser.add_argument("--save", metavar="FILE", type=Path, help="keep what is measured, as a later --baseline")
    parser.add_argument("--log", metavar="FILE", type=Path, help="vLLM's own log, for the memory of every rank")
    parser.add_argument(
        "--prompts", metavar="FILE", type=Path, help="one prompt a line; left out: the four of `farspark demo`"
    )
    parser.add_argument("--max-tokens", metavar="N", type=int, default=128, help="of an answer; default %(default)s")
    parser.add_argument(
        "--concurrency", metavar="N", type=int, default=1, help="requests at a time; default %(default)s"
    )
    parser.add_argument(
        "--round-ms",
        metavar="MS,MS,...",
        help=f"timing: the engine's live table with its local drafter, milliseconds by depth; default {_ROUND_MS}",
    )
    parser.add_argument(
        "--stop-command", metavar="CMD", help="resilience, failure: what stops the worker; left out: you are asked"
    )
    parser.add_argument("--start-command", metavar="CMD", help="likewise; may stay in the foreground")
    parser.add_argument(
        "--patience-s",
        metavar="SECONDS",
        type=float,
        default=120.0,
        help="how long a drill waits for the worker to be missed, and to be back; default %(default)s",
    )
    parser.add_argument(
        "--timeout-s", metavar="SECONDS", type=float, default=300.0, help="of one answer; default %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.list:
        print("\n\n".join(_description(check.name) for check in CHECKS))
        return 0
    if options.name is None:
        raise ConfigError(f"which check? expected one of {', '.join(BY_NAME)}, or --list")
    settings = _settings(options)
    _refuse_what_cannot_serve(options)
    server = Server(options.url, options.timeout_s)
    # Ahead of everything that takes time.
    server.model()
    baseline = None if options.baseline is None else read_measurement(options.baseline)
    with shown_progress(sys.stderr) as progress:
        findings, measured = run_check(
            options.name,
            settings,
            server,
            baseline,
            progress,
            stop=lambda: _stop(options.stop_command),
            start=lambda: _start(options.start_command),
        )
    found = {}
    if options.name == "timing":
        assert settings.stats is not None
        found = cost_settings(StatsFile(settings.stats).read(), settings.round_ms)
    _print(options, findings, found)
    # Last: what was found is said, whatever becomes of the file.
    if options.save is not None and measured is not None:
        measured.save(options.save)
    return exit_code(findings)


def _settings(options: argparse.Namespace) -> Settings:
    """Raises ConfigError naming the option."""
    for option, value, high in (
        ("--max-tokens", options.max_tokens, 1 << 20),
        ("--concurrency", options.concurrency, 1024),
        ("--patience-s", options.patience_s, 86400),
        ("--timeout-s", options.timeout_s, 86400),
    ):
        # Written so that NaN fails it.
        if not 0 < value <= high:
            raise ConfigError(f"{option} {value:g}: expected more than 0 and at most {high}")
    return Settings(
        prompts=PROMPTS if options.prompts is None else _read_prompts(options.prompts),
        max_tokens=options.max_tokens,
        concurrency=options.concurrency,
        patience_s=options.patience_s,
        stats=(options.stats or _newest_stats()) if options.name in NEEDS_STATS else None,
        log=options.log,
        round_ms=_round_ms(options.round_ms) if options.name == "timing" else None,
    )


def _refuse_what_cannot_serve(options: argparse.Namespace) -> None:
    for option, value, names in (
        ("--round-ms", options.round_ms, {"timing"}),
        ("--stop-command", options.stop_command, DRILLS),
        ("--start-command", options.start_command, DRILLS),
        ("--save", options.save, set(BY_NAME) - DRILLS),
    ):
        if value is not None and options.name not in names:
            raise ConfigError(f"{option} goes with check {', '.join(sorted(names))}; leave it out")
    if options.save is not None and (options.save.is_dir() or not options.save.absolute().parent.is_dir()):
        raise ConfigError(f"--save {options.save}: expected a file in a folder that exists")
    if options.log is not None:
        read_log(options.log)
    if options.name == "baseline" and options.save is None:
        raise ConfigError("check baseline records something: give --save FILE")
    commands = (options.stop_command, options.start_command)
    if options.name in DRILLS and None in commands and not sys.stdin.isatty():
        raise ConfigError("nobody is there to ask: give --stop-command and --start-command, or run it in a terminal")


def _read_prompts(path: Path) -> Sequence[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: {error}") from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompts {path}: no prompt in it; expected one a line")
    return prompts


def _newest_stats() -> Path:
    named = os.environ.get(f"{PREFIX}_STATS_FILE", "").strip()
    if named:
        return Path(named)
    folder = Path(tempfile.gettempdir())
    found = sorted(folder.glob("farspark-stats-*.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError(
            f"no farspark-stats-*.json in {folder}: give --stats FILE; the engine's log names the one that it writes"
        )
    return found[-1]


def _round_ms(text: str | None) -> list[float] | None:
    name, text = ("--round-ms", text) if text is not None else (_ROUND_MS, os.environ.get(_ROUND_MS, ""))
    if not text.strip():
        return None
    try:
        table = [float(one) for one in text.split(",")]
    except ValueError:
        table = []
    if not table or not all(0 < one < 1e9 for one in table):
        raise ConfigError(f"{name}={text!r}: expected milliseconds by depth, above 0, separated by commas")
    return table


def _stop(command: str | None) -> None:
    if command is None:
        _ask("stop the worker now, then press Enter")
        return
    _say(f"$ {command}")
    try:
        done = subprocess.run(command, shell=True, timeout=_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"--stop-command {command!r} did not end within {_STOP_TIMEOUT_S:g} s") from None
    if done.returncode:
        raise ConfigError(f"--stop-command {command!r} ended with {done.returncode}")


def _start(command: str | None) -> None:
    if command is None:
        _ask("start the worker again, then press Enter")
        return
    _say(f"$ {command}")
    # A session of its own: a worker that stays in the foreground outlives this check and its Ctrl-C. What it says goes where
    # our own progress goes.
    quiet = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), (os.POSIX_SPAWN_DUP2, 2, 1)]
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", command], os.environ, file_actions=quiet, setsid=True)
    time.sleep(_START_GRACE_S)
    ended, status = os.waitpid(pid, os.WNOHANG)
    if ended and status:
        raise ConfigError(f"--start-command {command!r} ended with {os.waitstatus_to_exitcode(status)}")


def _ask(what: str) -> None:
    print(f"farspark check: {what} ", end="", file=sys.stderr, flush=True)
    if not sys.stdin.readline():
        raise ConfigError("nobody is there to ask any more")


def _say(line: str) -> None:
    say(line, sys.stderr)


def _description(name: str) -> str:
    check = BY_NAME[name]
    lines = [f"{check.name}: {check.title}"]
    for what, text in (("needs", check.needs), ("does", check.does), ("passes", check.passes)):
        lines += textwrap.wrap(text, 100, initial_indent=f"  {what:8}", subsequent_indent=" " * 10)
    return "\n".join(lines)


def _print(options: argparse.Namespace, findings: Sequence[Finding], settings: dict[str, str]) -> None:
    code = exit_code(findings)
    if options.json:
        data = {
            "check": options.name,
            "url": options.url,
            "exit_code": code,
            "findings": [finding.as_json() for finding in findings],
            **({"settings": settings} if options.name == "timing" else {}),
        }
        print(json.dumps(data, indent=1))
        return
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        bound = f"   ({finding.bound})" if finding.bound else ""
        print(f"{finding.verdict.value}  {finding.what:{width}}  {finding.measured}{bound}")
    for name, value in settings.items():
        print(f"{name}={value}")
    verdict = {0: "passed", 1: "FAILED", 2: "nothing could be judged"}[code]
    print(f"check {options.name}: {verdict}", flush=True)
