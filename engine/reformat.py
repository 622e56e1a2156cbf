"""Owns REFORMAT (R1 to R7): an existing pack file gets a new identity and an empty index.

It keeps the preallocated file, and is the only one that accepts lost superblocks.
"""

from __future__ import annotations

from dataclasses import replace

from rangekv.engine import markers, snapshots
from rangekv.engine.create import new_uuid
from rangekv.engine.faults import translated
from rangekv.engine.files import OS_FILES, Files
from rangekv.engine.folder import JOURNAL, MARKER, SNAPSHOT, Folder
from rangekv.engine.pack import Pack, Slots
from rangekv.format.errors import NotAStore, UsageError
from rangekv.format.geometry import Geometry, ModelGeometry
from rangekv.format.namespace import Namespace
from rangekv.format.superblock import Superblock
from rangekv.format.tables import Tables


def reformat(
    path: str,
    *,
    model: ModelGeometry | None = None,
    namespace: Namespace | None = None,
    rank: int = 0,
    world_size: int = 1,
    files: Files = OS_FILES,
    lock_wait_s: float = 0.5,
) -> Superblock:
    """Empty the store in directory `path` and return its new superblock.

    Without `model` and `namespace` (both or neither) it keeps its binding; a store whose
    superblocks are both lost becomes blank, of `rank` and `world_size`. A crash in the middle
    leaves a store that reopens cold. Raises StoreMissing, StoreLocked, UsageError, NotAStore
    `truncated-pack`, UnsupportedVersion, EnvironmentFault.
    """
    if (model is None) != (namespace is None):
        raise UsageError("half-bound", "a bound store needs both its geometry and its namespace")
    with Folder.open(files, path) as folder:
        pack = Pack.open_to_write(folder, lock_wait_s=lock_wait_s, allow_buffered=True)  # R1
        try:
            slots = pack.read_slots()
            fresh = _fresh(pack, slots, rank, world_size)
            if model is not None:
                geometry = Geometry.derive(model, fresh.capacity_bytes)
                fresh = replace(fresh, geometry=geometry, namespace=namespace)
            with translated(folder.path, "reformat the store"):
                return _rewrite(pack, slots, fresh)
        finally:
            pack.close()


def _fresh(pack: Pack, slots: Slots, rank: int, world_size: int) -> Superblock:
    """Return the superblock to write first: what may stay of the old one, under a new identity."""
    identity, _ = pack.stat()
    fresh = Superblock(
        store_uuid=new_uuid(pack.files),
        sequence=1,
        epoch=1,
        identity=identity,
        fs_magic=pack.fs_magic,
        rank=rank,
        world_size=world_size,
        created_unix_ns=pack.files.unix_ns(),
    )
    try:
        old = pack.choose(slots)
    except NotAStore as error:
        if error.code == "truncated-pack":
            raise
        return fresh
    return replace(
        fresh,
        sequence=old.sequence + 1,
        epoch=old.epoch + 1,
        rank=old.rank,
        world_size=old.world_size,
        geometry=old.geometry,
        namespace=old.namespace,
    )


def _rewrite(pack: Pack, slots: Slots, fresh: Superblock) -> Superblock:
    folder = pack.folder
    markers.write(folder, fresh)  # R2
    folder.sync()  # R2
    folder.unlink_if_there(SNAPSHOT)  # R3
    folder.unlink_if_there(JOURNAL)  # R3
    folder.sweep_temps()
    folder.sync()  # R3
    slots = pack.write_slot(slots, fresh)  # R4
    fresh = replace(fresh, sequence=fresh.sequence + 1)
    pack.write_slot(slots, fresh)  # R5
    pack.sync()  # R6: C2
    snapshots.publish(pack, fresh, Tables.empty())  # R6: C3, C4
    folder.unlink_if_there(MARKER)  # R7
    folder.sync()  # R7
    return fresh
