"""Owns CREATE (F1 to F9): a preallocated pack file that appears whole or not at all.

It never touches an existing store.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, replace

from rangekv.engine import snapshots
from rangekv.engine.allocation import Progress, allocate, require_room
from rangekv.engine.faults import translated
from rangekv.engine.files import OS_FILES, Files
from rangekv.engine.folder import (
    JOURNAL,
    MARKER,
    PACK,
    SNAPSHOT,
    Folder,
    make_directory,
    remove_if_empty,
    write_all,
)
from rangekv.engine.pack import NEVER_WARM, Pack, filesystem_name
from rangekv.format.errors import StoreLocked, StoreMissing, UsageError
from rangekv.format.geometry import (
    ALIGNMENT,
    DATA_OFFSET,
    SUPERBLOCK_OFFSETS,
    Geometry,
    ModelGeometry,
)
from rangekv.format.namespace import Namespace
from rangekv.format.superblock import Superblock
from rangekv.format.tables import Tables


@dataclass(frozen=True, slots=True)
class Created:
    """A store that was made, or that a dry run would make."""

    path: str
    file_bytes: int
    geometry: Geometry | None
    """None for a blank store."""
    filesystem: str
    free_bytes: int
    """On the file system before the store was made."""
    can_be_warm: bool
    """False where the file system cannot prove that a file is the same one as before."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be made: one rank's store."""

    path: str
    file_bytes: int
    geometry: Geometry | None
    namespace: Namespace | None
    rank: int
    world_size: int


