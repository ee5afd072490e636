"""The quick calls of a round, as `round_calls.c` has them: functions of Python's that move a frame in one call without the GIL.

They are the quick form of what the rest of Farspark has in Python, which does without them where they are not to be had.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, Protocol, TypeVar, cast

from farspark.native.build import ROUNDCALLS, NativeUnavailable
from farspark.native.loader import open_build

logger = logging.getLogger(__name__)

ALL: Final = -1  # what `send` returns for a whole frame
# How a read ended: the two lowest bits of what `receive` returns.
CAME, LATE, ENDED = 0, 1, 2

Piece = bytes | bytearray | memoryview
Memory = bytearray | mmap.mmap
Outcome = tuple[int, bool, int, object]
"""Of UCX: a status, whether the frame is out, the length of the one that is there, and what keeps the pieces where they are as
long as it lives (None unless the status is HELD)."""
R = TypeVar("R")
Served = tuple[int, int, int, int, int, int, memoryview | int | OSError]
"""Bytes of the head that went out; when the data was seen, and the STEP sent, answered and ended, in nanoseconds of
CLOCK_MONOTONIC; how `hostflag_publish` ended, UNPUBLISHED where it was not called; and what `exchange` returns, or raises."""
UNPUBLISHED: Final = -1
Made = tuple[type[Any], type[Any], type[Any], int, int]
"""Entry, EntryReply, DraftEntry; the statuses OK and PARTIAL_WINDOW."""
GatherKind = tuple[int, int, int, int, tuple[Any, ...], tuple[Any, ...], tuple[int, ...], int, int]
"""Addresses of a launch's values and of its grid; the most rows and requests of a step; the two of its tensors that the runner
keeps for its life; the dtypes of five others, of the taps, of temperature and seeds (None where drafts are not sampled: nobody
looks at the two then); the stride of every tap, how many there are, and the width of each."""
Rules = tuple[int, int, int, int, int, int, int]
"""Slots, context, row bytes, rows per STEP, N, vocabulary, greatest position."""


class RoundCalls(Protocol):
    """Times are nanoseconds of CLOCK_MONOTONIC. A frame stands behind its length, a little-endian u32, as on the wire.

    In the memory the next frame begins at 0; the first `to` bytes are there already. Raises OSError as a
    socket does, and what a signal handler raises.
    """

    def send(self, descriptor: int, pieces: Sequence[Piece], /) -> int:
        """Hand over what fits without waiting: `ALL`, or the number of bytes, those of the length included."""
        ...

    def receive(
        self, descriptor: int, memory: Memory, to: int, wanted: int, limit: int, spin_ns: int, until_ns: int, /
    ) -> memoryview | int:
        """Read until the first `wanted` bytes of the frame are there, or the whole frame, or `until_ns`.

        The frame, where it was wanted whole (2**32 - 1) and is all that is there. Else 4 times the bytes that are there, plus how
        it ended: CAME, also where the frame is longer than `limit` or than the memory; LATE; ENDED, by the peer.
        """
        ...

    def exchange(
        self, descriptor: int, pieces: Sequence[Piece], memory: Memory, limit: int, spin_ns: int, until_ns: int, /
    ) -> memoryview | int:
        """`send`, and if all is out `receive` of a whole frame into empty memory; else -1 less the bytes that are out."""
        ...

    def serve(
        self,
        round_: bytes,
        record: bytes,
        meta: Any,
        head: bytearray,
        memory: Memory,
        sequence: int,
        descriptor: int,
        limit: int,
        spin_ns: int,
        wait_until_ns: int,
        /,
    ) -> Served | int:
        """A whole ordinary round of an engine's, as `pack_round` made it: `record` is what the host has said of it. Waits for its
        data, fills `meta`, int32 [n, 4] in writable memory, and `head` (`head_room` bytes), and publishes the result if the
        answer has drafts for everybody and no fault.

        A number: how `hostflag_wait_gathered` ended, and nothing was done. 0, OK, if something is out of the ordinary.
        """
        ...

    # STEPs in which nothing is out of the ordinary. None, or False, where anything is, or may be; then nothing was changed, and
    # Python's own form is asked, which is the one that says what is right. Types are those of named tuples.

    def step_head(
        self, session: int, sequence: int, step_id: int, entries: Sequence[Any], rows_bytes: int, flags: int, /
    ) -> bytes | None:
        """What `wire.codec.encode_step_head` returns."""
        ...

    def read_answer(
        self,
        frame: memoryview,
        session: int,
        sequence: int,
        reply: type[R],
        entry: type[tuple[Any, ...]],
        statuses: Any,
        /,
    ) -> R | None:
        """What `wire.codec.decode_answer` returns; `statuses` are all statuses of a request, by number."""
        ...

    def is_faultless(
        self,
        reply: Any,
        entries: Sequence[Any],
        step_id: int,
        num_drafts: int,
        vocab_size: int,
        context: int,
        want_margins: bool,
        /,
    ) -> bool:
        """True where `engine.replies.find_fault` finds none."""
        ...

    def begin_step(
        self, frame: memoryview, arrived: int, session: int, rules: Rules, held: dict[int, Any], made: Made, /
    ) -> tuple[Any, ...] | None:
        """What `worker.session.Session.plan` makes of a STEP of which `arrived` bytes are there, and the head of its reply.

        Sequence, step id, flags, entries, replies, drafts, held, places, verified, accepted, head.
        """
        ...

    def finish_reply(self, head: bytearray, reply: Any, /) -> list[bytearray | memoryview] | None:
        """What `wire.codec.finish_step_reply` returns."""
        ...

    def refill_gather(self, known: GatherKind, step: tuple[Any, ...], rows: int, meta: int, /) -> int:
        """Fill the launch of the gather's kernel for another `engine.gather.torch_gather.StepTensors` of a kind that it was
        filled for before, which is to write to the addresses `rows` and `meta`: the number of its requests.

        0 where the step may be of another kind; then nothing was changed, and `TritonGather` looks at it more closely.
        """
        ...

    def describe_round(
        self,
        record: int,
        round_: int,
        slots: list[int],
        owners: list[int],
        k_windows: list[int] | int,
        is_prefill: bool,
        /,
    ) -> bool:
        """What `engine.handoff.region.Region.describe` does, without windows, into the record at the address `record`. False,
        with nothing changed, where that is left to it."""
        ...

    def submit_round(
        self,
        at_submit: int,
        page: int,
        device: int,
        round_: int,
        stream: int,
        launch: int,
        reply_to: int,
        number: int,
        /,
    ) -> int:
        """`hostflag_submit` at the address `at_submit`, without copies: what it returns. The others are addresses, too, but for
        the round's `number`; the `hostflag_round` at `round_` is filled with them."""
        ...

    def ucx_calls(
        self, send: int, receive: int, exchange: int, take: int, channel: int, spin_ns: int, /
    ) -> dict[str, Callable[..., Any]]:
        """The functions of `UcxCalls` by name, for the channel at the address `channel`. The first four are the addresses of the
        functions of ucx_channel.h that are called so.
        """
        ...


