"""Owns where the stores of one directory lie: a folder per namespace, a subfolder per rank.

It finds, adopts and makes stores; it opens none for work and removes none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from rangekv.engine import binding
from rangekv.engine.allocation import Progress, require_room
from rangekv.engine.create import Created, create, require_directory
from rangekv.engine.faults import translated
from rangekv.engine.files import OS_FILES, Files
from rangekv.engine.folder import BLANK, PACK, Folder, make_directory, rank_folder, remove_if_empty
from rangekv.engine.pack import Pack
from rangekv.format.errors import EnvironmentFault, RangeError, StoreMissing, UsageError
from rangekv.format.geometry import ALIGNMENT, DATA_OFFSET, ModelGeometry
from rangekv.format.namespace import Namespace, Value
from rangekv.format.superblock import Superblock

logger = logging.getLogger("rangekv.engine")


@dataclass(frozen=True, slots=True)
class Place:
    """One store below a directory, as far as its superblocks tell; it was not locked."""

    path: str
    file_bytes: int
    superblock: Superblock | None
    problem: str | None
    """One line when the store cannot be used."""

    @property
    def namespace(self) -> Namespace | None:
        return None if self.superblock is None else self.superblock.namespace


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another namespace in the same directory, and how it differs from the one asked for."""

    path: str
    namespace: Namespace
    differences: Sequence[tuple[str, Value | None, Value | None]]
    """(key, asked for, there)."""


def rank_capacity_bytes(capacity_bytes: int, world_size: int) -> int:
    """Return one rank's share of a namespace's capacity, in whole 4096-byte pieces."""
    share = capacity_bytes // world_size
    return share - share % ALIGNMENT


def find_stores(path: str, files: Files = OS_FILES) -> list[str]:
    """Return the paths of the stores at `path`: itself, else those one or two levels below."""
    path = os.path.abspath(path)
    if _is_store(path, files):
        return [path]
    children = [os.path.join(path, name) for name in _names(os.path.realpath(path), files)]
    grandchildren = [
        os.path.join(child, name) for child in children for name in _names(child, files)
    ]
    return sorted(one for one in children + grandchildren if _is_store(one, files))


def list_stores(path: str, files: Files = OS_FILES) -> list[Place]:
    """Return what the superblocks of all stores at `path` say; damage is a `problem`."""
    return [_look(found, files) for found in find_stores(path, files)]


def nearest_other(
    directory: str, namespace: Namespace, files: Files = OS_FILES
) -> Neighbour | None:
    """Return the store of another namespace that differs in the fewest fields, or None."""
    neighbours = [
        Neighbour(place.path, place.namespace, namespace.differences(place.namespace))
        for place in list_stores(directory, files)
        if place.namespace is not None and place.namespace != namespace
    ]
    return min(neighbours, key=lambda one: len(one.differences), default=None)


