"""Faults of the dirty marker, absent (an open makes it) and present (a close ends it).

Owns those rows of the matrix; every crash point of the same protocol is the crash explorer's.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys

from rangekv.engine.folder import MARKER
from rangekv.engine.testing.case import Table
from rangekv.engine.testing.faulty_files import WRITES, Act, error, short, torn
from rangekv.engine.testing.scene import PROMPT_TOKENS, Prompt, Scene
from rangekv.engine.testing.victim import DEATH
from rangekv.format.errors import ExitCode
from rangekv.format.geometry import DATA_OFFSET

TABLE = Table("marker")

_TEMP = ".range.dirty.tmp"


def _one_prompt(scene: Scene) -> Prompt:
    """Leave a closed, warm store with one prompt in it."""
    with scene.engine() as engine:
        return scene.saved(engine)


def _serves(scene: Scene, prompt: Prompt, reason: str | None) -> None:
    """Open the store and require its state, what it serves and that it works."""
    with scene.engine() as engine:
        opened = engine.open_result
        scene.states.append("warm" if opened.reason is None else f"cold ({opened.reason})")
        scene.require(opened.reason == reason, f"the open is {reason or 'warm'}: {opened}")
        expected = PROMPT_TOKENS if reason is None else 0
        scene.require(scene.restore(engine, prompt) == expected, f"{expected} tokens are served")
        scene.saved(engine)


# -- absent ----------------------------------------------------------------------------------------


def _creation(name: str, number: int, code: str) -> dict[str, dict[str, object]]:
    return {
        f"absent.create-{name}": {
            "call": f"create_temp {_TEMP}",
            "act": error(number),
            "code": code,
            "reason": None,
        }
    }


@TABLE.cells(
    {
        **_creation("enospc", errno.ENOSPC, "no-space"),
        **_creation("edquot", errno.EDQUOT, "no-space"),
        **_creation("erofs", errno.EROFS, "read-only"),
        **_creation("eacces", errno.EACCES, "permission"),
        **_creation("eexist", errno.EEXIST, "io-error"),
        **_creation("emfile", errno.EMFILE, "open-file-limit"),
        "absent.write-enospc": {
            "call": f"pwrite {_TEMP}",
            "act": error(errno.ENOSPC),
            "code": "no-space",
            "reason": None,
        },
        "absent.write-torn": {
            "call": f"pwrite {_TEMP}",
            "act": torn(errno.EIO),
            "code": "io-error",
            "reason": None,
        },
        "absent.fsync-eio": {
            "call": f"fsync {_TEMP}",
            "act": error(errno.EIO),
            "code": "io-error",
            "reason": None,
        },
        "absent.rename-eio": {
            "call": f"rename {MARKER}",
            "act": error(errno.EIO),
            "code": "io-error",
            "reason": None,
        },
        "absent.directory-fsync-eio": {
            "call": "fsync_dir store",
            "act": error(errno.EIO),
            "code": "io-error",
            "reason": "dirty-marker",
        },
        "absent.slot-fdatasync-eio": {
            "call": "fdatasync range.pack",
            "act": error(errno.EIO),
            "code": "io-error",
            "reason": "dirty-marker",
        },
        "absent.slot-write-torn": {
            "call": "pwritev range.pack",
            "act": torn(errno.EIO),
            "code": "io-error",
            "reason": "dirty-marker",
        },
    }
)
def open_fails(scene: Scene, call: str, act: Act, code: str, reason: str | None) -> None:
    """An open that cannot make its marker durable is refused by name; no payload is written."""
    prompt = _one_prompt(scene)
    scene.files.arm(call, act)
    scene.files.calls.clear()
    scene.refused(code, lambda: scene.open().close())
    scene.states += ["absent", "open refused"]
    writes = [
        line
        for line in scene.files.calls
        if line.startswith(WRITES) and int(line.split()[2].partition("+")[0]) >= DATA_OFFSET
    ]
    scene.require(not writes, f"no payload was written: {writes}")
    scene.require(not list(scene.store.glob(".range.*")), "no temp is left behind")
    scene.reopened(reason)
    _serves(scene, prompt, reason)


@TABLE.cell("absent.write-short")
def short_write(scene: Scene) -> None:
    """A marker that is written in pieces is whole in the end."""
    prompt = _one_prompt(scene)
    scene.files.arm(f"pwrite {_TEMP}", short(lambda asked: asked // 2), times=3)
    _serves(scene, prompt, None)
    scene.states.append("closed clean")


@TABLE.cell("absent.first-payload-write")
def first_payload_write(scene: Scene) -> None:
    """No byte of KV is written before marker, directory and superblock are durable."""
    scene.files.calls.clear()
    with scene.engine() as engine:
        scene.saved(engine)
    order = [line.removesuffix(" (fault)") for line in scene.files.calls]
    first = next(
        n
        for n, line in enumerate(order)
        if line.startswith("pwritev") and int(line.split()[2].partition("+")[0]) >= DATA_OFFSET
    )
    steps = [
        f"fsync {_TEMP}",
        f"rename {MARKER}",
        "fsync_dir store",
        "fdatasync range.pack",
        "pwritev range.pack",
        "fdatasync range.pack",
    ]
    at = 0
    for step in steps:
        at = next((n for n in range(at, first) if order[n].startswith(step)), first) + 1
    scene.states += [step.partition(" ")[0] for step in steps]
    scene.require(at <= first, "every step of the open came before it")


# -- present ---------------------------------------------------------------------------------------


@TABLE.cells(
    {
        "present.unlink-eio": {"call": f"unlink {MARKER}", "reason": "dirty-marker"},
        "present.directory-fsync-eio": {"call": "fsync_dir store", "reason": None},
    }
)
def close_fails(scene: Scene, call: str, reason: str | None) -> None:
    """A close that cannot remove its marker says so; a reopen believes what is on the disk."""
    engine = scene.open()
    prompt = scene.saved(engine)
    # The snapshot's own directory sync comes first.
    scene.files.arm(call, error(errno.EIO), skip=1 if call.startswith("fsync_dir") else 0)
    result = engine.close(scene.patience_s)
    scene.states.append("present")
    scene.closed(result, "dirty")
    scene.require(result.exit_code is ExitCode.ENVIRONMENT, "the close names the reason")
    _serves(scene, prompt, reason)


@TABLE.cell("present.process-killed")
def process_killed(scene: Scene) -> None:
    """A store whose process died opens cold, with the reason, and serves nothing old."""
    prompt = _one_prompt(scene)
    done = subprocess.run(
        [sys.executable, "-m", "rangekv.engine.testing.victim", str(scene.store)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    scene.require(
        done.returncode == DEATH, f"the process published and died ({done.stderr.strip()})"
    )
    scene.states += ["visible", "process died"]
    _serves(scene, prompt, "dirty-marker")


@TABLE.cell("present.deleted-by-hand-while-open")
def deleted_while_open(scene: Scene) -> None:
    """A marker that somebody removes while the store is open does not keep it from closing."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
        (scene.store / MARKER).unlink()
        scene.states += ["present", "deleted"]
    _serves(scene, prompt, None)


