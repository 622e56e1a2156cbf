"""Owns the pack file of one store while it is open: its lock, its two superblock slots, its syncs.

Payload goes through the same descriptor but never through this module.
"""

from __future__ import annotations

import errno
import mmap
import stat

from rangekv.engine import markers
from rangekv.engine.faults import environment_fault, translated
from rangekv.engine.files import Files, FileStat
from rangekv.engine.folder import PACK, Folder, check_private, let_go
from rangekv.format.errors import (
    EnvironmentFault,
    FormatError,
    NotAStore,
    StoreLocked,
    StoreMissing,
    ensure,
)
from rangekv.format.geometry import DATA_OFFSET, SUPERBLOCK_OFFSETS
from rangekv.format.identity import BTIME_VALID, GENERATION_VALID, FileIdentity
from rangekv.format.superblock import (
    SUPERBLOCK_BYTES,
    Slot,
    Superblock,
    choose,
    older,
)

Slots = tuple[Slot, Slot]

LOCK_POLL_S = 0.02
FILESYSTEM_NAMES = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0xF2F52010: "f2fs",
    0x2FC12FC1: "zfs",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x6969: "nfs",
    0x794C7630: "overlayfs",
    0x65735546: "fuse",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x01021997: "9p",
    0x00C36400: "ceph",
}
# Locks, identity or write order are not what the protocol needs: never warm on these.
NEVER_WARM = frozenset({"nfs", "overlayfs", "fuse", "cifs", "smb2", "9p", "ceph"})
# Their pages are the page cache itself, whatever they answer to O_DIRECT.
NEVER_DIRECT = frozenset({"tmpfs", "ramfs"})


def filesystem_name(magic: int) -> str:
    return FILESYSTEM_NAMES.get(magic, f"{magic:#x}")


class Pack:
    """The open pack file: `fd` holds the flock and is O_DIRECT when `direct` is true.

    One descriptor does all: a second one would need a second proof that it is the same file.
    """

    def __init__(self, folder: Folder, fd: int, *, direct: bool) -> None:
        self.folder = folder
        self.files = folder.files
        self.fd = fd
        self.direct = direct
        self.fs_magic = self.files.filesystem_magic(fd)

    @classmethod
    def open_to_write(cls, folder: Folder, *, lock_wait_s: float, allow_buffered: bool) -> Pack:
        """Open and lock exclusively, waiting up to `lock_wait_s` for another holder.

        Raises StoreMissing, StoreLocked, NotAStore, EnvironmentFault (`no-direct-io` where the
        file system has none and `allow_buffered` is false).
        """
        deadline = folder.files.monotonic() + lock_wait_s
        while True:
            pack = cls._open(folder, write=True)
            try:
                pack._require_direct(allow_buffered)
                with translated(folder.path, "lock the pack file"):
                    if pack._lock(shared=False) and pack._still_in_place():
                        return pack
            except BaseException:
                pack.close()
                raise
            pack.close()
            if folder.files.monotonic() >= deadline:
                raise StoreLocked("store-locked", _holder_line(folder), path=folder.path)
            folder.files.sleep(LOCK_POLL_S)

    @classmethod
    def open_to_read(cls, folder: Folder) -> tuple[Pack, bool]:
        """Open read-only; return (pack, held): held is false when a writer has the store."""
        pack = cls.open_unlocked(folder)
        try:
            with translated(folder.path, "lock the pack file"):
                return pack, pack._lock(shared=True)
        except BaseException:
            pack.close()
            raise

    @classmethod
    def open_unlocked(cls, folder: Folder) -> Pack:
        """Open read-only beside any writer: good for the superblocks and nothing else."""
        return cls._open(folder, write=False)

    @classmethod
    def _open(cls, folder: Folder, *, write: bool) -> Pack:
        place = folder.place(PACK)
        try:
            fd, direct = _open_fd(folder, write=write)
        except FileNotFoundError:
            raise StoreMissing(
                "no-store",
                f"there is no {PACK} in this directory; create a store with rangectl init",
                path=folder.path,
            ) from None
        except OSError as error:
            raise environment_fault(error, place, "open the pack file") from error
        try:
            with translated(place, "examine the pack file"):
                status = folder.files.statx(fd)
            if not stat.S_ISREG(status.mode):
                raise EnvironmentFault("not-a-regular-file", "expected a regular file", path=place)
            check_private(status, place, "chmod 600")
            if status.nlink > 1:
                raise EnvironmentFault(
                    "hard-linked",
                    f"the pack file has {status.nlink} names, expected 1; remove the other links",
                    path=place,
                )
            with translated(place, "examine the pack file"):
                return cls(folder, fd, direct=direct)
        except BaseException:
            let_go(folder.files, fd)
            raise

    def _require_direct(self, allow_buffered: bool) -> None:
        if not (self.direct or allow_buffered):
            raise EnvironmentFault(
                "no-direct-io",
                f"{filesystem_name(self.fs_magic)} has no direct I/O here, expected a file system "
                "on an SSD such as ext4 or xfs; move the store or allow buffered I/O",
                path=self.folder.path,
            )

    def _lock(self, *, shared: bool) -> bool:
        """Take the lock; False where another holds it."""
        try:
            self.files.flock(self.fd, shared=shared)
        except BlockingIOError:
            return False
        return True

    def _still_in_place(self) -> bool:
        """Return whether the locked file is still the one that its name leads to."""
        try:
            named = self.files.statx_at(self.folder.fd, PACK)
        except FileNotFoundError:
            return False
        held = self.files.statx(self.fd)
        return (named.device, named.inode) == (held.device, held.inode)

    def close(self) -> None:
        """Close the descriptor, which also drops the lock; never raises OSError."""
        let_go(self.files, self.fd)

    @property
    def filesystem(self) -> str:
        return filesystem_name(self.fs_magic)

    def stat(self) -> tuple[FileIdentity, int]:
        """Return (identity, mtime_ns) of the file as it is now."""
        status = self.files.statx(self.fd)
        return identity_of(status, self.files.inode_generation(self.fd)), status.mtime_ns

    def read_slots(self) -> Slots:
        """Read both superblocks; a slot that cannot be read is a bad slot, not an error."""
        return self._read_slot(0), self._read_slot(1)

    def _read_slot(self, copy_index: int) -> Slot:
        # Page-aligned memory: the descriptor may be O_DIRECT.
        with mmap.mmap(-1, SUPERBLOCK_BYTES) as page:
            try:
                count = self.files.preadv(self.fd, [page], SUPERBLOCK_OFFSETS[copy_index])
            except OSError:
                count = 0
            return Slot.read(page[:count], copy_index)

    def choose(self, slots: Slots) -> Superblock:
        """Return the superblock that counts.

        Raises NotAStore `not-a-store` or `truncated-pack`, UnsupportedVersion; nothing is changed.
        """
        place = self.folder.place(PACK)
        with translated(place, "examine the pack file"):
            size = self.files.statx(self.fd).size
        if size < DATA_OFFSET:
            raise _truncated(place, size, DATA_OFFSET)
        try:
            superblock = choose(slots)
        except FormatError as error:
            raise error.located(place) from None
        if size < superblock.file_bytes:
            raise _truncated(place, size, superblock.file_bytes)
        return superblock

    def write_slot(self, slots: Slots, superblock: Superblock) -> Slots:
        """Write `superblock` over the older slot and make it durable; return the new slots.

        The sync before the write settles an earlier, killed writer's slot: without it both slots
        could be torn by one power cut. Raises OSError.
        """
        target = older(slots)
        page = superblock.encode(target.copy_index)
        written = Slot.read(page, target.copy_index)
        ensure(written.superblock == superblock, "a superblock would not be read as it was meant")
        self.files.fdatasync(self.fd)
        with mmap.mmap(-1, SUPERBLOCK_BYTES) as buffer:
            buffer[:] = page
            count = self.files.pwritev(self.fd, [buffer], target.offset)
        if count != SUPERBLOCK_BYTES:
            raise OSError(errno.EIO, f"{count} of {SUPERBLOCK_BYTES} bytes were written")
        self.files.fdatasync(self.fd)
        return (written, slots[1]) if target.copy_index == 0 else (slots[0], written)

    def sync(self) -> None:
        """fsync, not fdatasync: the modification time must be durable with the data."""
        self.files.fsync(self.fd)


