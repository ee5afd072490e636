from __future__ import annotations

import io

from tests.fakes.clock import FakeClock

from farspark.cli.progress import PlainProgress, shown_progress


def test_plain_progress_says_the_beginning_the_end_and_a_line_now_and_then() -> None:
    stream, clock = io.StringIO(), FakeClock()
    progress = PlainProgress(stream, clock)
    for done in range(0, 101, 10):
        progress("reading", done, 100)
        clock.advance(1)
    progress("reading", 100, 100)
    progress("warming up", 0, 0)
    clock.advance(6)
    progress("warming up", 7, 0)
    assert stream.getvalue().splitlines() == [
        "reading ...",
        "reading: 50 %",
        "reading: done in 10.0 s",
        "warming up ...",
        "warming up: 7",
    ]


def test_a_stream_that_is_no_terminal_gets_plain_lines() -> None:
    stream = io.StringIO()
    with shown_progress(stream) as progress:
        progress("reading", 1, 1)
    assert stream.getvalue().startswith("reading ...\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar() -> None:
    stream = Terminal()
    with shown_progress(stream) as progress:
        progress("reading", 0, 0)
        progress("reading", 1, 2)
        progress("warming up", 3, 3)
    assert "reading" in stream.getvalue()
    assert "100%" in stream.getvalue()
