"""`farspark replay`: play a recording against a worker and compare what comes back."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from farspark.cli.progress import shown_progress
from farspark.errors import ConfigError
from farspark.token_file import read_token
from farspark.transport import parse_endpoints


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "replay",
        help="play recorded rounds against a worker and compare the drafts",
        description="Play the rounds that `farspark capture` recorded against a worker, over a session of its own, and compare "
        "the worker's drafts with the recorded ones. The session takes slots of the worker; an engine that is being served "
        "by it shares its time. Exit code 0: everything equal, or near ties; 1: something differs or failed, and where; "
        "2: nothing was compared, and why.",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="a recording")
    parser.add_argument("endpoint", metavar="ENDPOINT", help="the worker, as tcp://10.0.0.2:18620")
    parser.add_argument("--token-file", metavar="FILE", type=Path, help="the token that the worker demands")
    parser.add_argument(
        "--against",
        choices=("local", "remote"),
        default="local",
        help="whose recorded drafts to compare with: the engine's own drafter's, or an earlier worker's; default %(default)s",
    )
    parser.add_argument("--limit", metavar="N", type=int, help="play the first N rounds only")
    parser.add_argument(
        "--timeout-s", metavar="SECONDS", type=float, default=30.0, help="of a round; default %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.limit is not None and options.limit < 1:
        raise ConfigError(f"--limit {options.limit}: expected 1 or more")
    # Written so that NaN fails it.
    if not 0 < options.timeout_s <= 3600:
        raise ConfigError(f"--timeout-s {options.timeout_s:g}: expected seconds, more than 0 and at most 3600")
    endpoints = parse_endpoints(options.endpoint)
    token = read_token(options.token_file, "--token-file")
    # Imports numpy.
    from farspark.engine.capture import CaptureReader
    from farspark.engine.replay import Replay, verdict_of

    with CaptureReader(options.file) as reader, shown_progress(sys.stderr) as progress:
        replay = Replay(reader.header, endpoints, against=options.against, timeout_s=options.timeout_s, token=token)
        total = options.limit or reader.size
        with replay:
            for number, captured in enumerate(reader.rounds(), start=1):
                goes_on = replay.play(captured)
                progress("replaying", number if options.limit else reader.offset, total)
                if not goes_on or number == options.limit:
                    break
            else:
                progress("replaying", total, total)
    verdict = verdict_of(replay)
    data = {"file": str(options.file), "torn_bytes": reader.torn_bytes, **verdict.data, "equal": verdict.is_equal}
    shadow = data["shadow"]
    if shadow["blocks"] == shadow["routing_ambiguous"] and not data["failed_rounds"]:
        raise ConfigError(_nothing_compared(data))
    if options.json:
        print(json.dumps(data, indent=1))
    else:
        for name, value in _lines(data):
            print(f"{name:18}{value}")
    return 0 if verdict.is_equal else 1


def _nothing_compared(data: dict[str, Any]) -> str:
    if data["without_captured_drafts"]:
        other = "remote" if data["against"] == "local" else "local"
        return f"{data['file']} has no {data['against']} drafts to compare with; record in shadow, or try --against {other}"
    if data["shadow"]["routing_ambiguous"]:
        return (
            f"{data['file']}: {data['shadow']['routing_ambiguous']} blocks, and in each of them a router was near a tie: a "
            f"margin below {data['shadow']['bounds']['routing_margin']:g}. Record more rounds"
        )
    return (
        f"{data['file']}: {data['rounds']} rounds and nothing to compare: {data['partial_windows']} drafts were made from "
        "another window than the recorded ones. Record from the engine's start, longer, and without prefix-cache hits"
    )


def _lines(data: dict[str, Any]) -> list[tuple[str, str]]:
    shadow, context = data["shadow"], data["context"]
    steps = {"ties": shadow["ties"], "diverged": shadow["diverged"], "far off": shadow["far_diverged"]}
    lines = [
        ("worker", data["worker"]),
        ("rounds", f"{data['rounds']:,} played, {data['failed_rounds']:,} failed"),
        ("compared", f"{shadow['blocks']:,} blocks with the recorded {data['against']} drafts"),
    ]
    if shadow["blocks"]:
        lines += [
            ("  whole blocks", f"{shadow['full_block_agree_rate']:.2%} equal"),
            (
                "  by position",
                "  ".join(f"{k + 1}: {rate:.2%}" for k, rate in enumerate(shadow["agree_rate_by_position"])),
            ),
            (
                "  first mismatch",
                "  ".join(f"{k}: {count:,}" for k, count in shadow["first_mismatch"].items() if count),
            ),
            (
                "  teacher-forced",
                f"{shadow['equal']:,} of {shadow['steps']:,} drafts equal, "
                + ", ".join(f"{count:,} {name}" for name, count in steps.items())
                + f", largest gap {shadow['largest_gap_ulps']:g} bf16 steps; {shadow['unjudged']:,} blocks unjudged",
            ),
        ]
        if shadow["has_router"]:
            bound = shadow["bounds"]["routing_margin"]
            kept_out = f"{shadow['routing_ambiguous']:,} blocks kept out: a margin below {bound:g}"
            margins = "  ".join(f"{name}: {count:,}" for name, count in shadow["routing_margins"].items())
            lines += [("  routing ties", kept_out), ("  routing margins", margins)]
        if shadow["largest_confidence_difference"] is not None:
            lines.append(("  confidence", f"largest difference {shadow['largest_confidence_difference']:.4f}"))
    for name, key in (
        ("not compared", "partial_windows"),
        ("no drafts for", "without_captured_drafts"),
        ("left out", "left_out_rounds"),
    ):
        if data[key]:
            lines.append((name, f"{data[key]:,} {_WHY[key]}"))
    if context["worker"] != context["capture"]:
        lines.append(("context", f"the worker's {context['worker']:,}, the engine's {context['capture']:,}"))
    if data["torn_bytes"]:
        lines.append(("torn tail", f"{data['torn_bytes']:,} bytes were not read"))
    for name, key in (("round trip", "rtt_us"), ("worker's own", "worker_us")):
        if (spread := data["latency"][key]) is not None:
            lines.append(
                (name, f"p50 {spread['p50']:,.0f} µs, p99 {spread['p99']:,.0f} µs, max {spread['max']:,.0f} µs")
            )
    if data["stopped"]:
        lines.append(("stopped", data["stopped"]))
    for example in shadow["examples"][:3]:
        lines.append(("  example", json.dumps(example)))
    lines.append(("verdict", "equal" if data["equal"] else "DIFFERENT"))
    return lines


_WHY = {
    "partial_windows": "drafts from another window: behind a prefix-cache hit, or a request that began in front of the recording",
    "without_captured_drafts": "blocks that the recording has no such drafts for",
    "left_out_rounds": "rounds that the recording lacks",
}
