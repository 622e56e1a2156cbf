"""Owns the journal file of one store: starting it, appending commits durably, reading it back.

What a journal is worth is decided by who opens the store; nothing here repeats a failed call.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence

from rangekv.engine.files import Files
from rangekv.engine.folder import JOURNAL, SNAPSHOT, Folder, let_go, read_all, write_all
from rangekv.format import journal
from rangekv.format.entries import Entry
from rangekv.format.errors import FormatError
from rangekv.format.journal import JOURNAL_BYTES_MAX, Journal, JournalHeader
from rangekv.format.superblock import Superblock


class JournalFile:
    """The journal of a session, open for one writer at a time. Close it."""

    def __init__(self, files: Files, fd: int, header: JournalHeader, head: bytes) -> None:
        self.commit = 0
        self.length = len(head)
        self._files = files
        self._fd = fd
        self._header = header
        self._link = journal.digest_of(head)

    @classmethod
    def create(cls, folder: Folder, session: Superblock) -> JournalFile:  # O5b
        """Put an empty journal for `session` in the place of any other; raises OSError."""
        files = folder.files
        header = JournalHeader(
            session.store_uuid, session.epoch, session.geometry_digest(), files.unix_ns()
        )
        head = header.encode()
        temp, fd = folder.create_temp("journal")
        try:
            write_all(files, fd, [head])
            files.fsync(fd)
            files.rename(folder.fd, temp, JOURNAL)
            folder.sync()
        except BaseException:
            let_go(files, fd)
            folder.unlink_if_there(temp)
            raise
        return cls(files, fd, header, head)

    def append(self, said: Sequence[Entry], generation_max: int) -> None:
        """Make one commit durable. Raises OSError; the journal is then to be discarded."""
        frame = journal.encode_frame(
            self._header,
            said,
            commit=self.commit + 1,
            previous=self._link,
            generation_max=generation_max,
            unix_ns=self._files.unix_ns(),
        )
        write_all(self._files, self._fd, [frame], self.length)  # J3
        self._files.fdatasync(self._fd)  # J4
        self.commit += 1
        self.length += len(frame)
        self._link = journal.digest_of(frame)

    def close(self) -> None:
        """Close the descriptor; never raises OSError."""
        let_go(self._files, self._fd)


def read(folder: Folder) -> Journal | None:
    """Return the journal of a store, None where there is none.

    Raises FormatError `bad-journal`, UnsupportedVersion `unsupported-version`.
    """
    files = folder.files
    try:
        fd = files.open_file(folder.fd, JOURNAL)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(error) from error
    try:
        status = files.statx(fd)
        if not stat.S_ISREG(status.mode) or status.size > JOURNAL_BYTES_MAX:
            raise FormatError(
                "bad-journal",
                f"{JOURNAL} is not a regular file of at most {JOURNAL_BYTES_MAX} bytes",
            )
        return journal.decode(read_all(files, fd, status.size))
    except OSError as error:
        raise _unreadable(error) from error
    finally:
        let_go(files, fd)


def discard(folder: Folder) -> None:
    """Make it durable that no index is on disk, so that nothing names any space; raises OSError."""
    folder.unlink_if_there(SNAPSHOT)
    folder.unlink_if_there(JOURNAL)
    folder.sync()


def _unreadable(error: OSError) -> FormatError:
    return FormatError("bad-journal", f"{JOURNAL} cannot be read: {error.strerror}")
