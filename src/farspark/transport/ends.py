"""What the ends of every transport have in common: a name, an address, and an end of their own."""

from __future__ import annotations

import abc
import math
import mmap
import time
import warnings
from types import TracebackType
from typing import Final, Self

from farspark.clock import Deadline
from farspark.errors import TransportError
from farspark.transport.base import Memory

# Memory up to this size is kept for the frames to come: pages that are warm cost a tenth of those the kernel must zero.
_MAX_KEPT_BYTES: Final = 4 * 1024 * 1024
NEVER_NS: Final = 2**63 - 1  # ROUNDCALLS_NEVER, UCXCHANNEL_NEVER
_monotonic = time.monotonic


def at_s(deadline: Deadline) -> float:
    """The deadline in seconds of CLOCK_MONOTONIC."""
    return deadline.at_s if deadline.clock is _monotonic else _monotonic() + deadline.left_s()


def at_ns(deadline: Deadline) -> int:
    """The deadline in nanoseconds of CLOCK_MONOTONIC."""
    if deadline.clock is _monotonic:
        return NEVER_NS if deadline.at_s == math.inf else int(deadline.at_s * 1e9)
    left_s = deadline.left_s()
    return NEVER_NS if left_s == math.inf else time.monotonic_ns() + int(left_s * 1e9)


def memory_of(size: int) -> Memory:
    """Fresh memory to receive into.

    What will not be kept is the kernel's own, page by page as a frame comes in. A bytearray is zeroed at once, with the GIL held:
    80 ms for 100 MiB, which the rounds of all other connections would wait for, and for a length alone.
    """
    if size <= _MAX_KEPT_BYTES:
        return bytearray(size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class _End(abc.ABC):
    """`with` closes it."""

    _is_closed: bool

    @abc.abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _named(self, name: str) -> str:
        return f"<{type(self).__name__} {name}{' closed' if self._is_closed else ''}>"


class ChannelEnd(_End):
    """Of a `Channel` that sets `_lane` and `_is_closed`."""

    _lane: str

    def __repr__(self) -> str:
        return self._named(self._lane)

    @property
    def lane(self) -> str:
        return self._lane

    @property
    def is_closed(self) -> bool:
        return self._is_closed


class WatchedChannelEnd(ChannelEnd):
    """Of a channel over something that does not say itself that it was never closed, as a socket does."""

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=1)


class GuardedChannelEnd(ChannelEnd):
    """Of a channel that sets `_is_busy`, too, over something that may not go under a call that uses it.

    A call sets busy and then looks at closed; `close` sets closed and then looks at busy: whatever the order, one of them sees
    the other. A lock would cost a round 15 us.
    """

    _is_busy: bool

    @abc.abstractmethod
    def _wake(self) -> None:
        """End the wait of the thread that is inside, from any other; nothing if it is not inside any more."""

    @abc.abstractmethod
    def _let_go(self) -> None:
        """Of what is used. Two threads may come here at the same time, and again later."""

    def close(self) -> None:
        self._is_closed = True
        if self._is_busy:
            self._wake()  # whoever is inside lets go on its way out
        else:
            self._let_go()

    def _begin(self) -> None:
        self._is_busy = True
        if self._is_closed:
            self._end()
            raise TransportError(f"{self._lane}: closed")

    def _end(self) -> None:
        self._is_busy = False
        if self._is_closed:
            self._let_go()


class ListenerEnd(_End):
    """Of a `Listener` that sets `_endpoint`, `_lanes` and `_is_closed`."""

    _endpoint: str
    _lanes: str

    def __repr__(self) -> str:
        return self._named(self._endpoint)

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def lanes(self) -> str:
        return self._lanes