@TABLE.cell("present.deleted-by-hand-after-death")
def deleted_after_death(scene: Scene) -> None:
    """Without its marker a store that did not close is cold all the same: the epoch tells."""
    prompt = _one_prompt(scene)
    subprocess.run(
        [sys.executable, "-m", "rangekv.engine.testing.victim", str(scene.store)],
        capture_output=True,
        check=False,
        timeout=60,
    )
    (scene.store / MARKER).unlink()
    scene.states += ["process died", "deleted"]
    _serves(scene, prompt, "epoch-mismatch")


@TABLE.cells(
    {
        "present.stray": {"make": lambda path: path.write_bytes(b"left by somebody")},
        "present.empty": {"make": lambda path: path.write_bytes(b"")},
        "present.symlink": {"make": lambda path: path.symlink_to("/nonexistent")},
        "present.fifo": {"make": os.mkfifo},
    }
)
def stray(scene: Scene, make: object) -> None:
    """Whatever has the marker's name is a marker: the store is cold, and works again."""
    prompt = _one_prompt(scene)
    make(scene.store / MARKER)  # type: ignore[operator]
    scene.states.append("present")
    _serves(scene, prompt, "dirty-marker")
    scene.require(not os.path.lexists(scene.store / MARKER), "the close removed it")


@TABLE.cell("present.directory")
def directory(scene: Scene) -> None:
    """A directory in the marker's place is refused by name and nothing is changed."""
    prompt = _one_prompt(scene)
    (scene.store / MARKER).mkdir()
    scene.states.append("present")
    scene.refused("not-a-regular-file", lambda: scene.open().close())
    (scene.store / MARKER).rmdir()
    _serves(scene, prompt, None)