class UcxCalls(Protocol):
    """What waits for UCX, on one channel of ucx_channel.h. Times are seconds of CLOCK_MONOTONIC, infinity is no deadline."""

    def send(self, pieces: Sequence[Piece], until_s: float, /) -> Outcome | None:
        """None: it is out."""
        ...

    def receive(self, limit: int, until_s: float, /) -> memoryview | Outcome:
        """The frame, in memory of its own, to which it is copied with the GIL held. One of more than `limit` bytes is not: it
        stays where it is, and its length comes with the status OK.
        """
        ...

    def exchange(self, pieces: Sequence[Piece], limit: int, until_s: float, /) -> memoryview | Outcome:
        """`send`, then `receive`."""
        ...


_ROUND: Final = struct.Struct("<10Q3q12I")


class OrdinaryRound(NamedTuple):
    """`roundcalls_round` of round_calls.h, in its order; what starts with `at_` is an address."""

    session: int
    step_id: int
    at_publish: int
    at_wait: int
    at_page: int
    at_record: int
    at_meta: int
    at_rows: int
    at_reply: int
    rows_room: int
    timeout_ns: int
    wait_spin_ns: int
    wait_nap_ns: int
    round: int
    requests: int
    row_bytes: int
    context: int
    max_rows: int
    slots: int
    num_drafts: int
    n_out: int
    vocab_size: int
    depth: int
    reply_bytes: int
    reserved: int


def pack_round(values: OrdinaryRound, requests: Sequence[int]) -> bytes:
    """For `serve`. Of each request: slot, generation, first position, drafts that the target verified."""
    return _ROUND.pack(*values) + struct.pack(f"<{len(requests)}I", *requests)


def head_room(requests: int) -> int:
    """Bytes of a STEP's head."""
    return 48 + 32 * requests


@functools.cache
def load_round_calls() -> RoundCalls | None:
    """None where there is no build and none can be made; said once, in the log. The first time ever this compiles."""
    try:
        return open_round_calls()
    except NativeUnavailable as error:
        logger.info("rounds go without %s, some 50 us slower: %s", ROUNDCALLS.title, error)
        return None


def ready_round_calls() -> RoundCalls | None:
    """What `load_round_calls` has found in this process; None before it was called. For those who have no time to compile."""
    return load_round_calls() if load_round_calls.cache_info().currsize else None


def open_round_calls(path: Path | None = None, *, cache: Path | None = None) -> RoundCalls:
    """As `loader.open_build`. Raises NativeUnavailable."""
    build = open_build(ROUNDCALLS, path, cache=cache)
    # The same library, called with the GIL held.
    functions = ctypes.PyDLL(str(build.path), handle=build.calls._handle).roundcalls_functions
    functions.restype = ctypes.py_object
    return cast(RoundCalls, SimpleNamespace(**functions()))
