"""The exact calls of create, open and close, every sync in its place."""

from __future__ import annotations

from rangekv.format.entries import Publish, Reset
from rangekv.format.tables import Tables
from support.stores import CAPACITY_BYTES, RecordingFiles, filled_tables, make_store, open_store

PUBLISH = "create_temp .range.snapshot.tmp"
FILE_BYTES = CAPACITY_BYTES + 1024 * 1024


def squeezed(calls: list[str]) -> list[str]:
    """Calls without repeated writes to one temp: how many pieces a file has does not matter."""
    kept: list[str] = []
    for call in calls:
        line = call.rpartition(" ")[0] if call.startswith("pwrite .range") else call
        if not kept or kept[-1] != line or not line.startswith("pwrite"):
            kept.append(line)
    return kept


def test_create(tmp_path):
    files = RecordingFiles()
    make_store(tmp_path / "store", files)
    assert squeezed(files.calls) == [
        "mkdir store",
        f"open_dir {tmp_path.name}",
        f"fsync_dir {tmp_path.name}",
        f"close {tmp_path.name}",
        "open_dir store",
        "statx store",
        "statx store",
        "flock store",  # F1
        "open_dir store",
        "statx store",
        "statx store",
        "close store",
        "statx_at store range.pack",
        "listdir store",
        "unlink range.snapshot (none)",
        "unlink range.dirty (none)",
        "unlink range.journal (none)",
        "create_temp .range.pack.tmp",  # F2
        "flock .range.pack.tmp",
        f"fallocate .range.pack.tmp 0 {FILE_BYTES}",  # F3
        "statx .range.pack.tmp",  # F4
        "pwrite .range.pack.tmp",  # F5
        "fsync .range.pack.tmp",  # F6
        "rename_noreplace .range.pack.tmp range.pack",  # F7
        "fsync_dir store",  # F8
        "statx .range.pack.tmp",  # F9: C3
        "create_temp .range.snapshot.tmp",  # F9: C4
        "pwrite .range.snapshot.tmp",
        "fsync .range.snapshot.tmp",
        "close .range.snapshot.tmp",
        "rename .range.snapshot.tmp range.snapshot",
        "fsync_dir store",
        "close .range.pack.tmp",
        "close store",
    ]


def test_open(tmp_path):
    make_store(tmp_path / "store")
    files = RecordingFiles()
    store = open_store(tmp_path / "store", files)
    store.abandon()
    assert squeezed(files.calls) == [
        "open_dir store",  # O1
        "statx store",
        "open_pack range.pack write",
        "preadv range.pack 0",  # does direct I/O work here?
        "statx range.pack",
        "flock range.pack",
        "statx_at store range.pack",
        "statx range.pack",
        "preadv range.pack 0",  # O2
        "preadv range.pack 524288",
        "statx range.pack",
        "statx range.pack",  # O3
        "open_file range.dirty (none)",  # O4
        "open_file range.journal (none)",
        "open_file range.snapshot",
        "statx range.snapshot",
        "preadv range.snapshot 0",
        "preadv range.snapshot 0",
        "close range.snapshot",
        "create_temp .range.dirty.tmp",  # O5
        "pwrite .range.dirty.tmp",
        "fsync .range.dirty.tmp",
        "close .range.dirty.tmp",
        "rename .range.dirty.tmp range.dirty",
        "unlink range.journal (none)",
        "listdir store",
        "fsync_dir store",
        "fdatasync range.pack",  # O6
        "pwritev range.pack 524288",
        "fdatasync range.pack",
        "close range.pack",
        "close store",
    ]


def test_the_next_open_writes_the_other_slot(tmp_path):
    make_store(tmp_path / "store")
    offsets = []
    for _ in range(4):
        files = RecordingFiles()
        store = open_store(tmp_path / "store", files)
        store.close(store.tables)
        offsets += [call for call in files.calls if call.startswith("pwritev range.pack")]
    assert offsets == ["pwritev range.pack 524288", "pwritev range.pack 0"] * 2