def identity_of(status: FileStat, generation: int | None) -> FileIdentity:
    """Return the identity that these figures of the kernel make."""
    btime_sec, btime_nsec = divmod(max(status.btime_ns or 0, 0), 1_000_000_000)
    return FileIdentity(
        inode=status.inode,
        file_bytes=status.size,
        btime_sec=btime_sec,
        btime_nsec=btime_nsec,
        inode_generation=generation or 0,
        identity_flags=(0 if status.btime_ns is None else BTIME_VALID)
        | (0 if generation is None else GENERATION_VALID),
    )


def _open_fd(folder: Folder, *, write: bool) -> tuple[int, bool]:
    """Return (fd, direct): for direct I/O where one real read proves it, else buffered."""
    files = folder.files
    try:
        fd = files.open_pack(folder.fd, PACK, write=write, direct=True)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    else:
        try:
            if _reads_directly(files, fd):
                return fd, True
        except BaseException:
            let_go(files, fd)
            raise
        let_go(files, fd)
    return files.open_pack(folder.fd, PACK, write=write, direct=False), False


def _reads_directly(files: Files, fd: int) -> bool:
    """Some file systems accept O_DIRECT and refuse the reads; other errors show up later."""
    if filesystem_name(files.filesystem_magic(fd)) in NEVER_DIRECT:
        return False
    with mmap.mmap(-1, SUPERBLOCK_BYTES) as page:
        try:
            files.preadv(fd, [page], 0)
        except OSError as error:
            return error.errno != errno.EINVAL
    return True


def _truncated(place: str, found: int, expected: int) -> NotAStore:
    return NotAStore(
        "truncated-pack",
        f"the pack file is {found} bytes long, expected {expected}: its end is lost; "
        "restore the file, or remove it and run rangectl init",
        path=place,
    )


def _holder_line(folder: Folder) -> str:
    return f"{markers.holder(folder)} holds the store; stop it, or wait until it has closed"
