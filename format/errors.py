"""Every error of Range: one tree, stable codes, one line each.

RangeError                 base: code, message, exit code
├── FormatError            bytes on disk do not say what SPEC.md demands          exit 1
│   ├── BadMagic           the file is not what its name says
│   ├── BadChecksum        a metadata checksum does not match
│   ├── OutOfBounds        a field lies outside its limit
│   ├── NotAStore          neither superblock is usable, or the pack is truncated
│   └── UnsupportedVersion unknown version or feature bit                         exit 5
├── UsageError             arguments or settings that cannot work                 exit 2
├── EnvironmentFault       space, owner, mode, file system, no O_DIRECT           exit 3
├── UnreturnedWrite        a native write has not returned: the store stays dirty exit 6
├── StoreMissing           no store there                                         exit 10
├── StoreLocked            another process holds the store                        exit 11
├── OtherNamespace         the store belongs to another namespace                 exit 12
├── TicketError            a ticket or claim does not match what was promised     exit 1
├── TransferError          a read, write or copy did not do what was asked        exit 1
└── InvariantError         a rule of our own is broken: a defect in Range         exit 1
"""

from __future__ import annotations

from enum import IntEnum
from typing import Self


class ExitCode(IntEnum):
    """Exit status of every `rangectl` verb; the connector raises the same codes by name."""

    OK = 0
    CHECK_FAILED = 1
    USAGE = 2
    ENVIRONMENT = 3
    COLD = 4
    UNSUPPORTED = 5
    UNRETURNED_WRITE = 6
    NO_STORE = 10
    LOCKED = 11
    OTHER_NAMESPACE = 12
    INTERRUPTED = 130


class RangeError(Exception):
    """Base of all errors; says what was found, what was expected and what to do.

    `code` is kebab-case and stable: scripts may compare it, the message may change.
    `path` and `offset` (bytes) name the place where there is one.
    """

    exit_code: ExitCode = ExitCode.CHECK_FAILED

    def __init__(
        self, code: str, message: str, *, path: str | None = None, offset: int | None = None
    ) -> None:
        self.code = code
        self.message = message
        self.path = path
        self.offset = offset
        super().__init__(self.line())

    def line(self) -> str:
        """Return the one line that a person reads: place, message, code."""
        place = "" if self.path is None else f"{self.path}: "
        at = "" if self.offset is None else f" (at byte {self.offset})"
        return f"{place}{self.message}{at} [{self.code}]"

    def located(self, path: str) -> Self:
        """Return this error naming `path`: for a caller that knows where the bytes came from."""
        self.path = path
        self.args = (self.line(),)
        return self


class FormatError(RangeError):
    """Bytes on disk do not say what SPEC.md demands."""


class BadMagic(FormatError):
    """The file is not what its name says."""


class BadChecksum(FormatError):
    """A metadata checksum does not match the bytes it covers."""


class OutOfBounds(FormatError):
    """A field lies outside its limit, or two fields contradict each other."""


class NotAStore(FormatError):
    """Neither superblock is usable, or the pack file is truncated."""


class UnsupportedVersion(FormatError):
    """An unknown version or feature bit: a newer Range may read this."""

    exit_code = ExitCode.UNSUPPORTED


class UsageError(RangeError):
    """Arguments or settings that cannot work."""

    exit_code = ExitCode.USAGE


class EnvironmentFault(RangeError):
    """Space, owner, mode, file system or hardware does not allow it."""

    exit_code = ExitCode.ENVIRONMENT


class UnreturnedWrite(RangeError):
    """A native write has not returned: the store stays dirty and will reopen cold."""

    exit_code = ExitCode.UNRETURNED_WRITE


class StoreMissing(RangeError):
    """There is no store at this path."""

    exit_code = ExitCode.NO_STORE


class StoreLocked(RangeError):
    """Another process holds the store."""

    exit_code = ExitCode.LOCKED


class OtherNamespace(RangeError):
    """The store belongs to another namespace."""

    exit_code = ExitCode.OTHER_NAMESPACE


class TicketError(RangeError):
    """A ticket or claim does not match what was promised."""


class TransferError(RangeError):
    """A read, write or copy did not do what was asked."""


class InvariantError(RangeError):
    """A rule of our own is broken: a defect in Range, not in its input."""


def ensure(condition: bool, message: str) -> None:
    """Raise `InvariantError` unless `condition`; unlike `assert` it survives `python -O`."""
    if not condition:
        raise InvariantError("invariant", f"{message}; please report this as a defect of Range")