def test_close(tmp_path):
    make_store(tmp_path / "store")
    files = RecordingFiles()
    store = open_store(tmp_path / "store", files)
    files.calls.clear()
    assert store.close(filled_tables(store.geometry)).state == "clean"
    assert squeezed(files.calls) == [
        "fsync range.pack",  # C2
        "statx range.pack",  # C3
        "create_temp .range.snapshot.tmp",  # C4
        "pwrite .range.snapshot.tmp",
        "fsync .range.snapshot.tmp",
        "close .range.snapshot.tmp",
        "rename .range.snapshot.tmp range.snapshot",
        "fsync_dir store",
        "unlink range.dirty",  # C5
        "fsync_dir store",
        "close range.pack",  # C6
        "close store",
    ]


def test_a_journal_of_another_version_is_gone_before_the_marker_is_durable(tmp_path):
    path = make_store(tmp_path / "store")
    (path / "range.journal").write_bytes(b"of a version that keeps one")
    files = RecordingFiles()
    open_store(path, files).abandon()
    order = [
        files.calls.index(call)
        for call in ("rename .range.dirty.tmp range.dirty", "unlink range.journal")
    ]
    synced = files.calls.index("fsync_dir store")
    written = files.calls.index("pwritev range.pack 524288")
    assert order == sorted(order)
    assert order[-1] < synced < written
    assert not (path / "range.journal").exists()


def test_open_that_keeps_a_journal(tmp_path):
    make_store(tmp_path / "store")
    files = RecordingFiles()
    store = open_store(tmp_path / "store", files, recover=True)
    calls = squeezed(files.calls)
    assert calls[calls.index("close range.snapshot") + 1 :] == [
        "fsync range.pack",  # O5a
        "fsync_dir store",
        "create_temp .range.journal.tmp",  # O5b
        "pwrite .range.journal.tmp",
        "fsync .range.journal.tmp",
        "rename .range.journal.tmp range.journal",
        "fsync_dir store",
        "create_temp .range.dirty.tmp",  # O5
        "pwrite .range.dirty.tmp",
        "fsync .range.dirty.tmp",
        "close .range.dirty.tmp",
        "rename .range.dirty.tmp range.dirty",
        "listdir store",
        "fsync_dir store",
        "fdatasync range.pack",  # O6
        "pwritev range.pack 524288",
        "fdatasync range.pack",
    ]
    files.calls.clear()
    append = ["pwrite .range.journal.tmp", "fdatasync .range.journal.tmp"]  # J3, J4
    assert store.commit([Reset()], 0)
    assert squeezed(files.calls) == append
    files.calls.clear()
    assert store.commit([Publish([], [], [], b"", b"")], 0)
    assert squeezed(files.calls) == ["fdatasync range.pack", *append]  # J2
    files.calls.clear()
    assert store.close(Tables.empty()).state == "clean"
    calls = squeezed(files.calls)
    assert calls[calls.index("unlink range.dirty") :][:3] == [
        "unlink range.dirty",  # C5
        "unlink range.journal",
        "fsync_dir store",
    ]


def test_a_cold_open_that_keeps_a_journal_first_publishes_an_empty_index(tmp_path):
    make_store(tmp_path / "store")
    open_store(tmp_path / "store").abandon()
    files = RecordingFiles()
    store = open_store(tmp_path / "store", files, recover=True)
    assert (store.open_result.reason, store.epoch) == ("dirty-marker", 2)
    calls = squeezed(files.calls)
    assert calls[calls.index("fsync range.pack") :][:8] == [
        "fsync range.pack",  # O5a: C2
        "statx range.pack",  # O5a: C3
        "create_temp .range.snapshot.tmp",  # O5a: C4
        "pwrite .range.snapshot.tmp",
        "fsync .range.snapshot.tmp",
        "close .range.snapshot.tmp",
        "rename .range.snapshot.tmp range.snapshot",
        "fsync_dir store",
    ]
    store.abandon()
    assert open_store(tmp_path / "store", recover=True).open_result.state == "recovered"
