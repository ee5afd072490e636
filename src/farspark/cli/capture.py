"""`farspark capture`: start vLLM so that it records its rounds, or say what a recording holds."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from farspark.cli import run as run_command
from farspark.cli.progress import shown_progress
from farspark.engine.config import PREFIX
from farspark.errors import ConfigError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "capture",
        help="start vLLM and record its rounds, or show a recording",
        usage="farspark capture [-h] --out FILE [--mib N] [--explain | --dry-run] CONFIG.env -- COMMAND ...\n"
        "       farspark capture --show FILE [--json]",
        description="As `farspark run`, with every round of the engine recorded: rows, anchors, the worker's drafts and, in "
        "shadow, the local drafter's. `farspark replay` plays the file against a worker. A row is the target's hidden states "
        "of one position of a user's text: treat the file as you treat the text.",
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="where to record; must not exist yet")
    parser.add_argument(
        "--mib", metavar="N", type=int, default=1024, help="stop recording at this size; default %(default)s"
    )
    parser.add_argument("--show", metavar="FILE", type=Path, help="say what a recording holds; start nothing")
    parser.add_argument("--json", action="store_true", help="with --show: print one JSON object")
    run_command.add_start_arguments(parser, optional=True)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.show is not None:
        if options.out is not None or options.file is not None:
            raise ConfigError("--show FILE starts nothing; leave out --out and CONFIG.env")
        return _show(options.show, as_json=options.json)
    if options.file is None or options.out is None:
        raise ConfigError(
            "expected `farspark capture --out FILE CONFIG.env -- vllm serve ...`, or `farspark capture --show FILE`"
        )
    if options.json:
        raise ConfigError("--json goes with --show")
    if options.out.exists():
        raise ConfigError(
            f"--out {options.out}: exists already, and a recording is never overwritten; name another file"
        )
    if options.mib < 1:
        raise ConfigError(f"--mib {options.mib}: expected 1 or more")
    settings = {
        # The engine may run in another folder.
        f"{PREFIX}_CAPTURE": str(options.out.absolute()),
        f"{PREFIX}_CAPTURE_MIB": str(options.mib),
    }
    launch = run_command.launch_of(options.file, {**os.environ, **settings})
    if launch.config is None:
        raise ConfigError(
            f"{options.file}: {PREFIX} is not set, so there are no rounds to record; set the worker's endpoint"
        )
    return run_command.start(options, launch)


def _show(path: Path, *, as_json: bool) -> int:
    # Imports numpy.
    from farspark.engine.capture import CaptureReader, summary

    with CaptureReader(path) as reader, shown_progress(sys.stderr) as progress:
        found = summary(reader, lambda done: progress("reading", done, reader.size))
    if as_json:
        print(json.dumps(found, indent=1))
        return 0
    for name, value in _lines(found):
        print(f"{name:18}{value}")
    return 0


def _lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    header, shape = found["header"], found["header"]["shape"]
    lines = [
        ("capture", f"{found['file']}, {found['bytes']:,} bytes, format {header['format']}"),
        (
            "recorded",
            f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(header['created_s']))} by farspark {header['farspark']}",
        ),
        ("engine", f"{header['engine']}, policy {header['policy']}"),
        ("  identity", header["identity"]),
        ("  markov identity", header["markov_identity"]),
        (
            "  shape",
            f"{shape['num_drafts']} drafts, vocabulary {shape['vocab_size']}, {shape['taps']} taps of {shape['hidden_size']}, "
            f"{shape['slots']} slots, context {shape['context']}, ring {shape['ring']}",
        ),
        (
            "rounds",
            f"{found['rounds']:,} ({found['rounds_prefill']:,} prefill, {found['rounds_decode']:,} decode), "
            f"{found['rows']:,} rows of {found['requests']:,} requests",
        ),
        (
            "  with drafts",
            f"{found['rounds_with_local_drafts']:,} of the local drafter, {found['rounds_with_remote_drafts']:,} of the worker",
        ),
    ]
    if found["left_out_rounds"]:
        lines.append(("  left out", f"{found['left_out_rounds']:,} rounds that the disk was too slow for"))
    lines.append(("ended", found["ended"] or "no: still being written, or the engine was killed"))
    if found["torn_bytes"]:
        lines.append(("torn tail", f"{found['torn_bytes']:,} bytes; everything in front of them is whole"))
    return lines
