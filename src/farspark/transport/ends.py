"""What the ends of every transport have in common: a name, an address, and an end of their own."""

from __future__ import annotations

import abc
import warnings
from types import TracebackType
from typing import Self


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
