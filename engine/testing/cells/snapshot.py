"""Faults of the metadata snapshot, in its states clean (a close writes it) and reopen.

Owns those rows of the matrix; exhaustive truncations and flips are tests of the format.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rangekv.engine.folder import PACK, SNAPSHOT
from rangekv.engine.inspection import read_store
from rangekv.engine.testing.case import Table
from rangekv.engine.testing.faulty_files import Act, error, short, torn
from rangekv.engine.testing.forge import forge, reseal
from rangekv.engine.testing.scene import PROMPT_TOKENS, Prompt, Scene
from rangekv.format.envelope import HEADER
from rangekv.format.errors import ExitCode
from rangekv.format.tables import Tables

TABLE = Table("snapshot")

_TEMP = ".range.snapshot.tmp"


def _closed_store(scene: Scene) -> list[Prompt]:
    """Leave a closed, warm store with two prompts and a branch in it."""
    with scene.engine() as engine:
        prompts = [scene.saved(engine) for _ in range(2)]
        branch = scene.prompt(prompts[0], same_tokens=100)
        scene.require(scene.save(engine, branch), "the branch is published")
    scene.states.append("clean")
    return [*prompts, branch]


def _opens_cold(scene: Scene, prompts: list[Prompt], reason: str) -> None:
    """Require that the store opens cold for one reason, serves nothing old and works again."""
    scene.reopened(reason)
    with scene.engine() as engine:
        scene.require(engine.open_result.reason == reason, "the engine gives the same reason")
        for prompt in prompts:
            scene.require(scene.hit(engine, prompt) == 0, "nothing old is served")
        scene.saved(engine)


def _opens_warm(scene: Scene, prompts: list[Prompt]) -> None:
    scene.reopened(None)
    with scene.engine() as engine:
        for prompt in prompts:
            scene.require(scene.restore(engine, prompt) == PROMPT_TOKENS, "all of it is served")


# -- clean -----------------------------------------------------------------------------------------


@TABLE.cells(
    {
        "clean.pack-fsync-eio": {"call": "fsync range.pack", "act": error(errno.EIO)},
        "clean.create-enospc": {"call": f"create_temp {_TEMP}", "act": error(errno.ENOSPC)},
        "clean.write-enospc": {"call": f"pwrite {_TEMP}", "act": error(errno.ENOSPC)},
        "clean.write-torn": {"call": f"pwrite {_TEMP}", "act": torn(errno.EIO)},
        "clean.fsync-eio": {"call": f"fsync {_TEMP}", "act": error(errno.EIO)},
        "clean.rename-eio": {"call": f"rename {SNAPSHOT}", "act": error(errno.EIO)},
        "clean.directory-fsync-eio": {"call": "fsync_dir store", "act": error(errno.EIO)},
    }
)
def close_fails(scene: Scene, call: str, act: Act) -> None:
    """A close that cannot publish its index is dirty and says why; nothing is tried again."""
    engine = scene.open()
    prompt = scene.saved(engine)
    scene.files.arm(call, act)
    scene.files.calls.clear()
    result = engine.close(scene.patience_s)
    scene.closed(result, "dirty")
    scene.require(result.exit_code is ExitCode.ENVIRONMENT, "the close names the reason")
    syncs = sum(line.startswith(call) for line in scene.files.calls)
    scene.require(syncs == 1, "what failed is not tried again")
    scene.require(not list(scene.store.glob(".range.*")), "no temp is left behind")
    _opens_cold(scene, [prompt], "dirty-marker")


@TABLE.cell("clean.write-short")
def short_write(scene: Scene) -> None:
    """A snapshot that is written in pieces is whole in the end."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
        scene.files.arm(f"pwrite {_TEMP}", short(lambda asked: (asked + 1) // 2), times=20)
        scene.states.append("clean")
    _opens_warm(scene, [prompt])


# -- reopen ----------------------------------------------------------------------------------------


@TABLE.cell("reopen.as-it-was")
def clean_reopen(scene: Scene) -> None:
    """A store that was closed opens warm, and every byte comes back."""
    prompts = _closed_store(scene)
    _opens_warm(scene, prompts)
    _opens_warm(scene, prompts)


def _damage(change: Callable[..., Any]) -> dict[str, Any]:
    return {"change": change}


@TABLE.cells(
    {
        "reopen.empty": _damage(lambda scene, data: data.clear()),
        "reopen.truncated-in-header": _damage(
            lambda scene, data: data.__delitem__(slice(scene.random.randrange(1, 256), None))
        ),
        "reopen.truncated": _damage(
            lambda scene, data: data.__delitem__(
                slice(scene.random.randrange(256, len(data)), None)
            )
        ),
        "reopen.truncated-by-one": _damage(lambda scene, data: data.pop()),
        "reopen.longer-by-one": _damage(lambda scene, data: data.append(0)),
        "reopen.zeros": _damage(
            lambda scene, data: data.__setitem__(slice(None), bytes(len(data)))
        ),
    }
)
def damaged(scene: Scene, change: Callable[[Scene, bytearray], Any]) -> None:
    """A snapshot that is not whole makes the store cold, with one reason and no traceback."""
    prompts = _closed_store(scene)
    data = bytearray((scene.store / SNAPSHOT).read_bytes())
    change(scene, data)
    (scene.store / SNAPSHOT).write_bytes(data)
    _opens_cold(scene, prompts, "bad-snapshot")


@TABLE.cell("reopen.bits-flipped")
def bits_flipped(scene: Scene) -> None:
    """No single bit of a snapshot can be flipped unseen (200 of them at random)."""
    prompts = _closed_store(scene)
    whole = (scene.store / SNAPSHOT).read_bytes()
    for _ in range(200):
        data = bytearray(whole)
        data[scene.random.randrange(len(data))] ^= 1 << scene.random.randrange(8)
        (scene.store / SNAPSHOT).write_bytes(data)
        report = read_store(str(scene.store))
        scene.require(report.state == "cold", "a flipped bit is not accepted")
    _opens_cold(scene, prompts, str(read_store(str(scene.store)).reason))


@TABLE.cell("reopen.integers-at-their-bounds")
def integers(scene: Scene) -> None:
    """No integer of the header can be set to a bound and sealed again unseen."""
    _closed_store(scene)
    whole = (scene.store / SNAPSHOT).read_bytes()
    free = {"published_unix_ns", "version_minor", "generation_max", "identity_flags"}
    tried = 0
    for offset, size, name in HEADER.rows:
        if size not in (2, 4, 8) or name in free:
            continue
        value = int.from_bytes(whole[offset : offset + size], "little")
        top = 256**size - 1
        for bound in {0, 1, top, top - 1, 2**31, 2**32 - 1, 2**63, value + 1} - {value}:
            data = bytearray(whole)
            data[offset : offset + size] = min(bound, top).to_bytes(size, "little")
            (scene.store / SNAPSHOT).write_bytes(reseal(data))
            report = read_store(str(scene.store))
            scene.require(report.state == "cold", f"{name} = {bound} is not accepted")
            tried += 1
    scene.evidence.append(f"{tried} resealed headers refused")
    (scene.store / SNAPSHOT).write_bytes(whole)
    scene.reopened(None)


def _row(rows: list[Any], index: int, **changes: int) -> None:
    rows[index] = rows[index]._replace(**changes)


@TABLE.cells(
    {
        "reopen.extents-overlap": _damage(lambda t: _row(t.extents, 1, offset=t.extents[0].offset)),
        "reopen.extent-past-its-pack": _damage(
            lambda t: _row(t.extents, 0, offset=t.extents[0].offset + (1 << 40))
        ),
        "reopen.extent-misaligned": _damage(
            lambda t: _row(t.extents, 0, offset=t.extents[0].offset + 4096)
        ),
        "reopen.extent-of-odd-width": _damage(lambda t: _row(t.extents, 0, width=4096 * 3)),
        "reopen.extent-in-no-pack": _damage(lambda t: _row(t.extents, 0, pack_index=9)),
        "reopen.generation-above-the-highest": _damage(
            lambda t: setattr(t, "generation_max", t.extents[-1].generation - 1)
        ),
        "reopen.record-behind-the-mark": _damage(
            lambda t: _row(t.extents, 0, append_mark_tokens=16)
        ),
        "reopen.record-in-no-extent": _damage(lambda t: _row(t.records, 0, extent=99)),
        "reopen.record-inside-a-block": _damage(lambda t: _row(t.records, 0, token_start=8)),
        "reopen.record-of-no-tokens": _damage(lambda t: _row(t.records, 0, token_count=0)),
        "reopen.record-twice": _damage(
            lambda t: _row(t.records, 1, record_id=t.records[0].record_id)
        ),
        "reopen.record-shares-bytes": _damage(
            lambda t: _row(t.records, 1, extent=t.records[0].extent)
        ),
        "reopen.parent-is-itself": _damage(lambda t: _row(t.records, 2, parent=2)),
        "reopen.parent-comes-later": _damage(lambda t: _row(t.records, 1, parent=2)),
        "reopen.unknown-root": _damage(lambda t: _row(t.records, 0, root=5)),
        "reopen.unknown-flag": _damage(lambda t: _row(t.records, 0, flags=1)),
        "reopen.token-gap": _damage(lambda t: _row(t.records, 1, token_index=999)),
        "reopen.checksum-gap": _damage(lambda t: _row(t.records, 1, checksum_index=999)),
    }
)
def forged(scene: Scene, change: Callable[[Tables], Any]) -> None:
    """Tables that contradict each other or the geometry are refused though every seal is right."""
    prompts = _closed_store(scene)
    forge(scene, change)
    _opens_cold(scene, prompts, "bad-snapshot")


@TABLE.cells(
    {
        "reopen.other-uuid": {"change": {"store_uuid": bytes(16)}, "reason": "uuid-mismatch"},
        "reopen.old-epoch": {"change": {"epoch": 0}, "reason": "epoch-mismatch"},
        "reopen.future-epoch": {"change": {"epoch": 99}, "reason": "epoch-mismatch"},
        "reopen.other-geometry": {
            "change": {"geometry_digest": bytes(16)},
            "reason": "geometry-mismatch",
        },
        "reopen.other-mtime": {"change": {"pack_mtime_ns": 1}, "reason": "mtime-changed"},
    }
)
def other_envelope(scene: Scene, change: dict[str, Any], reason: str) -> None:
    """A snapshot of another store, session or state of the pack file is not believed."""
    prompts = _closed_store(scene)
    forge(scene, lambda tables: None, **change)
    _opens_cold(scene, prompts, reason)


@TABLE.cell("reopen.other-inode")
def other_inode(scene: Scene) -> None:
    """A snapshot that was taken of another file is not believed."""
    prompts = _closed_store(scene)
    report = read_store(str(scene.store))
    forge(
        scene,
        lambda tables: None,
        identity=replace(report.identity, inode=report.identity.inode + 1),
    )
    _opens_cold(scene, prompts, "inode-mismatch")


@TABLE.cell("reopen.absent")
def absent(scene: Scene) -> None:
    """Without a snapshot the store is cold."""
    prompts = _closed_store(scene)
    (scene.store / SNAPSHOT).unlink()
    _opens_cold(scene, prompts, "no-snapshot")


@TABLE.cells(
    {
        "reopen.is-a-directory": {"make": Path.mkdir},
        "reopen.is-a-fifo": {"make": os.mkfifo},
        "reopen.is-a-symlink": {"make": lambda path: path.symlink_to("range.kept")},
    }
)
def not_a_file(scene: Scene, make: Callable[[Path], Any]) -> None:
    """What has the snapshot's name and is no regular file is not read."""
    prompts = _closed_store(scene)
    (scene.store / SNAPSHOT).rename(scene.store / "range.kept")
    make(scene.store / SNAPSHOT)
    scene.reopened("bad-snapshot")
    if (scene.store / SNAPSHOT).is_dir() and not (scene.store / SNAPSHOT).is_symlink():
        (scene.store / SNAPSHOT).rmdir()
    _opens_cold(scene, prompts, str(read_store(str(scene.store)).reason))


@TABLE.cells(
    {
        "reopen.copied-pack": {"how": "copied"},
        "reopen.replaced-pack": {"how": "replaced"},
        "reopen.touched-pack": {"how": "touched"},
    }
)
def other_file(scene: Scene, how: str) -> None:
    """A pack file that is not proved to be the one that was closed makes the store cold."""
    prompts = _closed_store(scene)
    pack = scene.store / PACK
    if how == "touched":
        os.utime(pack)
    else:
        copy = scene.store / "copy"
        shutil.copy2(pack, copy)
        if how == "replaced":
            pack.unlink()  # its inode number is free now, and usually used again
            shutil.copy2(copy, pack)
            copy.unlink()
        else:
            copy.rename(pack)
        pack.chmod(0o600)
    reason = read_store(str(scene.store)).reason
    known = {"inode-mismatch", "birth-time-mismatch", "generation-mismatch", "mtime-changed"}
    scene.require(reason in known, f"the reason names the file, not {reason}")
    _opens_cold(scene, prompts, str(reason))


@TABLE.cell("reopen.moved-in-its-file-system")
def moved(scene: Scene) -> None:
    """A store that was moved as a whole is the same store, and warm."""
    prompts = _closed_store(scene)
    scene.store = scene.store.rename(scene.store.parent / "elsewhere")
    _opens_warm(scene, prompts)


@TABLE.cell("reopen.temp-left-behind")
def temp_left(scene: Scene) -> None:
    """What a killed writer left is swept away, and is never taken for a snapshot."""
    prompts = _closed_store(scene)
    temp = scene.store / ".range.snapshot.0123456789abcdef.tmp"
    temp.write_bytes(b"half of a snapshot")
    _opens_warm(scene, prompts)
    scene.require(not temp.exists(), "the temp is gone")


@TABLE.cells(
    {
        "reopen.future-version": {"field": "version_major", "reason": "unsupported-version"},
        "reopen.reserved-bytes-set": {"field": "reserved", "reason": "bad-snapshot"},
    }
)
def future(scene: Scene, field: str, reason: str) -> None:
    """A snapshot of a version that this Range does not know is not guessed at."""
    prompts = _closed_store(scene)
    data = bytearray((scene.store / SNAPSHOT).read_bytes())
    offset = next(offset for offset, _, name in HEADER.rows if name == field)
    data[offset] += 1
    (scene.store / SNAPSHOT).write_bytes(reseal(data))
    _opens_cold(scene, prompts, reason)
