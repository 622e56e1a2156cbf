"""What a real engine commits is what both readers find, and what the engine shows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
from rangekv.engine import EngineConfig
from rangekv.engine.index import image
from rangekv.format import snapshot
from rangekv.format.envelope import HEAD_BYTES_MAX, SnapshotHeader
from rangekv.format.marker import Marker
from rangekv.format.superblock import Superblock
from rangekv.format.tables import TableLimits
from support.effort import effort
from support.recovered import named, recovered
from support.rig import MIB, SMALL, Rig, save_some_turn, tokens_of
from vectors import decoder

# Commits happen when this test asks for them, or when space is to be written again.
CONFIG = EngineConfig(read_workers=4, lock_wait_s=0.5, commit_interval_s=3600)


def both(rig: Rig, seen: Counter[str]) -> tuple[dict, int]:
    """Return the state that the files of a running store lead to, and its commits so far."""
    data = {name: (rig.path / f"range.{name}").read_bytes() for name in FILES}
    with (rig.path / "range.pack").open("rb") as file:
        pages = [file.read(4096), (file.seek(524288), file.read(4096))[1]]

    copies = [decoder.decode_superblock(page, copy) for copy, page in enumerate(pages)]
    chosen = max(copies, key=lambda one: one["sequence"])
    below = decoder.decode_snapshot(data["snapshot"], chosen)
    marker = decoder.decode_marker(data["dirty"])
    theirs = decoder.recover(data["journal"], marker, below, chosen)

    store = Superblock.decode(pages[chosen["copy_index"]], chosen["copy_index"])
    limits = TableLimits.of(store.geometry)
    size = len(data["snapshot"])
    header = SnapshotHeader.decode(data["snapshot"][:HEAD_BYTES_MAX], size, limits)
    tables = snapshot.decode(data["snapshot"], header, store.geometry)
    read, tables = recovered(
        data["journal"], Marker.decode(data["dirty"]), tables, header.envelope, store
    )
    for frame in read.frames:
        said = frame.entries(limits)
        seen.update(type(entry).__name__ for entry in said)
    mine = named(tables, store.geometry)
    assert {key: theirs[key] for key in mine} == mine
    assert theirs["torn_bytes"] == read.torn_bytes == 0
    return mine, len(read.frames)


FILES = ("snapshot", "journal", "dirty")


def visible(rig: Rig) -> dict[int, dict]:
    """Return the records that the engine shows."""
    return named(image.dump(rig.engine._catalog), rig.engine.geometry)["records"]


def live(path: Path, seed: int, seen: Counter[str]) -> None:
    """Saves, branches, growth, eviction, partial publication, tenants, retirement, reset."""
    rig = Rig(path, model=SMALL, capacity=8 * MIB, config=CONFIG)
    random = np.random.default_rng(seed)
    size = SMALL.block_tokens
    prompts = [tokens_of(seed, 4 * size)]
    # A turn that grew in place is retired for good, the one before it stays in their extent.
    turns = tokens_of(seed, 8 * size)
    for end in (4, 8):
        assert rig.save(turns[: end * size])
        assert rig.engine.commit(30)
    shown = visible(rig)
    rig.engine.retire(turns, start_token=4 * size)
    forgotten = shown.keys() - visible(rig).keys()
    assert len({record["generation"] for record in shown.values()}) == len(forgotten) == 1
    commits = 0
    for turn in range(40):
        prompts.append(save_some_turn(rig, random, seed, turn, prompts))
        before = visible(rig)
        if turn % 6 == 5:
            rig.engine.retire(prompts[random.integers(len(prompts))])
        if turn == 25:
            rig.engine.reset()
        forgotten |= before.keys() - visible(rig).keys()
        if turn % 3:
            continue
        assert rig.engine.commit(30)
        state, frames = both(rig, seen)
        for name, record in visible(rig).items():
            there = state["records"][name]
            assert there | {"access_rank": 0} == record | {"access_rank": 0}
        # What only made way need not be said: a reader may find more, but nothing forgotten.
        assert not forgotten & state["records"].keys()
        assert frames > commits
        commits = frames
    assert rig.engine.close(30).state == "clean"


def test_the_journal_of_a_real_engine_passes_both_readers(tmp_path, figure):
    seen: Counter[str] = Counter()
    for seed in range(effort(3, 30)):
        live(tmp_path / str(seed), seed, seen)
    assert {"Publish", "Retire", "RetireRecord", "Reset"} <= seen.keys()
    figure("entries of engines read back", f"{seen.total():,}, two readers agree")
