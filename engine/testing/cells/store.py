"""Faults of the store as a whole: who else opens it, and what becomes of its files.

Owns those rows of the matrix; what every run must end with is in checks.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rangekv.engine import Engine, EngineConfig
from rangekv.engine.folder import PACK
from rangekv.engine.inspection import read_store
from rangekv.engine.testing.case import Table
from rangekv.engine.testing.faulty_files import Call, lost
from rangekv.engine.testing.scene import MODEL, NAMESPACE, PROMPT_TOKENS, Prompt, Scene
from rangekv.format.geometry import SUPERBLOCK_OFFSETS, ModelGeometry
from rangekv.format.namespace import Namespace

TABLE = Table("store")

_OPEN_AND_CLOSE = (
    "import sys; from pathlib import Path; from rangekv.engine.testing.scene import Scene\n"
    "from rangekv.format.errors import RangeError\n"
    "try: Scene(Path(sys.argv[1]), seed=0).open().close()\n"
    "except RangeError as refused: print(refused.code)\n"
)


def _one_prompt(scene: Scene) -> Prompt:
    with scene.engine() as engine:
        prompt = scene.saved(engine)
    scene.states.append("closed")
    return prompt


def _still_warm(scene: Scene, prompt: Prompt) -> None:
    """Require that what was refused has changed nothing."""
    with scene.engine() as engine:
        scene.require(engine.open_result.state == "warm", "the store is still warm")
        scene.require(scene.restore(engine, prompt) == PROMPT_TOKENS, "and serves what it held")


# -- open: somebody else ---------------------------------------------------------------------------


@TABLE.cells(
    {"open.second-opener": {"elsewhere": False}, "open.second-process": {"elsewhere": True}}
)
def second_opener(scene: Scene, elsewhere: bool) -> None:
    """A store that is open is refused to everybody else, and its owner notices nothing."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
        if elsewhere:
            done = subprocess.run(
                [sys.executable, "-c", _OPEN_AND_CLOSE, str(scene.store)],
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
            scene.evidence.append(f"refused: {done.stdout.strip()}")
            scene.require(done.stdout.strip() == "store-locked", f"refused: {done.stderr}")
        else:
            scene.refused("store-locked", lambda: scene.open().close())
        scene.states += ["open", "second open refused"]
        scene.require(scene.restore(engine, prompt) == PROMPT_TOKENS, "the owner goes on")
        report = read_store(str(scene.store))
        scene.require(report.state == "live", f"others see a live store, not {report.state}")


@TABLE.cell("open.fork-during-read")
def fork_during_read(scene: Scene) -> None:
    """A process forked during a read has no part in it: the parent gets its own bytes."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
        hold = scene.hold()
        scene.files.on_read(hold)
        restore, blocks = scene.started(engine, prompt)
        scene.reached(hold)
        child = os.fork()
        if child == 0:
            os._exit(0)
        scene.states += ["read", "forked"]
        hold.let_go()
        scene.require(all(scene.delivered(restore)), "the restore is delivered")
        scene.require_delivered(prompt, blocks)
        _, status = os.waitpid(child, 0)
        scene.require(status == 0, "the child ended on its own")
        restore.finish()


@TABLE.cell("open.child-outlives-the-parent")
def child_outlives(scene: Scene) -> None:
    """A forked child that lives on keeps the lock: the store opens when it has ended."""
    prompt = _one_prompt(scene)
    engine = scene.open()
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(theirs)
        os.read(ours, 1)
        os._exit(0)
    try:
        scene.closed(engine.close(scene.patience_s), "clean")
        scene.refused("store-locked", lambda: scene.open().close())
        scene.states += ["child holds the lock", "open refused"]
    finally:
        os.close(theirs)
        os.close(ours)
        os.waitpid(child, 0)
    _still_warm(scene, prompt)


# -- open: somebody else's store -------------------------------------------------------------------


@TABLE.cells(
    {
        "open.other-namespace": {
            "change": {"namespace": Namespace({"model": "another"})},
            "code": "other-namespace",
        },
        "open.other-layers": {
            "change": {"geometry": replace(MODEL, layer_count=5)},
            "code": "other-geometry",
        },
        "open.other-block-size": {
            "change": {"geometry": replace(MODEL, block_tokens=32)},
            "code": "other-geometry",
        },
        "open.other-rank": {"change": {"rank": 1, "world_size": 2}, "code": "other-rank"},
    }
)
def other_owner(scene: Scene, change: dict[str, Any], code: str) -> None:
    """A store of another model, layout or rank is refused by name and left as it is."""
    prompt = _one_prompt(scene)

    def open_as() -> None:
        namespace: Namespace = change.get("namespace", NAMESPACE)
        geometry: ModelGeometry = change.get("geometry", MODEL)
        config = EngineConfig(
            allow_buffered=True,
            rank=change.get("rank", 0),
            world_size=change.get("world_size", 1),
        )
        Engine.open(
            scene.store, namespace=namespace, geometry=geometry, config=config, files=scene.files
        ).close()

    scene.refused(code, open_as)
    scene.states.append("refused")
    _still_warm(scene, prompt)


# -- files: what becomes of them -------------------------------------------------------------------


def _cut(path: Path, size: int) -> None:
    os.truncate(path, path.stat().st_size - size)


@TABLE.cells(
    {
        "files.truncated-by-one": {"change": lambda pack: _cut(pack, 1), "code": "truncated-pack"},
        "files.truncated-to-half": {
            "change": lambda pack: _cut(pack, pack.stat().st_size // 2),
            "code": "truncated-pack",
        },
        "files.truncated-to-nothing": {
            "change": lambda pack: os.truncate(pack, 0),
            "code": "truncated-pack",
        },
        "files.absent": {"change": Path.unlink, "code": "no-store"},
        "files.open-to-others": {"change": lambda pack: pack.chmod(0o644), "code": "wrong-mode"},
        "files.hard-linked": {
            "change": lambda pack: os.link(pack, pack.with_name("twin")),
            "code": "hard-linked",
        },
        "files.replaced-by-a-link": {
            "change": lambda pack: (pack.rename(pack.with_name("kept")), pack.symlink_to("kept")),
            "code": "symlink",
        },
        "files.replaced-by-a-directory": {
            "change": lambda pack: (pack.unlink(), pack.mkdir()),
            "code": "not-a-regular-file",
        },
        "files.replaced-by-zeros": {
            "change": lambda pack: pack.write_bytes(bytes(pack.stat().st_size)),
            "code": "not-a-store",
        },
    }
)
def changed(scene: Scene, change: Callable[[Path], Any], code: str) -> None:
    """A pack file that cannot be a store is refused by name: never opened, never repaired."""
    _one_prompt(scene)
    change(scene.store / PACK)
    names = sorted(os.listdir(scene.store))
    scene.refused(code, lambda: scene.open().close())
    scene.states.append("refused")
    scene.require(sorted(os.listdir(scene.store)) == names, "nothing was made or removed")


@TABLE.cell("files.grown")
def grown(scene: Scene) -> None:
    """A pack file that became longer is not the file that was closed: cold, and usable."""
    prompt = _one_prompt(scene)
    with open(scene.store / PACK, "ab") as pack:
        pack.write(bytes(4096))
    scene.reopened("size-mismatch")
    with scene.engine() as engine:
        scene.require(scene.hit(engine, prompt) == 0, "nothing old is served")
        scene.saved(engine)


@TABLE.cell("files.truncated-while-open")
def truncated_while_open(scene: Scene) -> None:
    """A file that is cut under an open store gives misses, and no byte that is not KV."""
    engine = scene.open()
    prompt = scene.saved(engine)
    os.truncate(scene.store / PACK, 1 << 20)
    restore, blocks = scene.started(engine, prompt)
    scene.states += ["open", "truncated"]
    scene.require(not any(scene.delivered(restore)), "no layer is delivered")
    scene.require_failed(restore, blocks)
    scene.require_untouched(blocks)
    restore.finish()
    engine.close(scene.patience_s)
    scene.refused("truncated-pack", lambda: scene.open().close())


@TABLE.cell("files.replaced-while-open")
def replaced_while_open(scene: Scene) -> None:
    """A file put in the open one's place is not served, now or after the close."""
    engine = scene.open()
    prompt = scene.saved(engine)
    pack = scene.store / PACK
    shutil.copy(pack, scene.store / "other")
    pack.unlink()
    (scene.store / "other").rename(pack)
    pack.chmod(0o600)
    scene.require(scene.restore(engine, prompt) == PROMPT_TOKENS, "the open file is served")
    engine.close(scene.patience_s)
    report = read_store(str(scene.store))
    scene.states += ["open", "replaced", f"cold ({report.reason})"]
    scene.require(report.state == "cold", "the other file is not believed")
    with scene.engine() as engine:
        scene.require(scene.hit(engine, prompt) == 0, "nothing old is served")


@TABLE.cells(
    {
        "files.superblock-torn-older": {"torn": ("older",)},
        "files.superblock-torn-newer": {"torn": ("newer",)},
        "files.superblock-torn-both": {"torn": ("older", "newer")},
    }
)
def torn_superblock(scene: Scene, torn: tuple[str, ...]) -> None:
    """One torn superblock costs nothing, or the index if it was the newer; two are refused."""
    prompt = _one_prompt(scene)
    slots = read_store(str(scene.store)).slots
    sequences = [slot.superblock.sequence if slot.superblock else -1 for slot in slots]
    newer = sequences.index(max(sequences))
    for which in torn:
        copy_index = newer if which == "newer" else 1 - newer
        scene.rot(SUPERBLOCK_OFFSETS[copy_index] + 100)
    if len(torn) == 2:
        scene.states.append("refused")
        scene.refused("not-a-store", lambda: scene.open().close())
        return
    scene.reopened("epoch-mismatch" if torn == ("newer",) else None)
    with scene.engine() as engine:
        expected = 0 if torn == ("newer",) else PROMPT_TOKENS
        scene.require(scene.restore(engine, prompt) == expected, f"{expected} tokens are served")
        scene.saved(engine)


@TABLE.cell("files.write-that-was-lost")
def lost_write(scene: Scene) -> None:
    """A write that the disk confirmed and lost is a miss: its checksum tells."""
    engine = scene.open()
    prompt = scene.prompt()
    scene.files.on_write(lost, skip=2)
    scene.require(scene.save(engine, prompt), "the engine believes its disk")
    restore, blocks = scene.started_unread(engine, prompt)
    ready = scene.delivered(restore)
    scene.states += ["visible", "checksum mismatch", "retired"]
    scene.require(ready.count(False) == 1, f"the lost layer fails: {ready}")
    scene.require_failed(restore, blocks)
    restore.finish()
    scene.require(scene.hit(engine, prompt) == 0, "the record is retired")
    scene.closed(engine.close(scene.patience_s), "clean")
    scene.check_closed()


@TABLE.cell("files.write-that-went-elsewhere")
def misdirected_write(scene: Scene) -> None:
    """A write that landed in another record's bytes is found in both: misses, never wrong bytes."""
    engine = scene.open()
    victim = scene.saved(engine)
    (extent,) = engine._catalog.residents
    prompt = scene.prompt()

    def elsewhere(call: Call) -> Any:
        return call.go_at(extent.offset + extent.width)

    scene.files.on_write(elsewhere)
    scene.require(scene.save(engine, prompt), "the engine believes its disk")
    for each in (victim, prompt):
        restore, blocks = scene.started_unread(engine, each)
        scene.require(scene.delivered(restore).count(False) == 1, "a layer fails")
        scene.require_failed(restore, blocks)
        restore.finish()
        scene.give(blocks)
        scene.require(scene.hit(engine, each) == 0, "the record is retired")
    scene.states += ["visible", "two checksum mismatches", "both retired"]
    scene.closed(engine.close(scene.patience_s), "clean")
    scene.check_closed()
