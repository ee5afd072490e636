"""`farspark stats`: an engine's stats file or a worker's STATS, for people."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from farspark.cli.output import say
from farspark.errors import ConfigError, FarsparkError
from farspark.probe.peer import TOKEN_OPTION, StatsReader
from farspark.token_file import read_token
from farspark.transport import parse_endpoint

_TIMEOUT_S = 5.0
_SECONDS_BETWEEN_LOOKS = 1.0
# Of a table: more do not fit a line.
_MAX_COLUMNS = 8

Read = Callable[[], tuple[str, dict[str, Any]]]
"""Reads once: what was read, as a line, and the snapshot. Raises ConfigError, FarsparkError or TimeoutError."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "stats",
        help="show an engine's stats file or a worker's statistics",
        description="Show the stats file that an engine's rank 0 writes (VLLM_DSPARK_REMOTE_STATS_FILE), or what a worker "
        "answers to STATS. What is counted stands in docs/operations.md.",
    )
    parser.add_argument("source", metavar="FILE|ENDPOINT", help="a stats file, or a worker as tcp://10.0.0.2:18620")
    parser.add_argument(
        "--token-file", metavar="FILE", type=Path, help="the token that the worker demands; for an ENDPOINT only"
    )
    parser.add_argument("--watch", action="store_true", help="show it again every second, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print the JSON itself; with --watch one object a line")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    with _opened(options.source, options.token_file) as read:
        try:
            if options.watch:
                _watch(read, sys.stdout, as_json=options.json)
            else:
                title, snapshot = read()
                if options.json:
                    print(json.dumps(snapshot, indent=1))
                else:
                    _show(title, snapshot, sys.stdout)
        except KeyboardInterrupt:
            # Ctrl-C is how a watch ends.
            if not options.watch:
                raise
    return 0


@contextlib.contextmanager
def _opened(source: str, token_file: Path | None = None) -> Iterator[Read]:
    if "://" not in source:
        if token_file is not None:
            raise ConfigError(f"{TOKEN_OPTION} {token_file}: {source} is a file; a token is for a worker's endpoint")
        yield lambda: read_file(Path(source))
        return
    endpoint = parse_endpoint(source)
    token = read_token(token_file, TOKEN_OPTION)
    with StatsReader(endpoint, _TIMEOUT_S, token=token) as reader:
        yield lambda: (f"worker at {endpoint}", reader.read())


def read_file(path: Path) -> tuple[str, dict[str, Any]]:
    """A stats file, and how old it is: an engine that ended leaves its last one behind."""
    try:
        written_s = path.stat().st_mtime
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"stats file {path}: {error.strerror}; rank 0 of a running engine writes it") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"stats file {path}: not JSON: {error}") from error
    try:
        snapshot = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"stats file {path}: not JSON: {error}") from error
    if not isinstance(snapshot, dict):
        raise ConfigError(f"stats file {path}: a JSON {type(snapshot).__name__}, expected an object")
    return f"{path}, written {max(0.0, time.time() - written_s):,.0f} s ago", snapshot


@dataclass(slots=True)
class Section:
    """A heading and its rows; the first of `columns` is the name, the others are right-aligned."""

    heading: str
    columns: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = field(default_factory=list)


def sections(snapshot: Mapping[str, Any]) -> list[Section]:
    """Whatever a snapshot holds, in its own order: plain values first, then one section for each object."""
    plain = Section("")
    nested: list[Section] = []
    for name, value in snapshot.items():
        _place(name, value, plain, nested)
    return [section for section in (plain, *nested) if section.rows]


def _place(name: str, value: Any, plain: Section, nested: list[Section]) -> None:
    columns = _columns(value)
    if len(columns) > _MAX_COLUMNS:
        # What has many values, as a worker's session, is a column of its own.
        lines = [(column, *(_text(cells[column]) for cells in value.values())) for column in columns]
        nested.append(Section(name, ("", *map(str, value)), lines))
    elif columns:
        shown = [(str(row), *(_text(cells.get(column, "")) for column in columns)) for row, cells in value.items()]
        nested.append(Section(name, ("", *columns), shown))
    elif isinstance(value, dict):
        section = Section(name)
        nested.append(section)
        for inner, one in value.items():
            if isinstance(one, dict):
                _place(f"{name}.{inner}", one, section, nested)
            else:
                _place(str(inner), one, section, nested)
    elif isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        nested.append(Section(name, (), [(str(index), ", ".join(_pairs(one))) for index, one in enumerate(value)]))
    else:
        plain.rows.append((name, _text(value)))


