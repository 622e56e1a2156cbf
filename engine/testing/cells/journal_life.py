"""Faults of a session's journal in its states checkpointing, closing and replaying.

Owns those rows of the matrix; what single bits and fields of a journal do are tests of the format.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rangekv.engine.folder import JOURNAL, MARKER, PACK, SNAPSHOT
from rangekv.engine.inspection import read_store
from rangekv.engine.testing.case import Table
from rangekv.engine.testing.cells.journal import (
    APPEND,
    SYNC,
    SYNC_JOURNAL,
    TEMP,
    committed,
    count,
    dying,
    lost_session,
    open_session,
    reopened,
    require_given_up,
    require_serving,
    session,
)
from rangekv.engine.testing.faulty_files import READS, WRITES, Act, Call, error, short, torn
from rangekv.engine.testing.scene import PROMPT_TOKENS, Prompt, Scene
from rangekv.format import journal
from rangekv.format.errors import ExitCode
from rangekv.format.journal import Journal

TABLE = Table("journal")

_SNAPSHOT_TEMP = ".range.snapshot.tmp"

Where = tuple[str | Callable[[Call], bool], int]
"""A call, and how many of its kind go before."""


def _slot(call: Call) -> bool:
    return call.name in WRITES and not call.is_payload


# -- checkpointing ---------------------------------------------------------------------------------

# Behind the commit that makes the journal long.
_STEPS: dict[str, Where] = {
    "snapshot-create": (f"create_temp {_SNAPSHOT_TEMP}", 0),
    "snapshot-fsync": (f"fsync {_SNAPSHOT_TEMP}", 0),
    "snapshot-rename": (f"rename {SNAPSHOT}", 0),
    "snapshot-directory": ("fsync_dir store", 0),
    "journal-create": (f"create_temp {TEMP}", 0),
    "journal-write": (APPEND, 1),
    "journal-fsync": (f"fsync {TEMP}", 0),
    "journal-rename": (f"rename {JOURNAL}", 0),
    "journal-directory": ("fsync_dir store", 1),
}
_PACK_STEPS: dict[str, Where] = {
    "pack-fsync": ("fsync range.pack", 0),
    "slot-sync-before": (SYNC, 1),
    "slot-write": (_slot, 0),
    "slot-sync-after": (SYNC, 2),
}


@TABLE.cells({f"checkpointing.{name}-fails": {"where": where} for name, where in _STEPS.items()})
def checkpoint_fails(scene: Scene, where: Where) -> None:
    """A checkpoint that fails costs the journal and nothing else; the close is warm."""
    call, skip = where
    with session(scene) as engine:
        prompt = scene.saved(engine)
        engine._commits.checkpoint_bytes = 1
        number = errno.ENOSPC if "create" in str(call) or "pwrite" in str(call) else errno.EIO
        scene.files.arm(call, error(number), skip=skip)
        engine.commit(scene.patience_s)
        scene.until(engine, lambda: not engine._catalog.ledger.active, "the journal is given up")
        scene.states.append("checkpointing")
        require_given_up(scene)
        require_serving(scene, engine, prompt)
    reopened(scene, "warm", [prompt])


@TABLE.cells(
    {
        f"checkpointing.{name}-killed": {"where": where}
        for name, where in (_STEPS | _PACK_STEPS).items()
    }
)
def killed_in_a_checkpoint(scene: Scene, where: Where) -> None:
    """A death inside a checkpoint leaves every commit, before the step or after it."""
    call, skip = where
    for after in (False, True):
        with lost_session(scene) as engine:
            prompts = [committed(scene, engine), scene.saved(engine)]
            engine._commits.checkpoint_bytes = 1
            scene.files.arm(call, dying(after=after), skip=skip)
            scene.require(engine.commit(scene.patience_s), "the commit before it is durable")
            thread = engine._commits._thread
            assert thread is not None
            thread.join(scene.patience_s)
            scene.require(not thread.is_alive(), "it dies in the checkpoint")
            scene.states.append("checkpointing")
        reopened(scene, "recovered", prompts)


@TABLE.cells(
    {f"checkpointing.{name}-fails": {"where": where} for name, where in _PACK_STEPS.items()}
)
def checkpoint_sync_fails(scene: Scene, where: Where) -> None:
    """Where a checkpoint cannot sync the pack nothing more is saved, and no index is published."""
    call, skip = where
    engine = open_session(scene)
    prompt = scene.saved(engine)
    engine._commits.checkpoint_bytes = 1
    scene.files.arm(call, error(errno.EIO), skip=skip)
    engine.commit(scene.patience_s)
    scene.until(engine, lambda: not engine._catalog.ledger.active, "the journal is given up")
    scene.states.append("checkpointing")
    require_given_up(scene)
    scene.require(engine.save(scene.key(), scene.prompt()) is None, "every save is declined")
    scene.require(scene.restore(engine, prompt) == PROMPT_TOKENS, "restores go on")
    scene.files.calls.clear()
    scene.closed(engine.close(scene.patience_s), "dirty")
    scene.require(not count(scene, "fsync range.pack"), "no sync of the pack is tried again")
    reopened(scene, "cold", lost=[prompt], reason="dirty-marker")


@TABLE.cells(
    {
        f"checkpointing.{name}-stands-still": {"where": where}
        for name, where in (_STEPS | _PACK_STEPS).items()
        if name in ("pack-fsync", "snapshot-fsync", "journal-fsync", "slot-sync-after")
    }
)
def checkpoint_stands_still(scene: Scene, where: Where) -> None:
    """A checkpoint that stands still stalls no restore and no save; what they add is kept."""
    call, skip = where
    with lost_session(scene) as engine:
        prompts = [scene.saved(engine)]
        engine._commits.checkpoint_bytes = 1
        hold = scene.hold()
        scene.files.arm(call, hold, skip=skip)
        scene.require(engine.commit(scene.patience_s), "the commit before it is durable")
        scene.reached(hold)
        scene.states += ["checkpointing", "stands still"]
        require_serving(scene, engine, prompts[0])
        prompts.append(scene.saved(engine))
        engine._commits.checkpoint_bytes = 1 << 30
        hold.let_go()
        scene.require(engine.commit(scene.patience_s), "a commit goes into the new journal")
    reopened(scene, "recovered", prompts)


@TABLE.cell("checkpointing.writes-short")
def checkpoint_short(scene: Scene) -> None:
    """A checkpoint whose files are written in pieces is whole in the end."""
    with lost_session(scene) as engine:
        prompts = [committed(scene, engine), scene.saved(engine)]
        engine._commits.checkpoint_bytes = 1
        scene.files.arm("pwrite", short(lambda asked: (asked + 1) // 2), times=40)
        scene.require(engine.commit(scene.patience_s), "the commit is durable")
        scene.require(engine.commit(scene.patience_s), "and one behind the checkpoint")
        scene.require(engine.store.epoch > engine.epoch, "there was a checkpoint")
        scene.states.append("checkpointing")
    reopened(scene, "recovered", prompts)


# -- closing ---------------------------------------------------------------------------------------


@TABLE.cells(
    {
        "closing.pack-sync-eio": {"call": SYNC},
        "closing.append-enospc": {"call": APPEND},
        "closing.fdatasync-eio": {"call": SYNC_JOURNAL},
    }
)
def last_commit_fails(scene: Scene, call: str) -> None:
    """The last commit of a close may fail: the index is published, unless the pack is in doubt."""
    engine = open_session(scene)
    prompts = [committed(scene, engine), scene.saved(engine)]
    scene.files.arm(call, error(errno.EIO))
    doubted = call == SYNC
    scene.closed(engine.close(scene.patience_s), "dirty" if doubted else "clean")
    if doubted:
        reopened(scene, "cold", lost=prompts, reason="dirty-marker")
    else:
        scene.require(not (scene.store / JOURNAL).exists(), "no journal is left")
        reopened(scene, "warm", prompts)


@TABLE.cell("closing.disk-full")
def close_on_a_full_disk(scene: Scene) -> None:
    """Where neither the last commit nor the index finds room, the commits before it are kept."""
    engine = open_session(scene)
    kept, lost = committed(scene, engine), scene.saved(engine)
    scene.files.arm(APPEND, error(errno.ENOSPC))
    scene.files.arm("create_temp", error(errno.ENOSPC))
    result = engine.close(scene.patience_s)
    scene.closed(result, "dirty")
    scene.require("1 commits" in result.detail, "the close says what is kept")
    reopened(scene, "recovered", [kept], [lost])


@TABLE.cell("closing.pack-fsync-eio")
def close_sync_fails(scene: Scene) -> None:
    """A close that cannot sync the pack leaves nothing on disk that names its bytes."""
    engine = open_session(scene)
    prompts = [committed(scene, engine)]
    scene.files.arm("fsync range.pack", error(errno.EIO))
    result = engine.close(scene.patience_s)
    scene.closed(result, "dirty")
    scene.require(result.exit_code is ExitCode.ENVIRONMENT, "the close names the reason")
    require_given_up(scene)
    reopened(scene, "cold", lost=prompts, reason="dirty-marker")


@TABLE.cells(
    {
        f"closing.{name}": {"call": call, "act": act, "skip": skip, "state": state}
        for name, call, act, skip, state in (
            ("snapshot-create-enospc", "create_temp", error(errno.ENOSPC), 0, "recovered"),
            ("snapshot-write-torn", f"pwrite {_SNAPSHOT_TEMP}", torn(errno.EIO), 0, "recovered"),
            ("snapshot-fsync-eio", f"fsync {_SNAPSHOT_TEMP}", error(errno.EIO), 0, "recovered"),
            ("snapshot-rename-eio", f"rename {SNAPSHOT}", error(errno.EIO), 0, "recovered"),
            ("snapshot-directory-fsync-eio", "fsync_dir store", error(errno.EIO), 0, "recovered"),
            ("unlink-marker-eio", f"unlink {MARKER}", error(errno.EIO), 0, "recovered"),
            ("unlink-journal-eio", f"unlink {JOURNAL}", error(errno.EIO), 0, "warm"),
            ("directory-fsync-eio", "fsync_dir store", error(errno.EIO), 1, "warm"),
        )
    }
)
def close_fails(scene: Scene, call: str, act: Act, skip: int, state: str) -> None:
    """A close that cannot publish its index or end its session keeps all of it in the journal."""
    engine = open_session(scene)
    prompts = [committed(scene, engine), scene.saved(engine)]
    scene.files.arm(call, act, skip=skip)
    result = engine.close(scene.patience_s)
    scene.closed(result, "dirty")
    scene.require(result.exit_code is ExitCode.ENVIRONMENT, "the close names the reason")
    scene.require("2 commits" in result.detail, "and says what is kept")
    reopened(scene, state, prompts)


# -- replaying -------------------------------------------------------------------------------------


def _left(scene: Scene) -> list[Prompt]:
    """Leave the store of a killed session with three commits of one prompt each."""
    with lost_session(scene) as engine:
        return [committed(scene, engine) for _ in range(3)]


def _read(scene: Scene) -> tuple[bytearray, Journal]:
    data = bytearray((scene.store / JOURNAL).read_bytes())
    return data, journal.decode(bytes(data))


def _flip(scene: Scene, data: bytearray, begin: int, end: int) -> None:
    data[scene.random.randrange(begin, end)] ^= 1 << scene.random.randrange(8)


def _cut_inside(scene: Scene, data: bytearray, first: int, last: int) -> None:
    del data[scene.random.randrange(first + 1, last) :]


@TABLE.cells(
    {
        "replaying.last-frame-cut": {"change": _cut_inside},
        "replaying.last-frame-flipped": {"change": _flip},
        "replaying.last-frame-gone": {"change": lambda scene, data, first, last: _cut(data, first)},
        "replaying.last-frame-zeros": {
            "change": lambda scene, data, first, last: data.__setitem__(
                slice(first, last), bytes(last - first)
            )
        },
    }
)
def torn_commit(scene: Scene, change: Callable[[Scene, bytearray, int, int], None]) -> None:
    """A last commit that is not whole is lost; those before it are kept."""
    *kept, lost = _left(scene)
    data, told = _read(scene)
    frame = told.frames[-1]
    change(scene, data, frame.offset, frame.offset + frame.size)
    (scene.store / JOURNAL).write_bytes(data)
    scene.states.append("torn")
    reopened(scene, "recovered", kept, [lost])


@TABLE.cell("replaying.trailing-bytes")
def trailing_bytes(scene: Scene) -> None:
    """What lies behind the last commit and is none is ignored."""
    prompts = _left(scene)
    with open(scene.store / JOURNAL, "ab") as file:
        file.write(scene.random.randbytes(200))
    reopened(scene, "recovered", prompts)


def _cut(data: bytearray, begin: int, end: int | None = None) -> None:
    del data[begin:end]


def _swap(data: bytearray, told: Journal) -> None:
    first, second = told.frames[:2]
    frames = [bytes(data[one.offset : one.offset + one.size]) for one in (second, first)]
    data[first.offset : second.offset + second.size] = b"".join(frames)


_Damage = Callable[[Scene, bytearray, Journal], Any]


def _damage(change: _Damage) -> dict[str, _Damage]:
    return {"change": change}


@TABLE.cells(
    {
        "replaying.first-frame-flipped": _damage(
            lambda scene, data, told: _flip(scene, data, 128, 128 + told.frames[0].size)
        ),
        "replaying.first-frame-missing": _damage(
            lambda scene, data, told: _cut(data, 128, told.frames[1].offset)
        ),
        "replaying.frames-swapped": _damage(lambda scene, data, told: _swap(data, told)),
        "replaying.header-flipped": _damage(lambda scene, data, told: _flip(scene, data, 0, 128)),
        "replaying.truncated-in-header": _damage(lambda scene, data, told: _cut(data, 100)),
        "replaying.empty": _damage(lambda scene, data, told: data.clear()),
        "replaying.zeros": _damage(
            lambda scene, data, told: data.__setitem__(slice(None), bytes(len(data)))
        ),
    }
)
def damaged(scene: Scene, change: _Damage) -> None:
    """A journal that is damaged before its last commit makes the store cold, with one reason."""
    prompts = _left(scene)
    data, told = _read(scene)
    change(scene, data, told)
    (scene.store / JOURNAL).write_bytes(data)
    scene.states.append("damaged")
    reopened(scene, "cold", lost=prompts, reason="bad-journal")


@TABLE.cells(
    {
        "replaying.other-store": {"change": {"store_uuid": bytes(16)}},
        "replaying.other-geometry": {"change": {"geometry_digest": bytes(16)}},
        "replaying.later-session": {"change": {"epoch": 99}},
    }
)
def other_journal(scene: Scene, change: dict[str, Any]) -> None:
    """A journal of another store, geometry or session is not believed, whole as it is."""
    prompts = _left(scene)
    data, told = _read(scene)
    data[:128] = replace(told.header, **change).encode()
    (scene.store / JOURNAL).write_bytes(data[:128])
    scene.states.append("replaced")
    reopened(scene, "cold", lost=prompts, reason="journal-mismatch")


@TABLE.cell("replaying.earlier-session")
def earlier_journal(scene: Scene) -> None:
    """A journal of an earlier session is none: the killed one has left nothing."""
    prompts = _left(scene)
    before = (scene.store / JOURNAL).read_bytes()
    with lost_session(scene) as engine:
        prompts.append(committed(scene, engine))
    (scene.store / JOURNAL).write_bytes(before)
    scene.states.append("replaced")
    reopened(scene, "cold", lost=prompts, reason="dirty-marker")


@TABLE.cells(
    {
        "replaying.absent": {"make": None, "reason": "dirty-marker"},
        "replaying.is-a-fifo": {"make": os.mkfifo, "reason": "bad-journal"},
        "replaying.is-a-symlink": {
            "make": lambda path: path.symlink_to("range.kept"),
            "reason": "bad-journal",
        },
    }
)
def not_a_file(scene: Scene, make: Callable[[Path], Any] | None, reason: str) -> None:
    """Without a regular file of that name there is no journal, and the store is cold."""
    prompts = _left(scene)
    (scene.store / JOURNAL).rename(scene.store / "range.kept")
    if make is not None:
        make(scene.store / JOURNAL)
    reopened(scene, "cold", lost=prompts, reason=reason)


@TABLE.cell("replaying.read-eio")
def read_fails(scene: Scene) -> None:
    """A journal that cannot be read makes the store cold, with the reason."""
    prompts = _left(scene)
    scene.files.arm(_reads_journal, error(errno.EIO))
    reopened(scene, "cold", lost=prompts, reason="bad-journal")


@TABLE.cell("replaying.read-short")
def read_short(scene: Scene) -> None:
    """A journal that is read in pieces is whole in the end."""
    prompts = _left(scene)
    scene.files.arm(_reads_journal, short(lambda asked: (asked + 1) // 2), times=20)
    reopened(scene, "recovered", prompts)


def _reads_journal(call: Call) -> bool:
    return call.name in READS and call.file == JOURNAL


@TABLE.cell("replaying.discarded")
def discarded(scene: Scene) -> None:
    """An open without a journal takes a killed session as cold, and its journal is gone."""
    prompts = _left(scene)
    engine = scene.open()
    opened = engine.open_result
    scene.require((opened.state, opened.reason) == ("cold", "dirty-marker"), f"it is {opened}")
    scene.require(not (scene.store / JOURNAL).exists(), "its journal is gone")
    scene.states.append("discarded")
    prompts.append(scene.saved(engine))
    engine.store.abandon()
    reopened(scene, "cold", lost=prompts, reason="dirty-marker")


@TABLE.cells(
    {"replaying.page-rotten": {"verify": "always"}, "replaying.unverified": {"verify": "off"}}
)
def rotten(scene: Scene, verify: str) -> None:
    """Every recovered page is verified before it is served, also where verify is off."""
    prompts = _left(scene)
    tables = read_store(str(scene.store)).tables
    assert tables is not None
    record = tables.records[0]
    extent = tables.extents[record.extent]
    scene.rot(extent.offset + record.extent_token_start * scene.model.token_bytes)
    with session(scene, verify=verify) as engine:
        restore, blocks = scene.started_unread(engine, prompts[0])
        scene.require(not all(scene.delivered(restore)), "a rotten page is not delivered")
        restore.finish()
        scene.give(blocks)
        scene.require(engine.stats().counters["checksum_failures"] == 1, "it is counted")
        for prompt in prompts[1:]:
            scene.require(scene.restore(engine, prompt) == PROMPT_TOKENS, "the others are served")
        scene.states.append("recovered")
    reopened(scene, "warm", prompts[1:], [prompts[0]])


@TABLE.cell("replaying.other-pack")
def other_pack(scene: Scene) -> None:
    """A journal is worth nothing beside a pack file that is not proved to be its own."""
    prompts = _left(scene)
    pack, copy = scene.store / PACK, scene.store / "copy"
    shutil.copy2(pack, copy)
    copy.rename(pack)
    pack.chmod(0o600)
    reason = read_store(str(scene.store)).reason
    known = {"inode-mismatch", "birth-time-mismatch", "generation-mismatch"}
    scene.require(reason in known, f"the reason names the file, not {reason}")
    scene.states.append("copied")
    reopened(scene, "cold", lost=prompts, reason=reason)


@TABLE.cell("replaying.again-and-again")
def again_and_again(scene: Scene) -> None:
    """Sessions that are killed one after another add up."""
    prompts: list[Prompt] = []
    for _ in range(4):
        with lost_session(scene) as engine:
            for prompt in prompts:
                scene.require(scene.restore(engine, prompt) == PROMPT_TOKENS, "the earlier ones")
            prompts.append(committed(scene, engine))
    reopened(scene, "recovered", prompts)


@TABLE.cell("replaying.forgotten-in-a-living-extent")
def forgotten(scene: Scene) -> None:
    """What was forgotten for good stays forgotten, though its extent lives on."""
    with lost_session(scene) as engine:
        prompt = committed(scene, engine)
        longer = scene.prompt(prompt, same_tokens=PROMPT_TOKENS, token_count=2 * PROMPT_TOKENS)
        scene.require(scene.save(engine, longer), "it grows in place")
        scene.require(engine.stats().extents == 1, "in one extent")
        scene.require(engine.commit(scene.patience_s), "both are committed")
        engine.retire(longer, start_token=PROMPT_TOKENS)
        scene.require(engine.commit(scene.patience_s), "and the end of the second")
        scene.states.append("retired")
    with session(scene) as engine:
        scene.require(engine.open_result.state == "recovered", "it recovers")
        scene.require(scene.restore(engine, longer) == PROMPT_TOKENS, "the first part alone")