def create(
    path: str,
    *,
    capacity_bytes: int,
    model: ModelGeometry | None = None,
    namespace: Namespace | None = None,
    rank: int = 0,
    world_size: int = 1,
    files: Files = OS_FILES,
    zero: bool = False,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> Created:
    """Make one rank's store in directory `path`; the directory is made when only it is missing.

    `capacity_bytes` is this rank's share and is rounded down to 4096. Without `model` and
    `namespace` (both or neither) the store is blank: the first engine that opens it binds it.
    `zero` also writes every byte, so that the first save runs as fast as later ones. Raises
    UsageError, StoreLocked, EnvironmentFault; nothing is left behind unless the store was made.
    """
    plan = _plan(
        os.path.abspath(path),
        capacity_bytes=capacity_bytes,
        model=model,
        namespace=namespace,
        rank=rank,
        world_size=world_size,
    )
    if dry_run:
        return _look(files, plan)
    missing = not files.exists(plan.path)
    if missing:
        require_directory(files, os.path.dirname(plan.path))
    with ExitStack() as undo:
        if missing:
            undo.callback(remove_if_empty, files, plan.path)
        with translated(plan.path, "create the store directory"):
            # Before F7: once the pack file has its name, a power cut must not lose the store.
            make_directory(files, plan.path)
        with _enter(files, plan.path) as folder:
            with translated(plan.path, "examine the directory"):
                created = _survey(folder, plan)
            claim(folder)
            require_room(plan.path, plan.file_bytes, created.free_bytes)
            pack, superblock = _place(folder, plan, zero=zero, progress=progress)
            undo.pop_all()
            try:
                with translated(plan.path, "publish the new store"):
                    folder.sync()  # F8
                    snapshots.publish(pack, superblock, Tables.empty())  # F9
            finally:
                pack.close()
    return created


def _plan(
    path: str,
    *,
    capacity_bytes: int,
    model: ModelGeometry | None,
    namespace: Namespace | None,
    rank: int,
    world_size: int,
) -> Plan:
    if (model is None) != (namespace is None):
        raise UsageError("half-bound", "a bound store needs both its geometry and its namespace")
    if not 0 <= rank < world_size:
        raise UsageError("bad-rank", f"rank {rank} of {world_size} cannot be")
    capacity_bytes -= capacity_bytes % ALIGNMENT
    if capacity_bytes <= 0:
        raise UsageError("capacity-too-small", f"a capacity below {ALIGNMENT} bytes holds nothing")
    geometry = None if model is None else Geometry.derive(model, capacity_bytes)
    return Plan(path, DATA_OFFSET + capacity_bytes, geometry, namespace, rank, world_size)


def _survey(folder: Folder, plan: Plan) -> Created:
    """Say what would be made and where; raises OSError."""
    filesystem = filesystem_name(folder.files.filesystem_magic(folder.fd))
    status = folder.files.statx(folder.fd)
    provable = status.btime_ns is not None or folder.files.inode_generation(folder.fd) is not None
    return Created(
        path=plan.path,
        file_bytes=plan.file_bytes,
        geometry=plan.geometry,
        filesystem=filesystem,
        free_bytes=folder.files.free_bytes(folder.fd),
        can_be_warm=provable and filesystem not in NEVER_WARM,
    )


def _look(files: Files, plan: Plan) -> Created:
    """Survey the directory, or the one above it that exists, and refuse what cannot work."""
    place = plan.path
    while not files.exists(place):
        place = os.path.dirname(place)
    if place == plan.path:
        folder = Folder.open(files, place)
    else:
        require_directory(files, place)
        with translated(place, "examine the directory"):
            folder = Folder(files, place, files.open_dir(os.path.realpath(place)))
    with folder, translated(place, "examine the directory"):
        if place == plan.path:
            _refuse_existing(folder)
        created = _survey(folder, plan)
    require_room(place, plan.file_bytes, created.free_bytes)
    return created


def require_directory(files: Files, path: str) -> None:
    """Refuse to make something below a directory that is not there: most often a typing slip."""
    if files.is_directory(path):
        return
    if files.exists(path):
        raise UsageError("not-a-directory", "found a file, expected a directory", path=path)
    raise UsageError("parent-missing", "is no directory; create it first", path=path)


def _refuse_existing(folder: Folder) -> None:
    if folder.exists(PACK):
        raise UsageError(
            "store-exists",
            f"{PACK} is there already; look at it with rangectl inspect, empty it with "
            "rangectl format",
            path=folder.path,
        )


def _enter(files: Files, path: str) -> Folder:
    """Open the directory that was just made or found."""
    try:
        return Folder.open(files, path)
    except StoreMissing:
        raise _given_up(path) from None


def _given_up(path: str) -> StoreLocked:
    return StoreLocked(
        "store-locked",
        "another process began to create a store here and took its directory back; try again",
        path=path,
    )


def claim(folder: Folder) -> None:  # F1
    """Lock the directory against other creators and clear what a killed one left."""
    with translated(folder.path, "clear the store directory"):
        try:
            folder.files.flock(folder.fd)
        except BlockingIOError:
            raise StoreLocked(
                "store-locked",
                "another process creates a store here; wait for it",
                path=folder.path,
            ) from None
        if not folder.in_place():
            raise _given_up(folder.path)
        _refuse_existing(folder)
        folder.sweep_temps()
        for name in (SNAPSHOT, MARKER, JOURNAL):
            folder.unlink_if_there(name)


def _place(
    folder: Folder, plan: Plan, *, zero: bool, progress: Progress | None
) -> tuple[Pack, Superblock]:
    """F2 to F7: put a whole pack file in place and return it, open and locked."""
    files, place = folder.files, folder.place(PACK)
    with translated(place, "create the pack file"), ExitStack() as undo:
        temp, fd = folder.create_temp("pack")  # F2
        undo.callback(folder.unlink_if_there, temp)
        undo.callback(files.close, fd)
        files.flock(fd)  # F2
        allocate(folder, fd, plan.file_bytes, zero=zero, progress=progress)  # F3
        pack = Pack(folder, fd, direct=False)
        identity, _ = pack.stat()  # F4
        superblock = Superblock(
            store_uuid=new_uuid(files),
            sequence=1,
            epoch=0,
            identity=identity,
            fs_magic=pack.fs_magic,
            rank=plan.rank,
            world_size=plan.world_size,
            created_unix_ns=files.unix_ns(),
            geometry=plan.geometry,
            namespace=plan.namespace,
        )
        for copy_index, offset in enumerate(SUPERBLOCK_OFFSETS):  # F5
            copy = replace(superblock, sequence=1 - copy_index)
            write_all(files, fd, [copy.encode(copy_index)], offset)
        files.fsync(fd)  # F6
        try:
            files.rename_noreplace(folder.fd, temp, folder.fd, PACK)  # F7
        except FileExistsError:
            _refuse_existing(folder)
            raise
        undo.pop_all()
        return pack, superblock


def new_uuid(files: Files) -> bytes:
    """Return 16 random bytes in the form of a version 4 UUID."""
    octets = bytearray(files.random_bytes(16))
    octets[6] = octets[6] & 0x0F | 0x40
    octets[8] = octets[8] & 0x3F | 0x80
    return bytes(octets)
