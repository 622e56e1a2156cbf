"""A whole engine on this GPU: bytes equal to the host's, damage found, ownership under faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rangekv.engine import EngineConfig
from rangekv.engine.files import OS_FILES
from rangekv.engine.payload import requirements
from support.rig import POISON, Rig

TOKENS = np.arange(1, 2049, dtype=np.uint32)


def gds_is_missing() -> list[str]:
    return list(requirements.missing("gds", direct=True, files=OS_FILES))


PATHS = [
    "compat",
    pytest.param(
        "gds", marks=pytest.mark.skipif(bool(gds_is_missing()), reason=f"{gds_is_missing()}")
    ),
]


def settings(path: str) -> EngineConfig:
    return EngineConfig(
        read_workers=4, lock_wait_s=0.5, device="cuda", payload=path, read_banks=4, save_banks=4
    )


# A process has one KvikIO, of one mode: each of these tests is a process of its own.
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("scene", ["round_trip", "damage"])
def test_a_scene_holds(tmp_path: Path, path: str, scene: str) -> None:
    if path == "gds" and os.environ.get("PAYLOAD_PATH") == "compat":
        pytest.skip("PAYLOAD_PATH asks for compat")
    tests, inherited = str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")
    played = subprocess.run(
        [sys.executable, __file__, scene, path, str(tmp_path / "store")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [tests, inherited]))},
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert played.returncode == 0, played.stdout + played.stderr
    print(played.stdout)


def round_trip(path: str, store: Path) -> None:
    """What the GPU saved the host restores, and the other way round."""
    first = Rig(store, device="cuda", config=settings(path))
    assert first.save(TOKENS)
    assert first.restore(TOKENS) == len(TOKENS)
    print("path:", first.engine.stats().path)
    if path == "gds":
        assert "gds" in first.engine.stats().path
    first.engine.close(30)
    host = Rig(store, new=False)
    assert host.restore(TOKENS) == len(TOKENS)
    more = TOKENS[::-1].copy()
    assert host.save(more, piece=48)
    host.engine.close(30)
    last = Rig(store, new=False, device="cuda", config=settings(path))
    assert last.restore(more) == last.restore(TOKENS) == len(TOKENS)
    assert last.engine.close(30).state == "clean"


def damage(path: str, store: Path) -> None:
    """A poisoned bank is never delivered."""
    rig = Rig(store, device="cuda", config=settings(path))
    assert rig.save(TOKENS)
    rig.close_damaged()
    again = Rig(store, new=False, device="cuda", config=settings(path))
    ticket = again.engine.lookup(again.key(), TOKENS)
    assert ticket.token_count == len(TOKENS), ticket.reason
    ids = again.take(len(TOKENS) // again.model.block_tokens)
    restore = again.engine.claim(ticket, TOKENS, ids)
    assert not restore.wait_layer(0, 60)
    restore.finish()
    first_page = ids[: again.engine.geometry.page_tokens // again.model.block_tokens]
    for layer in again.layers:
        assert (layer[first_page] == POISON).all(), "damaged bytes were delivered"
    assert again.engine.stats().counters["checksum_failures"] > 0
    again.engine.close(30)


def test_every_cell_holds_on_this_gpu(tmp_path: Path) -> None:
    played = subprocess.run(
        [
            *(sys.executable, "-m", "rangectl", "replay-fault", "run", "--device", "cuda"),
            *("--dir", str(tmp_path), "--json"),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    lines = [json.loads(line) for line in played.stdout.splitlines()]
    assert [line["violation"] for line in lines[:-1] if line["verdict"] == "violated"] == []
    assert played.returncode == 0, played.stderr
    print(lines[-1])


if __name__ == "__main__":
    {"round_trip": round_trip, "damage": damage}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
