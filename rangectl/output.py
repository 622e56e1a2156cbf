"""Where results, notes and errors go: stdout, stderr, human or JSON.

Owns printing for all verbs, a closed pipe included; never decides what is said.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Protocol, TextIO

from rangekv.format.errors import EnvironmentFault, RangeError

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class Advance(Protocol):
    """Reports that `done_bytes` more bytes are behind us."""

    def __call__(self, done_bytes: int) -> None: ...


def human_bytes(size_bytes: float) -> str:
    """Return `1.00 GiB`; below 1 KiB the plain count."""
    unit = 0
    while abs(size_bytes) >= 1024 and unit < len(_UNITS) - 1:
        size_bytes /= 1024
        unit += 1
    return f"{size_bytes:.2f} {_UNITS[unit]}" if unit else f"{int(size_bytes)} B"


def counted(count: int, noun: str) -> str:
    """Return `1 record`, `2,048 records`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def utc(unix_ns: int) -> str:
    """Return `2026-11-30 10:00:00 UTC`, or nothing where no calendar has that time."""
    try:
        moment = datetime.fromtimestamp(unix_ns // 1_000_000_000, tz=UTC)
    except (OverflowError, ValueError, OSError):
        return ""
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def age(unix_ns: int, now_unix_ns: int) -> str:
    """Return how long ago that was, as in `3 hours ago`."""
    seconds = (now_unix_ns - unix_ns) // 1_000_000_000
    if seconds < 0:
        return "in the future: a clock was set back"
    for size, unit in ((86_400, "day"), (3_600, "hour"), (60, "minute")):
        if seconds >= size:
            return f"{counted(seconds // size, unit)} ago"
    return f"{counted(seconds, 'second')} ago"


class Drawn(str):
    """A line of our own making, with colours for a terminal; nothing from outside is in it."""


def printable(line: str) -> str:
    """Return one line that stays one: paths and names may hold line ends and terminal codes."""
    if line.isprintable() or isinstance(line, Drawn):
        return line
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in line)


def columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return rows as text, the first column left-aligned and the others right-aligned."""
    table = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def facts(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return `name   value` lines with the values in one column."""
    return [f"{name:<12} {value}".rstrip() for name, value in pairs]


class Output:
    """What one verb says: its result on stdout, everything else on stderr."""

    def __init__(self, verb: str, *, as_json: bool) -> None:
        self.schema = f"rangectl.{verb}/1"
        self.as_json = as_json

    def result(self, ok: bool, fields: Mapping[str, object], human: Iterable[str]) -> None:
        """Print the one result: `fields` behind `schema` and `ok`, or the human lines."""
        if self.as_json:
            _write(sys.stdout, json.dumps({"schema": self.schema, "ok": ok, **fields}, indent=2))
        else:
            _write(sys.stdout, "\n".join(map(printable, human)))

    def line(self, ok: bool, fields: Mapping[str, object], human: Iterable[str]) -> None:
        """Print one of many results as it comes: one JSON object on a line, or the human lines."""
        if self.as_json:
            _write(sys.stdout, json.dumps({"schema": self.schema, "ok": ok, **fields}))
        else:
            _write(sys.stdout, "\n".join(map(printable, human)))

    @contextmanager
    def progress(self, what: str, total_bytes: int) -> Iterator[Advance]:
        """Show a bar on stderr where that is a terminal; elsewhere do nothing."""
        if self.as_json or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
            yield _silent
            return
        # Imported late: rich costs more to import than most verbs take to run.
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            console=Console(stderr=True),
            transient=True,
        )
        with bar:
            task = bar.add_task(what, total=total_bytes)
            yield lambda done_bytes: bar.advance(task, done_bytes)


def error(fault: RangeError, *, as_json: bool) -> None:
    """Print one error on stderr: a line, or with --json an object."""
    if as_json:
        fields: dict[str, object] = {
            "schema": "rangectl.error/1",
            "ok": False,
            "code": fault.code,
            "message": fault.message,
            "path": fault.path,
            "offset": fault.offset,
            "exit": int(fault.exit_code),
        }
        _write(sys.stderr, json.dumps(fields))
    else:
        _write(sys.stderr, f"rangectl: {printable(fault.line())}")


def discard(stream: TextIO) -> None:
    """Send what is still buffered nowhere, so that closing the stream does not raise again."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, stream.fileno())
    os.close(quiet)


def _silent(done_bytes: int) -> None:
    """Take the place of a progress bar."""


def _write(stream: TextIO, text: str) -> None:
    """Write one text and flush; a reader that has gone away is not an error of ours."""
    try:
        stream.write(text + "\n")
        stream.flush()
    except OSError as error:
        discard(stream)
        # Where stderr cannot be written nothing can be said; the exit status still tells.
        if stream is sys.stdout and not isinstance(error, BrokenPipeError):
            raise EnvironmentFault(
                "output", f"the verb has run, but stdout cannot be written: {error.strerror}"
            ) from error
