"""Owns the snapshot file of one store: publishing it durably and reading it with suspicion.

What a reason means for a reopen is decided by its callers.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass

from rangekv.engine.folder import SNAPSHOT, Folder, read_all
from rangekv.engine.pack import Pack
from rangekv.format import snapshot
from rangekv.format.envelope import HEAD_BYTES_MAX, Envelope, SnapshotHeader
from rangekv.format.errors import FormatError
from rangekv.format.superblock import Superblock
from rangekv.format.tables import TableLimits, Tables


def publish(pack: Pack, superblock: Superblock, tables: Tables) -> None:
    """Write the snapshot of `tables` for the pack file as it is now; raises OSError.

    The caller has made the pack file durable (C2) and writes nothing to it any more.
    """
    identity, mtime_ns = pack.stat()  # C3
    envelope = Envelope(
        store_uuid=superblock.store_uuid,
        epoch=superblock.epoch,
        identity=identity,
        pack_mtime_ns=mtime_ns,
        geometry_digest=superblock.geometry_digest(),
        published_unix_ns=pack.files.unix_ns(),
    )
    pack.folder.replace(SNAPSHOT, snapshot.encode(tables, envelope))  # C4
    pack.folder.sync()  # C4


@dataclass(frozen=True, slots=True)
class Found:
    """A snapshot file whose head could be read, held open until `close`."""

    folder: Folder
    fd: int
    header: SnapshotHeader

    def read_tables(self, superblock: Superblock) -> Tables:
        """Read and prove all sections. Raises FormatError with the reason code."""
        try:
            body = read_all(self.folder.files, self.fd, self.header.snapshot_bytes)
        except OSError as error:
            raise _unreadable(error) from error
        return snapshot.decode(body, self.header, superblock.geometry)

    def close(self) -> None:
        self.folder.files.close(self.fd)


def find(folder: Folder, superblock: Superblock) -> Found:
    """Open the snapshot and read its head; the caller closes what is returned.

    Raises FormatError with the reason code: no-snapshot, bad-snapshot, snapshot-limits,
    unknown-section, unsupported-version.
    """
    files = folder.files
    try:
        fd = files.open_file(folder.fd, SNAPSHOT)
    except FileNotFoundError:
        raise FormatError("no-snapshot", f"there is no {SNAPSHOT}") from None
    except OSError as error:
        raise _unreadable(error) from error
    try:
        status = files.statx(fd)
        if not stat.S_ISREG(status.mode):
            raise FormatError("bad-snapshot", f"{SNAPSHOT} is not a regular file")
        head = read_all(files, fd, min(status.size, HEAD_BYTES_MAX))
        limits = TableLimits.of(superblock.geometry)
        return Found(folder, fd, SnapshotHeader.decode(head, status.size, limits))
    except OSError as error:
        files.close(fd)
        raise _unreadable(error) from error
    except BaseException:
        files.close(fd)
        raise


def _unreadable(error: OSError) -> FormatError:
    return FormatError("bad-snapshot", f"{SNAPSHOT} cannot be read: {error.strerror}")
