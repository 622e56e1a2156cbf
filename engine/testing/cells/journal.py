"""Faults of a session's journal in its states starting, idle, committing and held.

Owns those rows of the matrix and how a session of them is opened, lost and opened again; every
crash point of the same protocol is the crash explorer's.
"""

from __future__ import annotations

import errno
import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rangekv.engine import Engine
from rangekv.engine.devices.device import BlockIds
from rangekv.engine.folder import JOURNAL, MARKER, SNAPSHOT
from rangekv.engine.testing.case import Table
from rangekv.engine.testing.faulty_files import Act, Call, error, raising, short, torn
from rangekv.engine.testing.scene import PROMPT_TOKENS, Prompt, Scene
from rangekv.engine.transfer.save import Save
from rangekv.format.errors import EnvironmentFault, ExitCode

TABLE = Table("journal")

TEMP = ".range.journal.tmp"
SYNC, APPEND, SYNC_JOURNAL = "fdatasync range.pack", f"pwrite {TEMP}", f"fdatasync {TEMP}"
WRITE = "pwritev range.pack"
PACK_TOKENS = 1024
PACKS = 4

_SETTINGS: dict[str, Any] = {"recovery": "journal", "commit_interval_s": 3600.0}

# What a kill looks like to the thread that makes commits: it goes no further and says nothing.
DEATH = SystemExit()


def open_session(scene: Scene, **settings: Any) -> Engine:
    """Open with a journal whose commits come only when a cell asks for them."""
    return scene.open(**_SETTINGS | settings)


@contextmanager
def session(scene: Scene, **settings: Any) -> Iterator[Engine]:
    """Open the same, check it at the end and close it cleanly."""
    with scene.engine(**_SETTINGS | settings) as engine:
        yield engine


@contextmanager
def lost_session(scene: Scene, **settings: Any) -> Iterator[Engine]:
    """Open the same, and lose it at the end as a kill does: nothing more is written."""
    engine = open_session(scene, **settings)
    try:
        yield engine
    finally:
        scene.let_go()
        lose(scene, engine)


def lose(scene: Scene, engine: Engine) -> None:
    """End an engine as a kill does: no commit, no close, its lock is gone."""
    engine._commits.close()
    engine._pool.close(scene.patience_s)
    engine._events.close()
    engine.store.abandon()
    scene.files.disarm()
    scene.states.append("killed")


def reopened(
    scene: Scene,
    state: str,
    kept: Iterable[Prompt] = (),
    lost: Iterable[Prompt] = (),
    *,
    reason: str | None = None,
) -> None:
    """Require how the next session opens, what it serves, byte for byte, and that it works."""
    with session(scene) as engine:
        opened = engine.open_result
        scene.states.append(opened.state if reason is None else f"{opened.state} ({reason})")
        scene.require(
            (opened.state, opened.reason) == (state, reason),
            f"it opens {state} ({reason}), not {opened.state} ({opened.reason}: {opened.detail})",
        )
        for prompt in kept:
            scene.require(scene.restore(engine, prompt) == PROMPT_TOKENS, "what was committed")
        for prompt in lost:
            scene.require(scene.hit(engine, prompt) == 0, "nothing that was not")
        scene.require(engine.stats().counters["checksum_failures"] == 0, "no page is wrong")
        scene.require(scene.hit(engine, scene.saved(engine)) == PROMPT_TOKENS, "and it works")


def committed(scene: Scene, engine: Engine) -> Prompt:
    """Save a prompt and make it survive a crash."""
    prompt = scene.saved(engine)
    scene.require(engine.commit(scene.patience_s), "a commit without a fault is durable")
    return prompt


def require_given_up(scene: Scene) -> None:
    """Require that nothing on disk names any space, so that nobody has to wait."""
    left = [name for name in (JOURNAL, SNAPSHOT) if (scene.store / name).exists()]
    scene.require(not left, f"a journal that is given up is not left on disk: {left}")
    scene.states.append("given up")