def create_ranks(
    directory: str,
    *,
    capacity_bytes: int,
    world_size: int = 1,
    model: ModelGeometry | None = None,
    namespace: Namespace | None = None,
    files: Files = OS_FILES,
    zero: bool = False,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> list[Created]:
    """Preallocate one store per rank below `directory`, sharing `capacity_bytes`.

    They are blank and lie in `directory`/blank; with `model` and `namespace` (both or neither) they
    are bound and lie in the namespace's folder, where `resolve` finds them.
    The directory is made when only it is missing; room for all ranks is looked for before the
    first one is made. A call that was stopped between two ranks is completed by the next one.
    Returns what was made. Raises UsageError, StoreLocked, EnvironmentFault.
    """
    directory = os.path.abspath(directory)
    parent = os.path.join(directory, BLANK if namespace is None else namespace.folder)
    if world_size < 1:
        raise UsageError("bad-rank", f"a world of {world_size} ranks cannot be")
    require_directory(files, os.path.dirname(directory))

    share = rank_capacity_bytes(capacity_bytes, world_size)
    paths = [os.path.join(parent, rank_folder(rank, world_size)) for rank in range(world_size)]
    there = [path for path in paths if _is_store(path, files)]
    if len(there) == world_size:
        there = []  # nothing is missing: the first one refuses
    for path in there:
        _require_capacity(path, share, files)

    def make(*, dry_run: bool) -> list[Created]:
        return [
            create(
                path,
                capacity_bytes=share,
                model=model,
                namespace=namespace,
                rank=rank,
                world_size=world_size,
                files=files,
                zero=zero,
                progress=progress,
                dry_run=dry_run,
            )
            for rank, path in enumerate(paths)
            if path not in there
        ]

    planned = make(dry_run=True)
    require_room(directory, sum(one.file_bytes for one in planned), planned[0].free_bytes)
    if dry_run:
        return planned
    with ExitStack() as undo:
        for path in (directory, parent):
            _make_directory(path, files, undo)
        made = make(dry_run=False)
        undo.pop_all()
    return made


def resolve(
    directory: str,
    *,
    namespace: Namespace,
    geometry: ModelGeometry,
    rank: int = 0,
    world_size: int = 1,
    replica: int = 0,
    capacity_bytes: int | None = None,
    dir_capacity_bytes: int | None = None,
    files: Files = OS_FILES,
    lock_wait_s: float = 0.5,
) -> str:
    """Return the path of this rank's store in `directory`: the existing one, else the adopted
    blank one, else a new one.

    Each data-parallel `replica` has stores of its own. `capacity_bytes` is the namespace's total
    over the ranks of a replica. It is needed for a new store, and one that exists with another
    capacity is refused. A new store that would bring all stores in `directory` above
    `dir_capacity_bytes` is refused. Raises StoreMissing, StoreLocked, UsageError, NotAStore,
    UnsupportedVersion, EnvironmentFault.
    """
    directory = os.path.abspath(directory)
    if not files.is_directory(directory):
        raise StoreMissing(
            "no-store",
            "there is no such directory; create it, or run rangectl init",
            path=directory,
        )
    share = None if capacity_bytes is None else rank_capacity_bytes(capacity_bytes, world_size)
    path = os.path.join(directory, namespace.folder, rank_folder(rank, world_size, replica))
    for existing in (directory, path):
        if _is_store(existing, files):
            _require_capacity(existing, share, files)
            return existing
    blank = os.path.join(directory, BLANK, rank_folder(rank, world_size))
    if replica == 0 and _is_store(blank, files):
        _require_capacity(blank, share, files)
        adopted = binding.adopt(
            blank,
            namespace,
            geometry,
            rank=rank,
            world_size=world_size,
            files=files,
            lock_wait_s=lock_wait_s,
        )
        if adopted is not None:
            logger.info("store adopted path=%s from=%s", adopted, blank)
            return adopted
    if capacity_bytes is None or share is None:
        raise UsageError(
            "capacity-required",
            f"there is no store for this namespace and no blank one for {os.path.basename(path)}; "
            "set capacity, or run rangectl init --capacity",
            path=directory,
        )
    family = {
        os.path.join(directory, namespace.folder, rank_folder(each, world_size, replica))
        for each in range(world_size)
    }
    _require_dir_capacity(directory, family, capacity_bytes, dir_capacity_bytes, files)
    with ExitStack() as undo:
        _make_directory(os.path.dirname(path), files, undo)
        created = create(
            path,
            capacity_bytes=share,
            model=geometry,
            namespace=namespace,
            rank=rank,
            world_size=world_size,
            files=files,
        )
        undo.pop_all()
    logger.info("store created path=%s bytes=%d", path, created.file_bytes)
    return path


def _require_capacity(path: str, share: int | None, files: Files) -> None:
    place = _look(path, files)
    found = place.file_bytes - DATA_OFFSET
    if share is not None and found != share:
        raise UsageError(
            "capacity-differs",
            f"the store has a capacity of {found} bytes per rank, asked for are {share}; "
            "set capacity to what is there, or remove the namespace with rangectl drop",
            path=path,
        )


def _require_dir_capacity(
    directory: str,
    family: set[str],
    capacity_bytes: int,
    dir_capacity_bytes: int | None,
    files: Files,
) -> None:
    """Count every store but those of `family`: its other ranks may have made theirs already."""
    if dir_capacity_bytes is None:
        return
    taken = sum(
        place.file_bytes - DATA_OFFSET
        for place in list_stores(directory, files)
        if place.path not in family
    )
    if taken + capacity_bytes > dir_capacity_bytes:
        raise EnvironmentFault(
            "dir-capacity-exceeded",
            f"its stores take {taken} bytes, {capacity_bytes} more would exceed dir_capacity "
            f"{dir_capacity_bytes}; remove a namespace with rangectl drop, or raise dir_capacity",
            path=directory,
        )


def _make_directory(path: str, files: Files, undo: ExitStack) -> None:
    """Make a directory unless it is there; `undo` takes back what is made, interrupts included."""
    if not files.exists(path):
        undo.callback(remove_if_empty, files, path)
    with translated(path, "create the directory"):
        make_directory(files, path)


def _is_store(path: str, files: Files) -> bool:
    return PACK in _names(path, files)


def _names(path: str, files: Files) -> list[str]:
    """Return the names in a directory; none when it is no directory or cannot be read."""
    try:
        fd = files.open_dir(path)
    except OSError:
        return []
    try:
        return sorted(files.listdir(fd))
    finally:
        files.close(fd)


def _look(path: str, files: Files) -> Place:
    """Read the superblocks without a lock: a writer replaces one slot at a time."""
    file_bytes = 0
    try:
        with Folder.open(files, path) as folder:
            file_bytes = files.statx_at(folder.fd, PACK).size
            pack = Pack.open_unlocked(folder)
            try:
                return Place(path, file_bytes, pack.choose(pack.read_slots()), None)
            finally:
                pack.close()
    except (RangeError, OSError) as error:
        return Place(path, file_bytes, None, str(error))
