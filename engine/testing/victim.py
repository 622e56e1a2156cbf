"""A process that works on a store until it is killed, and says aloud what it has done.

Owns nothing but its lines; kill.py starts it, because only a dead process is a dead process.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from rangekv.engine import Engine
from rangekv.engine.folder import JOURNAL, MARKER, SNAPSHOT
from rangekv.engine.index.directory import Record, RecordState
from rangekv.engine.store import Store
from rangekv.engine.testing.faulty_files import WRITES, Call
from rangekv.engine.testing.scene import MODEL, Prompt, Scene

DEATH = 9
"""Exit status that tells the intended end from any other."""

COMMIT_INTERVAL_S = 0.1

Step = tuple[str | Callable[[Call], bool], int]
"""A call of the file seam, and how many of its kind go before."""


def _slot(call: Call) -> bool:
    return call.name in WRITES and not call.is_payload


_MARKER: dict[str, Step] = {
    "O5.create": ("create_temp .range.dirty.tmp", 0),
    "O5.write": ("pwrite .range.dirty.tmp", 0),
    "O5.fsync": ("fsync .range.dirty.tmp", 0),
    "O5.rename": (f"rename {MARKER}", 0),
    "O6.sync-before": ("fdatasync range.pack", 0),
    "O6.slot": (_slot, 0),
    "O6.sync-after": ("fdatasync range.pack", 1),
}
# Steps behind the open are counted from its end on.
_SERVING: dict[str, Step] = {
    "save.write-1": ("pwritev range.pack", 0),
    "save.write-2": ("pwritev range.pack", 1),
    "save.write-9": ("pwritev range.pack", 8),
    "save.write-40": ("pwritev range.pack", 39),
    "C2.fsync": ("fsync range.pack", 0),
    "C4.create": ("create_temp .range.snapshot.tmp", 0),
    "C4.write": ("pwrite .range.snapshot.tmp", 0),
    "C4.write-later": ("pwrite .range.snapshot.tmp", 4),
    "C4.fsync": ("fsync .range.snapshot.tmp", 0),
    "C4.rename": (f"rename {SNAPSHOT}", 0),
    "C4.fsync-directory": ("fsync_dir store", 0),
    "C5.unlink": (f"unlink {MARKER}", 0),
    "C5.fsync-directory": ("fsync_dir store", 1),
}
_JOURNAL: dict[str, Step] = {
    "O5a.fsync": ("fsync range.pack", 0),
    "O5a.create": ("create_temp .range.snapshot.tmp", 0),
    "O5a.rename": (f"rename {SNAPSHOT}", 0),
    "O5a.fsync-directory": ("fsync_dir store", 0),
    "O5b.create": ("create_temp .range.journal.tmp", 0),
    "O5b.write": ("pwrite .range.journal.tmp", 0),
    "O5b.fsync": ("fsync .range.journal.tmp", 0),
    "O5b.rename": (f"rename {JOURNAL}", 0),
    "O5b.fsync-directory": ("fsync_dir store", 1),
    "O5.fsync-directory": ("fsync_dir store", 2),
    "J2.sync": ("fdatasync range.pack", 0),
    "J2.sync-later": ("fdatasync range.pack", 4),
    "J3.append": ("pwrite .range.journal.tmp", 0),
    "J3.append-later": ("pwrite .range.journal.tmp", 4),
    "J4.fdatasync": ("fdatasync .range.journal.tmp", 0),
    "J4.fdatasync-later": ("fdatasync .range.journal.tmp", 4),
    # Behind the first commit, which asks for a checkpoint at once.
    "K2.fsync": ("fsync range.pack", 0),
    "K3.create": ("create_temp .range.snapshot.tmp", 0),
    "K3.rename": (f"rename {SNAPSHOT}", 0),
    "K3.fsync-directory": ("fsync_dir store", 0),
    "K4.create": ("create_temp .range.journal.tmp", 0),
    "K4.write": ("pwrite .range.journal.tmp", 1),
    "K4.fsync": ("fsync .range.journal.tmp", 0),
    "K4.rename": (f"rename {JOURNAL}", 0),
    "K4.fsync-directory": ("fsync_dir store", 1),
    "K5.sync-before": ("fdatasync range.pack", 1),
    "K5.slot": (_slot, 0),
    "K5.sync-after": ("fdatasync range.pack", 2),
    "C5.unlink-journal": (f"unlink {JOURNAL}", 0),
}
POINTS: dict[str, dict[str, Step]] = {
    "journal": {**_MARKER, **_SERVING, **_JOURNAL},
    "discard": {**_MARKER, **_SERVING, "O5.fsync-directory": ("fsync_dir store", 0)},
}
"""Where a process can be told to die, by the recovery of its session."""

FORGOTTEN = "forgotten"
"""Another such place: something has just been forgotten for good."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What a process is to do. It answers for the prompts in `asked` before it saves any."""

    store: str
    seed: int
    first: int
    steps: int
    recovery: str
    asked: list[int]
    point: str = ""
    after: bool = False

    def line(self) -> str:
        """Return the orders as one argument."""
        return json.dumps(asdict(self))


@lru_cache(1024)
def prompt(number: int) -> Prompt:
    """Return the prompt of a number: two in three go on from an earlier one."""
    chance = random.Random(number)
    count = MODEL.block_tokens * chance.choice([1, 2, 5, 16, 40])
    drawn = [chance.randrange(1, 2**17) for _ in range(count)]
    fresh = np.array(drawn, dtype=np.uint32)
    if number % 3 == 0:
        return fresh
    before = prompt(number - 1 - number % 2)
    same = len(before) if number % 2 else len(before) // 2
    joined: Prompt = np.concatenate([before[:same], fresh])
    return joined[: 64 * MODEL.block_tokens]


