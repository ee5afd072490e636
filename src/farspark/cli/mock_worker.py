"""`farspark mock-worker`: a worker without a model that can fail in every way that an engine must survive."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from farspark.errors import ConfigError
from farspark.mock.drafter import mock_info
from farspark.mock.faults import JUDGE_ONLY, KINDS, STEP_ONLY, Fault, Kind
from farspark.mock.relay import MockWorker
from farspark.token_file import read_token
from farspark.transport import parse_endpoint
from farspark.wire import layout
from farspark.wire.auth import NO_IDENTITY
from farspark.wire.layout import Operation
from farspark.worker.config import WorkerConfig


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    width = max(len(_spelling(kind)) for kind in KINDS)
    kinds = "\n".join(f"  {_spelling(kind):{width}}  {kind.sentence}" for kind in KINDS)
    parser = subparsers.add_parser(
        "mock-worker",
        help="stand in for the worker without a model, and fail on demand",
        description="A worker without a model: its drafts are made up, so an engine should use it in shadow only. With\n"
        "--fault every K-th answer goes wrong in one way. Ctrl-C or SIGTERM ends it.",
        epilog=f"kinds of faults:\n{kinds}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--listen", metavar="ENDPOINT", default="tcp://127.0.0.1:18620", help="where to listen; default %(default)s"
    )
    parser.add_argument("--drafts", metavar="N", type=int, required=True, help="the engine's num_speculative_tokens")
    parser.add_argument("--vocab", metavar="V", type=int, required=True, help="the target's vocabulary")
    parser.add_argument("--hidden", metavar="H", type=int, required=True, help="the target's hidden size")
    parser.add_argument("--taps", metavar="T", type=int, required=True, help="tapped layers of the target")
    parser.add_argument("--slots", metavar="S", type=int, default=8, help="requests at a time; default %(default)s")
    parser.add_argument(
        "--context", metavar="C", type=int, default=4096, help="positions per request; default %(default)s"
    )
    parser.add_argument(
        "--max-rows", metavar="COUNT", type=int, default=4096, help="rows of a step; default %(default)s"
    )
    parser.add_argument(
        "--identity",
        metavar="HEX|any",
        default="any",
        help="what to prove to be: 64 hex digits, or any: whatever the engine demands; default %(default)s",
    )
    parser.add_argument(
        "--routing-margin",
        metavar="MARGIN",
        type=float,
        help="stand in for a mixture of experts: judge other drafts, and say of every block that its closest choice of experts "
        "was by MARGIN; left out: a dense drafter, which judges nothing",
    )
    parser.add_argument("--fault", metavar="KIND[:ARG]", help="how to fail, see below; left out: not at all")
    parser.add_argument(
        "--every", metavar="K", type=int, default=1, help="fail on every K-th answer; default %(default)s"
    )
    parser.add_argument(
        "--on",
        metavar="OPERATION",
        choices=[operation.name.lower() for operation in Operation],
        default="step",
        help="whose answers fail: hello, step, ping, stats, free, bye, judge, challenge or prove; default %(default)s",
    )
    parser.add_argument(
        "--token-file", metavar="FILE", type=Path, help="the token to demand, and to prove, as the worker does"
    )
    parser.add_argument(
        "--allow-unauthenticated-network",
        action="store_true",
        help="listen on an address that other machines reach",
    )
    parser.set_defaults(run=run)


def _spelling(kind: Kind) -> str:
    if not kind.argument:
        return kind.name
    return f"{kind.name}[:{kind.argument}]" if kind.default else f"{kind.name}:{kind.argument}"


def run(options: argparse.Namespace) -> int:
    for option, value, low, high in (
        ("--drafts", options.drafts, 1, layout.MAX_DRAFTS),
        ("--vocab", options.vocab, 2, layout.MAX_TOKEN),
        ("--hidden", options.hidden, 1, 1 << 20),
        ("--taps", options.taps, 1, 0xFFFF),
        ("--every", options.every, 1, 1 << 31),
    ):
        if not low <= value <= high:
            raise ConfigError(f"{option} {value}: expected {low} to {high}")
    margin = options.routing_margin
    # Written so that NaN fails it.
    if margin is not None and not 0 <= margin <= _MAX_MARGIN:
        raise ConfigError(f"--routing-margin {margin:g}: expected a number from 0 to {_MAX_MARGIN:g}")
    endpoint = parse_endpoint(options.listen)
    token = read_token(options.token_file, "--token-file")
    # The rules for slots, context, rows and addresses are the worker's own.
    WorkerConfig(
        checkpoint=Path(),
        listen=endpoint,
        slots=options.slots,
        context=options.context,
        max_rows=options.max_rows,
        token=token,
        allow_unauthenticated_network=options.allow_unauthenticated_network,
    )
    fault = None if options.fault is None else Fault.parse(options.fault, options.vocab)
    operation = Operation[options.on.upper()]
    for kinds, only in ((STEP_ONLY, Operation.STEP), (JUDGE_ONLY, Operation.JUDGE)):
        if fault is not None and fault.kind in kinds and operation is not only:
            raise ConfigError(
                f"--fault {options.fault} --on {options.on}: only the answer to a {only.name} can fail so"
            )
    info = mock_info(
        num_drafts=options.drafts,
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        taps=options.taps,
        slots=options.slots,
        context=options.context,
        identity=_identity(options.identity),
        has_router=margin is not None,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with (
        _signals_blocked(),
        MockWorker(
            info,
            endpoint,
            fault=fault,
            every=options.every,
            operation=operation,
            any_identity=options.identity == "any",
            max_rows=options.max_rows,
            token=token,
            routing_margin=margin or 0.0,
        ) as worker,
    ):
        how = "no faults" if fault is None else f"{options.fault} on every {options.every}. answer to {operation.name}"
        print(f"mock drafts (for shadow only), {how}", flush=True)
        print(f"ready on {worker.endpoint}", flush=True)
        signal.sigwait(_ENDS)
    print(f"stopped after {worker.faults} faults", flush=True)
    return 0


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Around the first thread's start, so that every thread inherits it and only `sigwait` takes the signals."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_MAX_MARGIN: Final = 1e30
_ENDS: Final = frozenset({signal.SIGTERM, signal.SIGINT})


def _identity(text: str) -> bytes:
    if text == "any":
        return NO_IDENTITY
    try:
        identity = bytes.fromhex(text)
    except ValueError:
        identity = b""
    if len(identity) != layout.IDENTITY_BYTES:
        raise ConfigError(f"--identity {text!r}: expected 64 hex digits or any")
    return identity
