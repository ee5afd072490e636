"""How a command shows that long work goes on: a bar where there is a terminal and rich, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from farspark.cli.output import say

Progress = Callable[[str, int, int], None]

# A log that nobody watches needs no more than this many lines.
_SECONDS_BETWEEN_LINES = 5.0


@contextlib.contextmanager
def shown_progress(stream: TextIO | None = None) -> Iterator[Progress]:
    """A `progress(what, done, total)` on `stream` (None: what stderr is now); `total` 0 while it is not known."""
    stream = stream or sys.stderr
    if stream.isatty():
        try:
            from rich.console import Console
            from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bars
        except ImportError:
            pass
        else:
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
            with Bars(*columns, console=Console(file=stream)) as bars:
                tasks = {}

                def update(what: str, done: int, total: int) -> None:
                    if what not in tasks:
                        tasks[what] = bars.add_task(what, total=total or None)
                    bars.update(tasks[what], completed=done, total=total or None)

                yield update
            return
    yield PlainProgress(stream)


class PlainProgress:
    """A line when something begins, now and then while it goes on, and when it ends."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._what = ""
        self._is_done = False
        self._began_s = 0.0
        self._said_s = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = self._clock()
        if what != self._what:
            self._what, self._is_done, self._began_s, self._said_s = what, False, now, now
            self._say(f"{what} ...")
        if total and done >= total:
            if not self._is_done:
                self._is_done = True
                self._say(f"{what}: done in {now - self._began_s:.1f} s")
        elif now - self._said_s >= _SECONDS_BETWEEN_LINES:
            self._said_s = now
            self._say(f"{what}: {100 * done // total} %" if total else f"{what}: {done}")

    def _say(self, line: str) -> None:
        say(line, self._stream)