def require_serving(scene: Scene, engine: Engine, prompt: Prompt) -> None:
    """Require that restores and saves into free space go on."""
    scene.require(scene.restore(engine, prompt) == PROMPT_TOKENS, "restores go on")
    scene.saved(engine)


def count(scene: Scene, call: str) -> int:
    """Return how often a call was made since the log was cleared."""
    return sum(line.startswith(call) for line in scene.files.calls)


def dying(*, after: bool) -> Act:
    """Let the thread of commits die at a call, before it or after it."""

    def act(call: Call) -> Any:
        if after:
            call.go()
        raise DEATH

    return act


# -- starting --------------------------------------------------------------------------------------


def _refused(name: str, call: str, act: Act, code: str) -> dict[str, dict[str, Any]]:
    return {f"starting.{name}": {"call": call, "act": act, "code": code}}


@TABLE.cells(
    {
        **_refused("create-enospc", f"create_temp {TEMP}", error(errno.ENOSPC), "no-space"),
        **_refused("create-eacces", f"create_temp {TEMP}", error(errno.EACCES), "permission"),
        **_refused("write-enospc", APPEND, error(errno.ENOSPC), "no-space"),
        **_refused("write-torn", APPEND, torn(errno.EIO), "io-error"),
        **_refused("fsync-eio", f"fsync {TEMP}", error(errno.EIO), "io-error"),
        **_refused("rename-eio", f"rename {JOURNAL}", error(errno.EIO), "io-error"),
        **_refused("directory-fsync-eio", "fsync_dir store", error(errno.EIO), "io-error"),
        **_refused("pack-fsync-eio", "fsync range.pack", error(errno.EIO), "io-error"),
        **_refused(
            "snapshot-enospc", "create_temp .range.snapshot.tmp", error(errno.ENOSPC), "no-space"
        ),
        **_refused("snapshot-rename-eio", f"rename {SNAPSHOT}", error(errno.EIO), "io-error"),
    }
)
def open_fails(scene: Scene, call: str, act: Act, code: str) -> None:
    """An open that cannot begin its journal is refused by name; the one before counts on."""
    with lost_session(scene) as engine:
        prompt = committed(scene, engine)
    scene.files.arm(call, act)
    scene.refused(code, lambda: open_session(scene).close())
    scene.states += ["starting", "open refused"]
    scene.require(not list(scene.store.glob(".range.*")), "no temp is left behind")
    reopened(scene, "recovered", [prompt])