def name_of(prefix: bytes) -> str:
    """Return the name of a prefix, packed uint32."""
    return xxhash.xxh3_64_hexdigest(prefix)


def main(orders: Orders) -> None:
    """Open, restore what is asked for, save and restore in turns, close; die at a point."""
    scene = Scene(Path(orders.store), orders.seed)
    opening = orders.point.startswith("O")
    if opening:
        _arm(scene, orders)
    _say("opening")
    engine = scene.open(recovery=orders.recovery, commit_interval_s=COMMIT_INTERVAL_S)
    opened = engine.open_result
    _say(f"opened {opened.state} {opened.reason} {engine.stats().tokens}")
    _tell_changes(engine)
    _tell_commits(engine.store)
    for number in orders.asked:
        _say(f"hit {number} {scene.restore(engine, prompt(number))}")
    if not opening:
        if orders.point.startswith("K") or scene.random.random() < 0.2:
            engine._commits.checkpoint_bytes = 1
        _arm(scene, orders)
    for number in range(orders.first, orders.first + orders.steps):
        _say(f"saving {number}")
        _save(scene, engine, prompt(number))
        scene.restore(engine, prompt(_recent(scene, number)))
        if orders.recovery == "journal":
            _forget_perhaps(scene, engine, number, orders)
            _rest_perhaps(scene)
    scene.until(engine, lambda: not engine._saves.active, "all saves end")
    _say(f"closing {engine.stats().tokens}")
    closed = engine.close(scene.patience_s)
    _say(f"closed {closed.state}")


def _recent(scene: Scene, number: int) -> int:
    return max(0, number - scene.random.randrange(12))


def _save(scene: Scene, engine: Engine, tokens: Prompt) -> None:
    scene.oracle.note_saved(tokens)
    save = engine.save(scene.key(), tokens)
    if save is None:
        return
    blocks = scene.take(scene.blocks_of(tokens))
    scene.produce(tokens, blocks)
    scene.announce(save, blocks)
    save.extracted(scene.patience_s)
    scene.give(blocks)
    save.finish()
    if scene.random.random() < 0.7:
        save.wait(scene.patience_s)


def _forget_perhaps(scene: Scene, engine: Engine, number: int, orders: Orders) -> None:
    """Now and then forget a prompt or everything, and say when nothing can bring it back."""
    chance = scene.random.random()
    # Every third process begins with an empty store: no save wants a commit for its space then.
    all_of_it = chance < (0.3 if number == orders.first else 0.01)
    dying = orders.point == FORGOTTEN and number == orders.first + orders.steps // 2
    if not (all_of_it or dying or chance > 0.96):
        return
    _say("forgetting")
    if all_of_it or (dying and chance < 0.5):
        engine.reset()
    else:
        engine.retire(prompt(_recent(scene, number)))
        if not engine.commit(scene.patience_s):
            return
    _say("forgotten")
    if dying:
        _die()


def _rest_perhaps(scene: Scene) -> None:
    """Now and then do nothing for some intervals: nobody but the clock asks for a commit then."""
    if scene.random.random() < 0.15:
        time.sleep(COMMIT_INTERVAL_S * scene.random.uniform(2.5, 4))


def _tell_commits(store: Store) -> None:
    """Say when a commit or a checkpoint begins and ends: on a slow disk it outlasts an interval."""

    def timed(step: Callable[..., bool]) -> Callable[..., bool]:
        def told(*arguments: Any, **options: Any) -> bool:
            _say(f"committing {time.monotonic_ns()}")
            done = step(*arguments, **options)
            _say(f"committed {time.monotonic_ns()}")
            return done

        return told

    store.commit = timed(store.commit)  # type: ignore[method-assign]
    store.checkpoint = timed(store.checkpoint)  # type: ignore[method-assign]


def _tell_changes(engine: Engine) -> None:
    """Say what becomes visible and what is no longer, under the lock: before a commit can."""
    catalog = engine._catalog
    show, forget = catalog.show, catalog._forget

    def name(record: Record) -> str:
        return f"{name_of(catalog.prefix_of(record))} {record.token_count}"

    def shown(record: Record) -> None:
        show(record)
        _say(f"published {time.monotonic_ns()} {name(record)}")

    def gone(record: Record) -> None:
        if record.state is RecordState.VISIBLE:
            _say(f"gone {name(record)}")
        forget(record)

    with engine._events.lock:
        catalog.show = shown  # type: ignore[method-assign]
        catalog._forget = gone  # type: ignore[method-assign]


def _arm(scene: Scene, orders: Orders) -> None:
    if orders.point in POINTS[orders.recovery]:
        operation, skip = POINTS[orders.recovery][orders.point]
        scene.files.arm(operation, _dying(orders.after), skip=skip)


def _dying(after: bool) -> Any:
    def die(call: Call) -> None:
        if after:
            call.go()
        _die()

    return die


def _die() -> None:
    _say(f"dying {time.monotonic_ns()}")
    os.kill(os.getpid(), signal.SIGKILL)


def _say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # at once and whole, whatever thread says it


def die_published(store: str) -> None:
    """Publish a prompt in `store`, then die before the close."""
    scene = Scene(Path(store), seed=1 << 40)  # prompts that no case has
    engine = scene.open()
    if scene.save(engine, scene.prompt()):
        os._exit(DEATH)


if __name__ == "__main__":
    if sys.argv[1].startswith("{"):
        main(Orders(**json.loads(sys.argv[1])))
    else:
        die_published(sys.argv[1])
