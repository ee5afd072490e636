"""`farspark probe`: can this host use that worker, and how fast is it? Runs on a bare python3."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from farspark.cli.output import say
from farspark.errors import ConfigError, FarsparkError
from farspark.probe.metrics import DEFAULT_URL, NotIdle
from farspark.probe.peer import TOKEN_OPTION
from farspark.probe.preflight import Questions, preflight, read_shape
from farspark.token_file import read_token
from farspark.transport import parse_endpoint
from farspark.wire import layout

_DEFAULTS = Questions(endpoint=parse_endpoint("tcp://127.0.0.1:18620"))


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "probe",
        help="pre-flight from the engine's host: is the worker usable, and how fast",
        description="Connect to a worker, measure PING and read its STATS. With --hello also open a session as an engine "
        "would, make real steps with random rows, and end it. Needs python3 and nothing else. Exit code 0: usable; "
        "1: not usable, and why; 2: wrong usage.",
    )
    parser.add_argument(
        "--endpoint", metavar="ENDPOINT", required=True, help="the worker, as tcp://10.0.0.2:18620 or ucx://…"
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        type=Path,
        help="the token that the worker demands, and has to hold itself; left out: neither side proves anything",
    )
    parser.add_argument(
        "--hello",
        action="store_true",
        help="open a session and make steps; refused while the engine has requests, because the session takes a slot of the "
        "worker and time of its rounds",
    )
    parser.add_argument(
        "--identity",
        metavar="HEX",
        help="the drafter that the engine demands, as `farspark identity` prints it; left out: whatever the worker serves",
    )
    parser.add_argument("--markov-identity", metavar="HEX", help="likewise; left out: not checked")
    parser.add_argument(
        "--checkpoint-config",
        metavar="FILE",
        type=Path,
        help="the drafter's config.json on the engine's host: N, vocabulary, hidden size and taps are announced as it has "
        "them; left out: as the worker has them",
    )
    parser.add_argument(
        "--drafts",
        metavar="N",
        type=int,
        help="the engine's num_speculative_tokens; left out: the drafter's own number",
    )
    parser.add_argument(
        "--slots",
        metavar="COUNT",
        type=int,
        default=_DEFAULTS.slots,
        help="the engine's max_num_seqs, to see whether the worker takes them; default %(default)s",
    )
    parser.add_argument("--context", metavar="COUNT", type=int, help="positions per slot; left out: the worker's")
    parser.add_argument(
        "--rows", metavar="R", type=int, default=_DEFAULTS.rows, help="rows of each step; default %(default)s"
    )
    parser.add_argument("--rounds", metavar="N", type=int, default=_DEFAULTS.rounds, help="steps; default %(default)s")
    parser.add_argument("--pings", metavar="N", type=int, default=_DEFAULTS.pings, help="PINGs; default %(default)s")
    parser.add_argument(
        "--timeout-s",
        metavar="SECONDS",
        type=float,
        default=_DEFAULTS.timeout_s,
        help="of every single wait; default %(default)s",
    )
    parser.add_argument(
        "--metrics",
        metavar="URL",
        help=f"the engine's /metrics, looked at before --hello; default {DEFAULT_URL}",
    )
    parser.add_argument(
        "--no-metrics-check", action="store_true", help="do not look at the engine: nothing is being served"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    questions = _questions(options)
    sections: dict[str, dict[str, Any]] = {}
    why = None
    try:
        for name, values in preflight(questions):
            sections[name] = values
            if not options.json:
                _show(name, values)
    except ConfigError:
        raise
    except NotIdle as error:
        why = f"not probed: {error}"
    except (FarsparkError, TimeoutError) as error:
        why = f"cannot be used: {error}"
    if options.json:
        print(
            json.dumps({"endpoint": str(questions.endpoint), "usable": why is None, "why": why, **sections}, indent=1)
        )
    if why is not None:
        say(f"farspark: {why}", sys.stderr)
        return 1
    if not options.json:
        _say("usable" if options.hello else "answers; --hello says whether an engine can draft with it")
    return 0


def _questions(options: argparse.Namespace) -> Questions:
    """Raises ConfigError naming the option."""
    for option, value, low, high in (
        ("--drafts", options.drafts, 1, layout.MAX_DRAFTS),
        ("--slots", options.slots, 1, layout.MAX_REQUESTS),
        ("--context", options.context, 1, layout.MAX_POSITION),
        ("--rows", options.rows, 1, layout.MAX_FRAME_BYTES),
        ("--rounds", options.rounds, 1, 1_000_000),
        ("--pings", options.pings, 1, 1_000_000),
    ):
        if value is not None and not low <= value <= high:
            raise ConfigError(f"{option} {value}: expected {low} to {high}")
    # Written so that NaN fails it.
    if not 0 < options.timeout_s <= 3600:
        raise ConfigError(f"--timeout-s {options.timeout_s:g}: expected seconds, more than 0 and at most 3600")
    if options.metrics is not None and options.no_metrics_check:
        raise ConfigError("--metrics and --no-metrics-check: give one of them")
    return Questions(
        endpoint=parse_endpoint(options.endpoint),
        token=read_token(options.token_file, TOKEN_OPTION),
        timeout_s=options.timeout_s,
        pings=options.pings,
        identity=_digest("--identity", options.identity),
        markov_identity=_digest("--markov-identity", options.markov_identity),
        hello=options.hello,
        shape=None if options.checkpoint_config is None else read_shape(options.checkpoint_config),
        num_drafts=options.drafts,
        slots=options.slots,
        context=options.context,
        rows=options.rows,
        rounds=options.rounds,
        metrics_url=None if options.no_metrics_check else options.metrics or DEFAULT_URL,
    )


def _digest(option: str, text: str | None) -> bytes | None:
    if text is None:
        return None
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != layout.IDENTITY_BYTES or len(text) != 2 * layout.IDENTITY_BYTES:
        raise ConfigError(f"{option} {text!r}: expected 64 hex digits, as `farspark identity CHECKPOINT` prints them")
    return digest


def _show(name: str, values: dict[str, Any]) -> None:
    match name:
        case "connection":
            _say_of("connected", values["lane"])
        case "ping":
            _say_of("ping", _spread(values))
        case "worker":
            _show_worker(values)
        case "session":
            _say_of("hello", f"{values['hello']}, {values['hello_us']:,.0f} µs")
            _say_of("  identity", values["identity"])
            _say_of("  markov identity", values["markov_identity"])
            _say_of(
                "  agreed", f"{values['num_drafts']} drafts, context {values['context']:,}, {values['slots']} slots"
            )
            if values["message"]:
                _say_of("  worker says", values["message"])
        case "step":
            counts = ", ".join(f"{status} {count}" for status, count in values["status"].items())
            _say_of("steps", f"{values['rounds']} of {values['rows']} rows ({values['bytes']:,} bytes): {counts}")
            _say_of("  round trip", _spread(values["round_trip"]))
            _say_of("  worker's own", _spread(values["worker"]))
            _say_of("  on the way", _spread(values["on_the_way"]))


def _show_worker(values: dict[str, Any]) -> None:
    memory = values["context_bytes"]
    held = f", {memory / 2**20:,.1f} MiB of context" if isinstance(memory, int) else ""
    _say_of("worker", f"{values['name']}, up for {values['uptime_s']} s")
    _say_of("  drafter", f"{values['kind']}, {values['num_drafts']} drafts, vocabulary {values['vocab_size']}")
    _say_of("  identity", values["identity"])
    _say_of("  markov identity", values["markov_identity"])
    _say_of("  rows", f"{values['row_bytes']} bytes: {values['taps']} taps of {values['hidden_size']}")
    _say_of("  limits", f"context {values['context']}, {values['max_rows']} rows per step")
    _say_of("  slots", f"{values['slots_in_use']} of {values['slots']} in use")
    _say_of("  device", f"{values['device']}, {values['dtype']}{held}")
    for one in values["sessions"]:
        times = f"p50 {one['worker_us_p50']} µs, p99 {one['worker_us_p99']} µs"
        _say_of("  engine", f"{one['engine']!r}: {one['slots_in_use']} slots, {one['rounds']} rounds, {times}")


def _spread(values: dict[str, Any]) -> str:
    return (
        f"p50 {values['p50_us']:,.0f} µs, p99 {values['p99_us']:,.0f} µs, max {values['max_us']:,.0f} µs "
        f"(of {values['count']:,})"
    )


def _say_of(what: str, said: object) -> None:
    _say(f"{what:18}{said}")


def _say(line: str) -> None:
    print(line, flush=True)