@TABLE.cell("starting.write-short")
def short_header(scene: Scene) -> None:
    """A journal whose header is written in pieces is whole in the end."""
    scene.files.arm(APPEND, short(lambda asked: (asked + 1) // 2), times=4)
    with lost_session(scene) as engine:
        prompt = committed(scene, engine)
    reopened(scene, "recovered", [prompt])


@TABLE.cell("starting.second-opener")
def second_opener(scene: Scene) -> None:
    """A second opener is refused and changes no byte; the owner's commits go on."""
    with lost_session(scene) as engine:
        prompts = [committed(scene, engine)]
        before = (scene.store / JOURNAL).read_bytes()
        scene.refused("store-locked", lambda: open_session(scene).close())
        scene.refused("store-locked", lambda: scene.open().close())
        scene.require((scene.store / JOURNAL).read_bytes() == before, "the journal is as it was")
        prompts.append(committed(scene, engine))
    reopened(scene, "recovered", prompts)


# -- idle ------------------------------------------------------------------------------------------


@TABLE.cell("idle.by-the-clock")
def by_the_clock(scene: Scene) -> None:
    """What is published is committed after an interval, though nobody asks; then nothing is."""
    with lost_session(scene, commit_interval_s=0.01) as engine:
        prompt = scene.saved(engine)
        told = engine._catalog.ledger
        scene.until(engine, lambda: not told.waiting and told._durable >= told.event, "a commit")
        engine.commit(scene.patience_s)
        scene.files.calls.clear()
        hold = scene.hold()
        scene.files.arm(lambda call: call.name != "close", hold)
        scene.require(not hold.wait_reached(0.05), "with nothing to tell no file is touched")
        scene.files.disarm()
        scene.states.append("idle")
    reopened(scene, "recovered", [prompt])


@TABLE.cells(
    {
        "idle.removed": {"make": None, "reason": "dirty-marker"},
        "idle.replaced-by-nothing": {"make": b"", "reason": "bad-journal"},
        "idle.replaced-by-something": {"make": b"somebody's file", "reason": "bad-journal"},
    }
)
def removed_while_open(scene: Scene, make: bytes | None, reason: str) -> None:
    """A journal that somebody takes away while the store is open costs a killed session's cache."""
    with lost_session(scene) as engine:
        prompts = [committed(scene, engine)]
        (scene.store / JOURNAL).unlink()
        if make is not None:
            (scene.store / JOURNAL).write_bytes(make)
        scene.states += ["idle", "taken away"]
        prompts.append(committed(scene, engine))
    reopened(scene, "cold", lost=prompts, reason=reason)


@TABLE.cells(
    {"idle.removed-then-closed": {"make": None}, "idle.replaced-then-closed": {"make": b"x"}}
)
def removed_then_closed(scene: Scene, make: bytes | None) -> None:
    """A close needs no journal: it is warm, and leaves none behind."""
    with session(scene) as engine:
        prompts = [committed(scene, engine)]
        (scene.store / JOURNAL).unlink()
        if make is not None:
            (scene.store / JOURNAL).write_bytes(make)
        scene.states += ["idle", "taken away"]
        prompts.append(scene.saved(engine))
    scene.require(not (scene.store / JOURNAL).exists(), "the close left none")
    reopened(scene, "warm", prompts)


@TABLE.cell("idle.truncated")
def truncated_while_open(scene: Scene) -> None:
    """A journal that lost its middle while it was open is damaged, and nothing of it counts."""
    with lost_session(scene) as engine:
        prompts = [committed(scene, engine) for _ in range(2)]
        with open(scene.store / JOURNAL, "r+b") as journal:
            journal.truncate(128)
        prompts.append(committed(scene, engine))
        scene.states += ["idle", "truncated"]
    reopened(scene, "cold", lost=prompts, reason="bad-journal")


@TABLE.cell("idle.marker-removed")
def marker_removed(scene: Scene) -> None:
    """Without its marker a killed session's journal counts all the same."""
    with lost_session(scene) as engine:
        prompt = committed(scene, engine)
        (scene.store / MARKER).unlink()
        scene.states.append("idle")
    reopened(scene, "recovered", [prompt])


# -- committing ------------------------------------------------------------------------------------


def _failing(name: str, call: str, act: Act) -> dict[str, dict[str, Any]]:
    return {f"committing.{name}": {"call": call, "act": act}}


_APPEND_FAILS = {
    **_failing("append-eio", APPEND, error(errno.EIO)),
    **_failing("append-enospc", APPEND, error(errno.ENOSPC)),
    **_failing("append-edquot", APPEND, error(errno.EDQUOT)),
    **_failing("append-efbig", APPEND, error(errno.EFBIG)),
    **_failing("append-torn", APPEND, torn(errno.EIO)),
    **_failing("append-writes-nothing", APPEND, short(lambda asked: 0)),
    **_failing("fdatasync-eio", SYNC_JOURNAL, error(errno.EIO)),
    **_failing("fdatasync-enospc", SYNC_JOURNAL, error(errno.ENOSPC)),
}


@TABLE.cells(_APPEND_FAILS)
def append_fails(scene: Scene, call: str, act: Act) -> None:
    """A commit that fails costs the journal and nothing else: saves go on, the close is warm."""
    with session(scene) as engine:
        prompts = [committed(scene, engine), scene.saved(engine)]
        scene.files.arm(call, act)
        scene.files.calls.clear()
        scene.require(not engine.commit(scene.patience_s), "the commit says that it failed")
        require_given_up(scene)
        scene.require(count(scene, call) == 1, "what failed is not tried again")
        scene.require(not engine.commit(scene.patience_s), "there is no journal any more")
        require_serving(scene, engine, prompts[0])
        engine.reset()
        prompts = [scene.saved(engine)]
    reopened(scene, "warm", prompts)


@TABLE.cells({f"{name}-then-killed": how for name, how in _APPEND_FAILS.items()})
def append_fails_then_killed(scene: Scene, call: str, act: Act) -> None:
    """A session that gave its journal up and dies leaves a cold store, never a wrong one."""
    with lost_session(scene) as engine:
        prompts = [committed(scene, engine), scene.saved(engine)]
        scene.files.arm(call, act)
        scene.require(not engine.commit(scene.patience_s), "the commit says that it failed")
        require_given_up(scene)
        scene.fill(engine)
    reopened(scene, "cold", lost=prompts, reason="dirty-marker")


@TABLE.cell("committing.append-short")
def append_short(scene: Scene) -> None:
    """A frame that is written in pieces is whole in the end."""
    with lost_session(scene) as engine:
        prompts = [committed(scene, engine)]
        scene.files.arm(APPEND, short(lambda asked: (asked + 1) // 2), times=20)
        prompts.append(committed(scene, engine))
        scene.states.append("committing")
    reopened(scene, "recovered", prompts)


@TABLE.cells(
    {
        "committing.pack-sync-eio": {"number": errno.EIO},
        "committing.pack-sync-enospc": {"number": errno.ENOSPC},
    }
)
def pack_sync_fails(scene: Scene, number: int) -> None:
    """Where the pack cannot be synced nothing more is saved or published; restores go on."""
    engine = open_session(scene)
    prompts = [committed(scene, engine), scene.saved(engine)]
    scene.files.arm(SYNC, error(number))
    scene.require(not engine.commit(scene.patience_s), "the commit says that it failed")
    require_given_up(scene)
    scene.require(engine.save(scene.key(), scene.prompt()) is None, "every save is declined")
    scene.require(engine.stats().counters["saves_declined_sync-failed"] == 1, "with the reason")
    for prompt in prompts:
        scene.require(scene.restore(engine, prompt) == PROMPT_TOKENS, "restores go on")
    scene.files.calls.clear()
    result = engine.close(scene.patience_s)
    scene.closed(result, "dirty")
    scene.require(result.exit_code is ExitCode.ENVIRONMENT, "the close names the reason")
    scene.require(not count(scene, "fsync range.pack"), "no sync of the pack is tried again")
    scene.require(not (scene.store / SNAPSHOT).exists(), "no index is published")
    reopened(scene, "cold", lost=prompts, reason="dirty-marker")


_HANGS = {"pack-sync": SYNC, "append": APPEND, "fdatasync": SYNC_JOURNAL}


@TABLE.cells({f"committing.{name}-stands-still": {"call": call} for name, call in _HANGS.items()})
def stands_still(scene: Scene, call: str) -> None:
    """A commit that stands still keeps no restore and no save waiting; in the end it counts."""
    with lost_session(scene) as engine:
        prompts = [committed(scene, engine), scene.saved(engine)]
        hold = scene.hold()
        scene.files.arm(call, hold)
        scene.require(not engine.commit(0.0), "who waits for a commit waits as long as he says")
        scene.reached(hold)
        scene.states += ["committing", "stands still"]
        for _ in range(3):
            require_serving(scene, engine, prompts[0])
        scene.require_waits(lambda: engine.commit(scene.patience_s), hold.let_go)
    reopened(scene, "recovered", prompts)


@TABLE.cells(
    {f"committing.{name}-stands-still-at-close": {"call": call} for name, call in _HANGS.items()}
)
def stands_still_at_close(scene: Scene, call: str) -> None:
    """A close does not wait for ever for a commit: it is dirty, and locked until that returns."""
    engine = open_session(scene)
    engine._commits.patience_s = 0.02
    prompts = [committed(scene, engine), scene.saved(engine)]
    hold = scene.hold()
    scene.files.arm(call, hold)
    result = engine.close(0.02)
    scene.reached(hold)
    scene.closed(result, "dirty")
    scene.require(result.exit_code is ExitCode.UNRETURNED_WRITE, "it says that one is missing")
    scene.refused("store-locked", lambda: open_session(scene).close())
    hold.let_go()
    thread = engine._commits._thread
    assert thread is not None
    thread.join(scene.patience_s)
    reopened(scene, "recovered", prompts)


@TABLE.cells(
    {
        f"committing.killed-{when}-{name}": {"call": call, "after": when == "after"}
        for name, call in _HANGS.items()
        for when in ("before", "after")
    }
)
def killed_in_a_commit(scene: Scene, call: str, after: bool) -> None:
    """A death inside a commit leaves the commits before it, and this one whole or not at all."""
    with lost_session(scene) as engine:
        early, late = committed(scene, engine), scene.saved(engine)
        scene.files.arm(call, dying(after=after))
        engine.commit(0.0)
        thread = engine._commits._thread
        assert thread is not None
        thread.join(scene.patience_s)
        scene.require(not thread.is_alive(), "it dies in the commit")
        scene.states.append("committing")
    # The page cache outlives a process: what was appended is there, synced or not.
    whole = call == SYNC_JOURNAL or (call == APPEND and after)
    kept, lost = ([early, late], []) if whole else ([early], [late])
    reopened(scene, "recovered", kept, lost)


@TABLE.cell("committing.raises")
def raises(scene: Scene) -> None:
    """An exception that no kernel raises ends the commits: nobody waits, the close is warm."""
    with session(scene) as engine:
        prompt = committed(scene, engine)
        scene.files.arm(APPEND, raising(ValueError("injected")))
        scene.saved(engine)
        scene.require(not engine.commit(scene.patience_s), "the commit says that it failed")
        scene.states.append("committing")
        require_serving(scene, engine, prompt)
    reopened(scene, "warm", [prompt])


# -- held ------------------------------------------------------------------------------------------


def full(scene: Scene, engine: Engine) -> list[Prompt]:
    """Fill the store with one prompt a pack, all of them committed; return them, oldest first."""
    prompts = [scene.saved(engine, token_count=PACK_TOKENS) for _ in range(PACKS)]
    scene.require(engine.commit(scene.patience_s), "all of them are committed")
    return prompts


def begin_held(scene: Scene, engine: Engine) -> tuple[Save, Prompt]:
    """Save a prompt into the space of the oldest one; its writes have to wait."""
    prompt = scene.prompt()
    save, blocks = scene.begin_save(engine, prompt)
    announce(scene, save, blocks)
    scene.until(engine, lambda: engine._counters.writes_held > 0, "the write is held")
    scene.states.append("held")
    return save, prompt


def announce(scene: Scene, save: Save, blocks: BlockIds) -> None:
    """Announce all of a save, end it and give its blocks back; it goes on by itself."""
    scene.announce(save, blocks)
    save.extracted(scene.patience_s)
    scene.give(blocks)
    save.finish()


@TABLE.cell("held.order")
def held_order(scene: Scene) -> None:
    """Space that is listed is written again after two commits: its end, and one more."""
    with lost_session(scene) as engine:
        prompts = full(scene, engine)
        scene.files.calls.clear()
        _, prompt = begin_held(scene, engine)
        scene.until(engine, lambda: not engine._saves.active, "the save ends")
        calls = [line.removesuffix(" (fault)") for line in scene.files.calls]
        first = next(n for n, line in enumerate(calls) if line.startswith(WRITE))
        syncs = sum(line.startswith(SYNC_JOURNAL) for line in calls[:first])
        scene.require(syncs >= 2, f"two commits are durable before the write, not {syncs}")
        synced = sum(line.startswith(SYNC) for line in calls[:first])
        scene.require(not synced, "they list nothing, so they need no sync of the pack")
        scene.require(engine.commit(scene.patience_s), "then it is committed itself")
    with session(scene) as engine:
        scene.require(scene.restore(engine, prompt) == PROMPT_TOKENS, "it came back")
        for one in prompts[1:]:
            scene.require(scene.restore(engine, one) == PACK_TOKENS, "and the others")
        scene.require(scene.hit(engine, prompts[0]) == 0, "but not what made room")


# The pack is not synced in a commit that lists nothing.
@TABLE.cells(
    {f"held.{name}-stands-still": {"call": call} for name, call in _HANGS.items() if call != SYNC}
)
def held_while_standing(scene: Scene, call: str) -> None:
    """While a commit stands still only held writes wait: no byte of theirs reaches the pack."""
    with lost_session(scene) as engine:
        prompts = full(scene, engine)
        hold = scene.hold(dying(after=False))
        scene.files.arm(call, hold)
        scene.files.calls.clear()
        begin_held(scene, engine)
        scene.reached(hold)
        scene.require(scene.restore(engine, prompts[-1]) == PACK_TOKENS, "restores go on")
        scene.require(not count(scene, WRITE), "nothing is written where a replay may look")
    with session(scene) as engine:
        scene.require(engine.open_result.state == "recovered", "what was committed is kept")
        hits = [scene.restore(engine, prompt) for prompt in prompts]
        # Whose frame is there, synced or not, has ended the oldest.
        oldest = 0 if call == SYNC_JOURNAL else PACK_TOKENS
        scene.require(hits == [oldest] + 3 * [PACK_TOKENS], f"all that was committed: {hits}")


@TABLE.cell("held.past-its-deadline")
def held_too_long(scene: Scene) -> None:
    """A write that is held past its deadline is given up; bank and space come back."""
    with session(scene) as engine:
        full(scene, engine)
        hold = scene.hold()
        scene.files.arm(SYNC_JOURNAL, hold)
        with scene.short_deadlines(engine):
            save, prompt = begin_held(scene, engine)
            scene.require(not save.wait(scene.patience_s), "the save fails")
        scene.require(save.settled, "and has ended, though the commit has not")
        scene.require(scene.hit(engine, prompt) == 0, "it is not visible")
        scene.states.append("given up")
        hold.let_go()
        scene.saved(engine)


@TABLE.cell("held.cancelled")
def held_cancelled(scene: Scene) -> None:
    """A held save that is cancelled writes nothing, and all that it had comes back."""
    with session(scene) as engine:
        full(scene, engine)
        hold = scene.hold()
        scene.files.arm(SYNC_JOURNAL, hold)
        scene.files.calls.clear()
        save, _ = begin_held(scene, engine)
        scene.reached(hold)
        save.cancel()
        hold.let_go()
        scene.until(engine, lambda: not engine._saves.active, "the save ends")
        scene.require(not count(scene, WRITE), "it has written nothing")
        scene.states.append("cancelled")


@TABLE.cell("held.close")
def held_at_the_close(scene: Scene) -> None:
    """A close gives up what a slow commit holds past the deadline, and is clean all the same."""
    engine = scene.open(recovery="journal", commit_interval_s=3600)
    prompts = full(scene, engine)
    hold = scene.hold()
    scene.files.arm(SYNC_JOURNAL, hold)
    save, prompt = begin_held(scene, engine)
    scene.reached(hold)

    def let_go_later() -> None:
        save.wait(scene.patience_s)
        hold.let_go()

    later = threading.Thread(target=let_go_later)
    later.start()
    result = engine.close(0.05)
    later.join()
    scene.closed(result, "clean")
    scene.require(save.settled and save.error is not None, "the held save has failed")
    with session(scene) as engine:
        scene.require(engine.open_result.state == "warm", "the index was published")
        scene.require(scene.restore(engine, prompts[-1]) == PACK_TOKENS, "with all that it held")
        scene.require(scene.hit(engine, prompt) == 0, "but not what was never written")


@TABLE.cells(
    {
        "held.append-eio": {"call": APPEND, "act": error(errno.EIO)},
        "held.fdatasync-eio": {"call": SYNC_JOURNAL, "act": error(errno.EIO)},
    }
)
def held_then_given_up(scene: Scene, call: str, act: Act) -> None:
    """A write that waits for a commit that fails goes on when nothing on disk names its space."""
    with session(scene) as engine:
        full(scene, engine)
        scene.files.arm(call, act)
        save, prompt = begin_held(scene, engine)
        scene.require(save.wait(scene.patience_s), "the save is published")
        require_given_up(scene)
        scene.require(scene.restore(engine, prompt) == PROMPT_TOKENS, "and served")


@TABLE.cell("held.append-raises")
def held_then_raised(scene: Scene) -> None:
    """Where a defect of ours ends the commits, space that the journal names is not written."""
    with session(scene) as engine:
        full(scene, engine)
        scene.files.arm(APPEND, raising(ValueError("injected")))
        scene.files.calls.clear()
        with scene.short_deadlines(engine):
            save, prompt = begin_held(scene, engine)
            scene.require(not save.wait(scene.patience_s), "the save fails at its deadline")
        scene.require((scene.store / JOURNAL).exists(), "the journal is still there")
        scene.require(not count(scene, WRITE), "nothing was written")
        scene.require(scene.hit(engine, prompt) == 0, "and nothing is visible")
        scene.states.append("given up")


@TABLE.cells(
    {
        "held.unlink-eio": {"call": f"unlink {SNAPSHOT}"},
        "held.directory-fsync-eio": {"call": "fsync_dir store"},
    }
)
def stuck(scene: Scene, call: str) -> None:
    """A journal that can be neither written nor removed: named space is never written again."""
    with lost_session(scene) as engine:
        prompts = full(scene, engine)
        scene.files.arm(APPEND, error(errno.EIO))
        scene.files.arm(call, error(errno.EIO), times=math.inf)
        scene.files.calls.clear()
        with scene.short_deadlines(engine):
            save, _ = begin_held(scene, engine)
            scene.require(not save.wait(scene.patience_s), "the save fails at its deadline")
        scene.require(not count(scene, WRITE), "nothing was written")
        scene.require(scene.restore(engine, prompts[-1]) == PACK_TOKENS, "restores go on")
        try:
            engine.reset()
        except EnvironmentFault as refused:
            scene.require(refused.code == "index-not-retracted", "a reset says what is left")
        else:
            scene.require(False, "a reset does not say that it is done")
        scene.states.append("neither written nor removed")
    with session(scene) as engine:
        scene.require(engine.stats().counters["checksum_failures"] == 0, "no page is wrong")
        hits = [scene.restore(engine, prompt) for prompt in prompts]
        scene.require(set(hits) <= {0, PACK_TOKENS}, f"whole or nothing: {hits}")


@TABLE.cell("held.reset-waits")
def reset_waits(scene: Scene) -> None:
    """A reset returns when no crash can bring anything back, and not before."""
    with lost_session(scene) as engine:
        prompt = committed(scene, engine)
        hold = scene.hold()
        scene.files.arm(SYNC_JOURNAL, hold)
        scene.require_waits(engine.reset, hold.let_go)
        scene.states += ["reset", "durable"]
    reopened(scene, "recovered", lost=[prompt])


@TABLE.cell("held.reset-then-killed")
def reset_then_killed(scene: Scene) -> None:
    """What was forgotten on request is not found again, whenever the process dies after that."""
    with lost_session(scene) as engine:
        prompts = [committed(scene, engine) for _ in range(2)]
        engine.reset()
        scene.states.append("reset")
    reopened(scene, "recovered", lost=prompts)