def _columns(value: Any) -> tuple[str, ...]:
    """The columns of a table: an object of objects that have only plain values and the first one's keys, as `latency` is."""
    if not isinstance(value, dict) or not value or not all(isinstance(one, dict) and one for one in value.values()):
        return ()
    first = tuple(next(iter(value.values())))
    is_table = all(
        tuple(one) == first and not any(isinstance(cell, dict | list) for cell in one.values())
        for one in value.values()
    )
    return first if is_table else ()


def _pairs(value: Mapping[str, Any]) -> list[str]:
    return [f"{name} {_text(one)}" for name, one in value.items()]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4f}".rstrip("0").rstrip(".") if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list):
        return " ".join(_text(one) for one in value) or "–"
    if isinstance(value, dict):
        return "{" + ", ".join(_pairs(value)) + "}"
    return str(value)


def plain_lines(title: str, found: Sequence[Section]) -> list[str]:
    """Aligned text, readable without colours."""
    lines = [title]
    for section in found:
        rows = [section.columns, *section.rows] if section.columns else section.rows
        if section.heading:
            lines += ["", section.heading]
        widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
        for row in rows:
            rest = (
                row[1:]
                if len(row) == 2
                else [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            )
            lines.append("  " + "  ".join([row[0].ljust(widths[0]), *rest]).rstrip())
    return lines


def _show(title: str, snapshot: Mapping[str, Any], stream: TextIO) -> None:
    found = sections(snapshot)
    if stream.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            Console(file=stream).print(_rich(title, found))
            return
    print("\n".join(plain_lines(title, found)), file=stream, flush=True)


def _rich(title: str, found: Sequence[Section]) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = [Text(title, style="bold")]
    for section in found:
        table = Table(box=None, show_header=bool(section.columns), pad_edge=False, padding=(0, 2, 0, 0))
        for at in range(len(section.rows[0])):
            header = section.columns[at] if section.columns else ""
            table.add_column(
                header, justify="right" if at and section.columns else "left", header_style="dim", overflow="fold"
            )
        for row in section.rows:
            # As Text, so that brackets in a value are no markup.
            table.add_row(*(Text(cell) for cell in row))
        parts += [Text(f"\n{section.heading}", style="bold cyan"), table] if section.heading else [table]
    return Group(*parts)


def _watch(read: Read, stream: TextIO, *, as_json: bool, seconds: float = _SECONDS_BETWEEN_LOOKS) -> None:
    """Until KeyboardInterrupt. What cannot be read at the start is an error; later it is said and tried again."""
    title, snapshot = read()
    with _screen(stream, as_json=as_json) as show:
        show(title, snapshot)
        while True:
            time.sleep(seconds)
            try:
                title, snapshot = read()
            except (FarsparkError, TimeoutError) as error:
                # Workers restart and files are replaced: the last snapshot stays, with the reason above it.
                title = f"cannot be read at the moment: {error}"
                if as_json:
                    say(f"farspark: {title}", sys.stderr)
                    continue
            show(title, snapshot)


@contextlib.contextmanager
def _screen(stream: TextIO, *, as_json: bool) -> Iterator[Callable[[str, Mapping[str, Any]], None]]:
    if as_json:
        yield lambda _title, snapshot: print(json.dumps(snapshot), file=stream, flush=True)
        return
    if stream.isatty():
        try:
            from rich.console import Console
            from rich.live import Live
        except ImportError:
            pass
        else:
            with Live(console=Console(file=stream), auto_refresh=False, screen=True) as live:
                yield lambda title, snapshot: live.update(_rich(title, sections(snapshot)), refresh=True)
            return
    yield lambda title, snapshot: print(
        "\n".join(plain_lines(title, sections(snapshot))) + "\n", file=stream, flush=True
    )
