"""Owns BIND (B1 to B4): giving a blank store its namespace and geometry, and its final place.

Every step can be repeated after a crash; a store that a session has used is never bound again.
"""

from __future__ import annotations

import os
from dataclasses import replace

from rangekv.engine import snapshots
from rangekv.engine.create import claim, new_uuid
from rangekv.engine.faults import translated
from rangekv.engine.files import Files
from rangekv.engine.folder import BLANK, PACK, Folder, make_directory, rank_folder, remove_if_empty
from rangekv.engine.pack import Pack, Slots
from rangekv.format.errors import UsageError, ensure
from rangekv.format.geometry import Geometry, ModelGeometry
from rangekv.format.namespace import Namespace
from rangekv.format.superblock import Superblock
from rangekv.format.tables import Tables


def settle(
    pack: Pack, slots: Slots, superblock: Superblock, namespace: Namespace, model: ModelGeometry
) -> tuple[Slots, Superblock]:
    """Bind the locked store if it is blank, and move it out of `blank/` if it lies there.

    A store bound to `namespace` that still lies under `blank/` was interrupted on its way: it is
    finished from B2. Any other store is returned as it is. Raises UsageError when the capacity is
    too small for the model or the place is taken, EnvironmentFault.
    """
    folder = pack.folder
    waiting = _waits(folder.path, superblock)
    interrupted = waiting and superblock.namespace == namespace and not _used(slots)
    if not superblock.blank and not interrupted:
        return slots, superblock
    with translated(folder.path, "bind the blank store"):
        if superblock.blank:
            geometry = Geometry.derive(model, superblock.capacity_bytes)
            slots, superblock = _bind_first(pack, slots, superblock, namespace, geometry)
        superblock = replace(superblock, sequence=superblock.sequence + 1)
        slots = pack.write_slot(slots, superblock)  # B2
        pack.sync()  # B3: C2
        snapshots.publish(pack, superblock, Tables.empty())  # B3: C3, C4
        if waiting:
            _move(pack, namespace)
    return slots, superblock


def _waits(path: str, superblock: Superblock) -> bool:
    """Return whether `path` is where the store of this rank waits for its namespace."""
    parent, name = os.path.split(path)
    return os.path.basename(parent) == BLANK and name == rank_folder(
        superblock.rank, superblock.world_size
    )


def _used(slots: Slots) -> bool:
    """Return whether a session began: O6 raises the epoch of one slot, BIND keeps both equal."""
    return len({slot.superblock.epoch for slot in slots if slot.superblock is not None}) > 1


def _bind_first(
    pack: Pack, slots: Slots, superblock: Superblock, namespace: Namespace, geometry: Geometry
) -> tuple[Slots, Superblock]:
    """B1. A blank store that was copied holds nothing: it simply becomes a store of its own."""
    identity, _ = pack.stat()
    same_file = superblock.identity.mismatch(identity) is None
    bound = replace(
        superblock,
        sequence=superblock.sequence + 1,
        store_uuid=superblock.store_uuid if same_file else new_uuid(pack.files),
        identity=identity,
        fs_magic=pack.fs_magic,
        geometry=geometry,
        namespace=namespace,
    )
    return pack.write_slot(slots, bound), bound  # B1


def _move(pack: Pack, namespace: Namespace) -> None:  # B4
    """Move the rank's directory to its namespace's folder; the open descriptors stay valid."""
    files, folder = pack.files, pack.folder
    blank, name = os.path.split(folder.path)
    directory = os.path.dirname(blank)
    target = os.path.join(directory, namespace.folder)
    make_directory(files, target)
    _clear(files, os.path.join(target, name))
    blank_fd, target_fd = files.open_dir(blank), files.open_dir(target)
    try:
        files.rename_noreplace(blank_fd, name, target_fd, name)
        files.fsync_dir(target_fd)
        files.fsync_dir(blank_fd)
        moved = files.statx_at(target_fd, os.path.join(name, PACK))
    except FileExistsError:
        raise UsageError(
            "store-exists",
            f"{os.path.join(target, name)} is there already, this blank store cannot take its "
            "place; remove one of the two",
            path=folder.path,
        ) from None
    finally:
        files.close(blank_fd)
        files.close(target_fd)
    folder.path = os.path.join(target, name)
    ensure(moved.inode == files.statx(pack.fd).inode, "the moved store is not the locked one")


def _clear(files: Files, place: str) -> None:
    """Remove what a killed creator left where the store will lie; a store stays."""
    if not files.exists(place):
        return
    with Folder.open(files, place) as leftover:
        if leftover.exists(PACK):
            return
        claim(leftover)
    remove_if_empty(files, place)


def adopt(
    path: str,
    namespace: Namespace,
    model: ModelGeometry,
    *,
    rank: int,
    world_size: int,
    files: Files,
    lock_wait_s: float,
) -> str | None:
    """Bind the store at `path` below `blank/` and return where it lies then.

    None when it is on its way to another namespace or is another rank's. Errors as Store.open.
    """
    with Folder.open(files, path) as folder:
        pack = Pack.open_to_write(folder, lock_wait_s=lock_wait_s, allow_buffered=True)
        try:
            slots = pack.read_slots()
            superblock = pack.choose(slots)
            if superblock.namespace not in (None, namespace):
                return None
            if (superblock.rank, superblock.world_size) != (rank, world_size):
                return None
            settle(pack, slots, superblock, namespace, model)
            return folder.path
        finally:
            pack.close()
