"""`farspark worker`: serve a drafter checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from farspark.cli.output import say
from farspark.cli.progress import shown_progress
from farspark.errors import ConfigError
from farspark.token_file import read_token
from farspark.transport import Endpoint, listen, parse_endpoint
from farspark.transport.endpoint import MAX_SPIN_US
from farspark.worker.batch import DrafterInfo
from farspark.worker.config import DTYPES, FOLLOW, QUANTISATIONS, WorkerConfig
from farspark.worker.server import Server

_DEFAULTS = WorkerConfig(checkpoint=Path())
# What the main thread waits for: a signal, or the end of accepting.
_TOLD, _ENDED = b"t", b"e"


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Says the defaults that are values; what leaving an option out means otherwise stands in its help text."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None or action.default is False else super()._get_help_string(action)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "worker",
        help="serve a drafter checkpoint to one or several engines",
        description="Load a DSpark drafter, warm it up, and draft for the engines that connect. The line 'ready on ...' "
        "appears once every shape that a step can have has been met. SIGTERM or Ctrl-C lets the engines move to another worker "
        "and finishes the rounds in hand; a second one ends at once.",
        formatter_class=_Formatter,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="folder with config.json and the weights")
    parser.add_argument(
        "--target",
        metavar="DIR",
        type=Path,
        help="folder of the target model, for the embedding and the head where the drafter shares them",
    )
    parser.add_argument(
        "--listen",
        metavar="ENDPOINT",
        default=str(_DEFAULTS.listen),
        help="where to listen: tcp://HOST:PORT, an IPv6 address in brackets, port 0 for any free one; ucx://HOST:PORT for RDMA "
        "where both ends have it, else UCX's TCP; o1rdma:// and o1tcp:// pin one of the two",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        type=Path,
        help="serve only engines and probes that hold the token in this file, and prove to them that this worker does; only "
        "its owner may be able to read it",
    )
    parser.add_argument(
        "--allow-unauthenticated-network",
        action="store_true",
        help="listen on an address that other machines reach, although there is no token: whoever reaches the port can use "
        "the worker",
    )
    parser.add_argument(
        "--spin-us",
        metavar="MICROSECONDS",
        type=int,
        help="how long a wait for an engine's next frame spins before it sleeps, the same as ?spin_us= of --listen. Spinning "
        "spares the tens of microseconds that waking takes, and takes a core for each connection meanwhile; left out: the "
        "transport's own, 0 for tcp",
    )
    parser.add_argument("--device", default=_DEFAULTS.device, help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--dtype", choices=DTYPES, default=_DEFAULTS.dtype, help="what the drafter computes in")
    parser.add_argument(
        "--slots",
        metavar="COUNT",
        type=int,
        default=_DEFAULTS.slots,
        help="requests held at a time, all engines together: at least the max_num_seqs of the largest engine",
    )
    parser.add_argument(
        "--context", metavar="COUNT", type=int, default=_DEFAULTS.context, help="newest positions kept of each request"
    )
    parser.add_argument(
        "--drafts",
        metavar="N",
        type=int,
        help="tokens drafted at a time, as the engine's num_speculative_tokens; left out: the checkpoint's own number",
    )
    parser.add_argument(
        "--follow",
        choices=FOLLOW,
        default=_DEFAULTS.follow,
        help="whose reading counts where vLLM runs a drafter otherwise than it was trained (Gemma 4: whether the Markov bias is "
        "soft-capped; layers with a window: where it ends, and what is causal). vllm is what shadow compares with",
    )
    parser.add_argument(
        "--quantisation",
        choices=QUANTISATIONS,
        default=_DEFAULTS.quantisation,
        help="DeepSeek-V4 and V4.1: reference rounds activations and context to fp8 as DeepSeek's own code does; plain does not, "
        "and is faster and more precise. The weights and the identity are the same",
    )
    parser.add_argument(
        "--max-rows",
        metavar="COUNT",
        type=int,
        default=_DEFAULTS.max_rows,
        help="hidden-state rows that one step may bring, all requests together",
    )
    parser.add_argument(
        "--max-connections", metavar="COUNT", type=int, default=_DEFAULTS.max_connections, help="engines and probes"
    )
    parser.add_argument("--name", default=_DEFAULTS.name, help="what the worker calls itself towards engines")
    parser.add_argument(
        "--lease-s",
        metavar="SECONDS",
        type=float,
        default=_DEFAULTS.lease_s,
        help="how long an engine's session may be silent before its slots are freed, whatever its connection looks like; an "
        "idle engine says PING in time. 0: for ever",
    )
    parser.add_argument(
        "--drain-s",
        metavar="SECONDS",
        type=float,
        default=_DEFAULTS.drain_s,
        help="how long engines have to move to another worker when this one is told to stop, and then the rounds in hand to end",
    )
    parser.add_argument(
        "--ready-file",
        metavar="FILE",
        type=Path,
        help="written once the worker is ready, with the endpoint in use as its only line; removed when it stops",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    config = WorkerConfig(
        checkpoint=options.checkpoint,
        target=options.target,
        listen=_listen(options.listen, options.spin_us),
        device=options.device,
        dtype=options.dtype,
        slots=options.slots,
        context=options.context,
        num_drafts=options.drafts,
        follow=options.follow,
        quantisation=options.quantisation,
        max_rows=options.max_rows,
        max_connections=options.max_connections,
        name=options.name,
        lease_s=options.lease_s,
        drain_s=options.drain_s,
        token=read_token(options.token_file, "--token-file"),
        allow_unauthenticated_network=options.allow_unauthenticated_network,
        ready_file=options.ready_file,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    if os.getpid() == 1:
        # The first process of a container gets no signal that it has no handler for; loading may take minutes.
        signal.signal(signal.SIGTERM, lambda number, _frame: os._exit(128 + number))
    _check_before_loading(config)

    # Imports torch.
    from farspark.worker.drafter import open_drafter
    from farspark.worker.models.families import ModelOptions

    _say(f"loading {config.checkpoint} for {config.device} in {config.dtype}")
    with shown_progress() as progress:
        drafter = open_drafter(
            config.checkpoint,
            target=config.target,
            device=config.device,
            dtype=config.dtype,
            slots=config.slots,
            context=config.context,
            num_drafts=config.num_drafts,
            options=ModelOptions(follow=config.follow, quantisation=config.quantisation),
            progress=progress,
        )
        _describe(drafter.info)
        drafter.warm_up(progress)
    with Server(drafter, config) as server:
        if server.max_rows < config.max_rows:
            _say(f"rows per step: {server.max_rows}, as many as one frame holds (--max-rows {config.max_rows})")
        if config.token is not None:
            _say(f"peers must prove to hold the token of {options.token_file}")
        _say(f"lanes             {server.lanes}")
        with _signalled() as signalled:
            thread = threading.Thread(target=_serve, args=(server, signalled), name="farspark-accept", daemon=True)
            with _announced(server, config):
                _say(f"ready on {server.endpoint}")
                thread.start()
                was_told = os.read(signalled.read_end, 1) == _TOLD
            _drain(server, signalled, config.drain_s)
            server.stop()
            thread.join()
    return 0 if was_told else 1


def _listen(text: str, spin_us: int | None) -> Endpoint:
    endpoint = parse_endpoint(text)
    if spin_us is None:
        return endpoint
    if not 0 <= spin_us <= MAX_SPIN_US:
        raise ConfigError(f"--spin-us {spin_us}: expected microseconds, 0 to {MAX_SPIN_US}")
    if endpoint.spin_us not in (None, spin_us):
        raise ConfigError(
            f"--spin-us {spin_us} contradicts ?spin_us={endpoint.spin_us} of --listen; give only one of them"
        )
    return replace(endpoint, spin_us=spin_us)


def _check_before_loading(config: WorkerConfig) -> None:
    """What would fail after minutes of loading fails here. A ready file of a worker that died goes."""
    listen(config.listen, max_frame_bytes=1).close()
    if config.ready_file is not None:
        if not config.ready_file.parent.is_dir():
            raise ConfigError(f"--ready-file {config.ready_file}: its folder does not exist")
        _remove(config.ready_file)
        try:
            _partial(config.ready_file).touch()
        except OSError as error:
            raise ConfigError(
                f"--ready-file {config.ready_file}: its folder cannot be written to: {error.strerror}"
            ) from error
        _remove(_partial(config.ready_file))
    for what, folder in (("checkpoint", config.checkpoint), ("--target", config.target)):
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"{what} {folder}: not a folder; expected one with config.json and the weights")


def _describe(info: DrafterInfo) -> None:
    window = f", sliding window {info.window}" if info.window else ""
    _say(f"drafter           {info.kind}, {info.num_drafts} drafts, vocabulary {info.vocab_size:,}{window}")
    _say(f"weights           {info.weight_bytes / 2**20:,.1f} MiB on {info.device} in {info.dtype}")
    _say(f"rows              {info.row_bytes:,} bytes: {info.taps} taps of {info.hidden_size:,}")
    _say(
        f"context           {info.slots} slots of {info.context:,} positions: "
        f"{info.context_bytes / 2**20:,.1f} MiB on {info.device}"
    )
    _say(f"identity          {info.identity.hex()}")
    _say(f"markov identity   {info.markov_identity.hex()}")


@contextlib.contextmanager
def _announced(server: Server, config: WorkerConfig) -> Iterator[None]:
    """The ready file exists from here on until the end of the block."""
    path = config.ready_file
    if path is None:
        yield
        return
    partial = _partial(path)
    try:
        partial.write_text(f"{server.endpoint}\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"--ready-file {path}: {error.strerror}") from error
    try:
        yield
    finally:
        _remove(path)


def _partial(ready_file: Path) -> Path:
    """What becomes the ready file once it is written."""
    return ready_file.with_name(f".{ready_file.name}.{os.getpid()}")


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--ready-file {path}: {error.strerror}") from error


@dataclass(slots=True)
class _Signals:
    """What handlers write to; a handler may interrupt its thread anywhere, also while it holds a lock."""

    read_end: int
    write_end: int
    is_last: bool = False  # the next one ends the process


@contextlib.contextmanager
def _signalled() -> Iterator[_Signals]:
    """SIGTERM and SIGINT write a byte; once engines are being waited for they end the process at once."""
    signals = _Signals(*os.pipe())

    def note(number: int, _frame: FrameType | None) -> None:
        if signals.is_last:
            with contextlib.suppress(OSError):  # nobody may be reading
                os.write(2, b"farspark: told to stop twice, ended at once\n")
            os._exit(128 + number)
        os.write(signals.write_end, _TOLD)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    try:
        yield signals
    finally:
        # What remains is to leave; one more signal should not turn that into a failure.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        os.close(signals.read_end)
        os.close(signals.write_end)


def _serve(server: Server, signals: _Signals) -> None:
    """Until the worker is told to stop, or accepting has ended by itself."""
    try:
        server.serve()
    finally:
        os.write(signals.write_end, _ENDED)


def _drain(server: Server, signals: _Signals, drain_s: float) -> None:
    sessions = server.sessions
    if sessions:
        signals.is_last = True
        _say(f"stopping: {sessions} engine{'s' * (sessions > 1)} may move elsewhere, for {drain_s:g} s at most")
    if server.drain():
        _say("stopping: nobody is connected")
    else:
        _say("stopping: rounds in hand are finished first")


def _say(line: str) -> None:
    """Engines are served whether anybody reads this or not."""
    say(line, sys.stdout)
