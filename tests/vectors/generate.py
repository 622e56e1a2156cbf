"""Derives every file of tests/vectors from the inputs that SPEC.md names.

    python tests/vectors/generate.py

writes them, with vectors.json; the tests only compare. Good files come from the tables of section
16, hostile ones from a good one and the edits below; for journals see journals.py.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from rangekv.format import snapshot  # noqa: E402
from rangekv.format.envelope import HEADER, SECTION, Envelope  # noqa: E402
from rangekv.format.geometry import DATA_OFFSET, Geometry, ModelGeometry  # noqa: E402
from rangekv.format.identity import FileIdentity  # noqa: E402
from rangekv.format.marker import MARKER, Marker  # noqa: E402
from rangekv.format.namespace import Namespace  # noqa: E402
from rangekv.format.records import (  # noqa: E402
    EXTENT,
    NO_CHECKSUM,
    NO_PARENT,
    NO_SALT,
    RECORD,
    Extent,
    Record,
)
from rangekv.format.superblock import SUPERBLOCK, Superblock  # noqa: E402
from rangekv.format.tables import Tables  # noqa: E402
from support.hostile import (  # noqa: E402
    put,
    sealed_marker,
    sealed_snapshot,
    sealed_superblock,
    sections,
)

from vectors import journals  # noqa: E402
from vectors.examples import Row, example, inputs, root, span  # noqa: E402


def superblock(given: Row) -> Superblock:
    def number(name: str) -> int:
        return int(given[name])

    capacity = number("capacity")
    model = ModelGeometry(number("layer_count"), number("token_bytes"), number("block_tokens"))
    identity = FileIdentity(
        file_bytes=DATA_OFFSET + capacity,
        **{
            name: number(name)
            for name in ("inode", "btime_sec", "btime_nsec", "inode_generation", "identity_flags")
        },
    )
    blank = given["namespace"] == "none"
    return Superblock(
        store_uuid=bytes.fromhex(given["store_uuid"]),
        identity=identity,
        geometry=None if blank else Geometry.derive(model, capacity),
        namespace=None if blank else Namespace(json.loads(given["namespace"])),
        **{
            name: number(name)
            for name in ("sequence", "epoch", "created_unix_ns", "fs_magic", "rank", "world_size")
        },
    )


def tables_of(name: str) -> Tables:
    (given, extents, records), _ = example(name)
    tokens, checksums, entries = array("I"), array("Q"), []
    for row in records:
        pages = span(row["checksums"])
        entries.append(
            Record(
                token_index=len(tokens),
                checksum_index=len(checksums) if pages else NO_CHECKSUM,
                parent=NO_PARENT if row["parent"] == "none" else int(row["parent"]),
                **{
                    field: int(row[field])
                    for field in Record._fields
                    if field in row and field != "parent"
                },
            )
        )
        tokens.extend(span(row["token ids"]))
        checksums.extend(pages)
    named = {row["input"]: row["value"] for row in given}
    return Tables(
        extents=[Extent(*(int(row[field]) for field in Extent._fields)) for row in extents],
        records=entries,
        tokens=tokens.tobytes(),
        checksums=checksums.tobytes(),
        roots=[NO_SALT, root(named["root 1"])],
        generation_max=int(named["generation_max"]),
    )


def envelope_of(store: Superblock) -> Envelope:
    given = inputs("snapshot-four-records.bin")
    return Envelope(
        store_uuid=store.store_uuid,
        epoch=store.epoch,
        identity=store.identity,
        pack_mtime_ns=int(given["pack_mtime_sec"]) * 10**9 + int(given["pack_mtime_nsec"]),
        geometry_digest=store.geometry_digest(),
        published_unix_ns=int(given["published_unix_ns"]),
    )


def good_files() -> dict[str, bytes]:
    """Return the files of section 16."""
    bound_inputs = inputs("superblock-bound.bin")
    bound = superblock(bound_inputs)
    blank = superblock(bound_inputs | inputs("superblock-blank.bin"))
    tables = tables_of("snapshot-four-records.bin")
    envelope = envelope_of(bound)
    marker = inputs("marker.bin")
    return {
        "superblock-bound.bin": bound.encode(0),
        "superblock-blank.bin": blank.encode(1),
        "snapshot-four-records.bin": b"".join(snapshot.encode(tables, envelope)),
        "snapshot-empty.bin": b"".join(
            snapshot.encode(Tables.empty(tables.generation_max), envelope)
        ),
        "marker.bin": Marker(
            bytes.fromhex(marker["store_uuid"]),
            *(int(marker[name]) for name in ("epoch", "unix_ns", "pid")),
            bytes.fromhex(marker["boot_id"]),
        ).encode(),
    }


def hostile_superblocks(bound: bytes, blank: bytes) -> dict[str, tuple[bytes, str]]:
    def edited(page: bytes, **values: int | bytes) -> bytes:
        for name, value in values.items():
            page = put(page, SUPERBLOCK, 0, name, value)
        return sealed_superblock(page)

    bad = "bad-superblock"
    unsorted = bytes.fromhex("82a16201a16102")
    return {
        "bad-checksum": (put(bound, SUPERBLOCK, 0, "epoch", 4), bad),
        "short": (bound[:4095], bad),
        "magic": (edited(bound, magic=b"\x89RANGEPK\n\r\x1a\n"), bad),
        "other-copy": (edited(bound, copy_index=1), bad),
        "major-2": (edited(bound, version_major=2), "unsupported-version"),
        "incompat": (edited(bound, feature_incompat=1 << 63), "unsupported-version"),
        "reserved": (edited(bound, reserved_0=bytes(791) + b"\x01"), bad),
        "epoch": (edited(bound, epoch=2**63), bad),
        "rank": (edited(bound, rank=1), bad),
        "past-the-file": (edited(bound, pack_count=5), bad),
        "stripes": (edited(bound, stripe_bytes_min=3 * 65536), bad),
        "page-too-large": (edited(bound, checksum_page_blocks=513), bad),
        "zero-tokens": (edited(bound, token_bytes=0), bad),
        "blank-by-half": (edited(blank, checksum_page_blocks=4), bad),
        "namespace-bytes": (edited(bound, namespace_bytes=2049), bad),
        "namespace-tail": (edited(bound, namespace=bytes(2047) + b"\x01"), bad),
        "namespace-digest": (edited(bound, namespace_sha256=bytes(32)), bad),
        "namespace-order": (
            edited(
                bound,
                namespace=unsorted + bytes(64),
                namespace_bytes=len(unsorted),
                namespace_sha256=hashlib.sha256(unsorted).digest(),
            ),
            bad,
        ),
        "blank-file-bytes": (edited(blank, file_bytes=DATA_OFFSET - 1), bad),
    }


def hostile_snapshots(good: bytes) -> dict[str, tuple[bytes, str]]:
    entry = {kind: at for at, kind, _, _ in sections(good)}
    start = {kind: offset for _, kind, offset, _ in sections(good)}

    def edited(data: bytes, *edits: tuple[object, int, str, int | bytes]) -> bytes:
        for layout, at, name, value in edits:
            data = put(data, layout, at, name, value)
        return sealed_snapshot(data)

    def record(row: int, name: str, value: int) -> bytes:
        return edited(good, (RECORD, start[1] + row * RECORD.size, name, value))

    def extent(row: int, name: str, value: int) -> bytes:
        return edited(good, (EXTENT, start[4] + row * EXTENT.size, name, value))

    def section(kind: int, name: str, value: int) -> bytes:
        return edited(good, (SECTION, entry[kind], name, value))

    bad, limits = "bad-snapshot", "snapshot-limits"
    first_block = good[start[2] : start[2] + 64]
    return {
        "truncated": (good[:-1], bad),
        "no-header": (good[:255], bad),
        "bad-checksum": (put(good, HEADER, 0, "epoch", 4), bad),
        "major-2": (edited(good, (HEADER, 0, "version_major", 2)), "unsupported-version"),
        "nine-sections": (edited(good, (HEADER, 0, "section_count", 9)), bad),
        "four-sections": (edited(good, (HEADER, 0, "section_count", 4)), bad),
        "length": (edited(good, (HEADER, 0, "snapshot_bytes", 2**63)), bad),
        "count-asks-for-memory": (
            edited(
                good,
                (SECTION, entry[2], "count", 2**61),
                (SECTION, entry[2], "length", 2**63),
            ),
            limits,
        ),
        "overlap": (section(3, "offset", start[2]), bad),
        "optional": (section(4, "flags", 0), bad),
        "unknown": (section(5, "kind", 6), "unknown-section"),
        "unknown-and-optional": (
            edited(good, (SECTION, entry[5], "kind", 6), (SECTION, entry[5], "flags", 0)),
            bad,
        ),
        "padding": (sealed_snapshot(good[: start[1] - 1] + b"\x01" + good[start[1] :]), bad),
        "row-checksum": (put(good, RECORD, start[1], "root", 1), bad),
        "first-root": (sealed_snapshot(good[:-64] + b"\x01" + good[-63:]), bad),
        "same-roots": (sealed_snapshot(good[:-32] + bytes(32)), bad),
        "cycle": (record(1, "parent", 1), bad),
        "no-such-parent": (record(0, "parent", 2**32 - 2), bad),
        "other-root": (record(1, "root", 1), bad),
        "start": (record(1, "token_start", 48), bad),
        "same-tokens-twice": (record(1, "token_index", 0), bad),
        "hidden-checksums": (record(2, "checksum_index", NO_CHECKSUM), bad),
        "no-such-extent": (record(0, "extent", 2), bad),
        "behind-the-mark": (extent(0, "append_mark_tokens", 32), bad),
        "mark-behind-the-stripe": (extent(0, "append_mark_tokens", 80), bad),
        "shared-tokens": (record(3, "extent_token_start", 0), bad),
        "shared-bytes": (
            edited(
                good,
                (EXTENT, start[4] + EXTENT.size, "offset", DATA_OFFSET),
                (EXTENT, start[4] + EXTENT.size, "pack_index", 0),
            ),
            bad,
        ),
        "width": (extent(0, "width", 3 * 65536), bad),
        "misplaced": (extent(1, "offset", 2097152 + 65536), bad),
        "generation": (extent(1, "generation", 13), bad),
        "record-id": (record(0, "record_id", 2**63), bad),
        "same-record-id": (record(1, "record_id", 21), bad),
        "twin-branch": (
            sealed_snapshot(put(good, RECORD, start[1] + 3 * RECORD.size, "root", 0)),
            bad,
        ),
        "branch-as-the-parent": (
            sealed_snapshot(
                good[: start[2] + 192]
                + good[start[2] + 64 : start[2] + 128]
                + first_block
                + good[start[2] + 320 :]
            ),
            bad,
        ),
    }


def hostile_markers(good: bytes) -> dict[str, tuple[bytes, str]]:
    bad = "bad-marker"
    return {
        "torn": (good[:64] + bytes(64), bad),
        "empty": (b"", bad),
        "version": (sealed_marker(put(good, MARKER, 0, "version", 2)), bad),
        "epoch": (sealed_marker(put(good, MARKER, 0, "epoch", 2**63)), bad),
        "reserved": (sealed_marker(put(good, MARKER, 0, "reserved_1", bytes(47) + b"\x01")), bad),
    }


def vectors() -> dict[str, tuple[dict[str, object], bytes]]:
    """Return every file by its name: what is to be expected of it, and its bytes."""
    good = good_files()
    found: dict[str, tuple[dict[str, object], bytes]] = {}
    for name, data in good.items():
        kind = name.split("-")[0].removesuffix(".bin")
        found[name] = ({"kind": kind, "expect": "ok"}, data)
    hostile = {
        "superblock": hostile_superblocks(
            good["superblock-bound.bin"], good["superblock-blank.bin"]
        ),
        "snapshot": hostile_snapshots(good["snapshot-four-records.bin"]),
        "marker": hostile_markers(good["marker.bin"]),
    }
    for kind, cases in hostile.items():
        for case, (data, code) in cases.items():
            found[f"hostile-{kind}-{case}.bin"] = ({"kind": kind, "expect": code}, data)
    before = put(good["marker.bin"], MARKER, 0, "epoch", 3)
    found["marker-before.bin"] = ({"kind": "marker", "expect": "ok"}, sealed_marker(before))
    blank = superblock(inputs("superblock-bound.bin") | inputs("superblock-blank.bin"))
    data = b"".join(snapshot.encode(Tables.empty(), envelope_of(blank)))
    found["snapshot-blank.bin"] = ({"kind": "snapshot", "expect": "ok"}, data)
    bound = superblock(inputs("superblock-bound.bin"))
    header = journals.header_of(bound.store_uuid, bound.geometry_digest())
    for name, one in (journals.accepted(header) | journals.torn(header)).items():
        about = {"kind": "journal", "expect": "ok"}
        found[name] = (about | {"torn_bytes": one.torn_bytes, "after": one.after}, one.data)
    one = journals.unread(blank.store_uuid, blank.geometry_digest())
    about = {"kind": "journal", "expect": "ok", "torn_bytes": 0, "after": one.after}
    found["journal-blank.bin"] = (about, one.data)
    for case, (data, code) in journals.hostile(header).items():
        found[f"hostile-journal-{case}.bin"] = ({"kind": "journal", "expect": code}, data)
    for name, (about, _) in found.items():
        kind = about["kind"]
        of = "blank" if "blank" in name else "bound"
        if kind == "superblock":
            about["copy_index"] = int("superblock-blank" in name)
        if kind in ("snapshot", "journal"):
            about["superblock"] = f"superblock-{of}.bin"
        if kind == "journal":
            below = {"blank": "blank", "bound": "four-records"}[of]
            about["snapshot"] = f"snapshot-{below}.bin"
            about["marker"] = f"marker{'-before' * (name == 'journal-before.bin')}.bin"
    return found


def index(found: dict[str, tuple[dict[str, object], bytes]]) -> str:
    """Return the text of vectors.json."""
    return json.dumps({name: about for name, (about, _) in found.items()}, indent=1) + "\n"


def main() -> None:
    found = vectors()
    for old in HERE.glob("*.bin"):
        old.unlink()
    for name, (_, data) in found.items():
        (HERE / name).write_bytes(data)
    (HERE / "vectors.json").write_text(index(found), "utf-8")


if __name__ == "__main__":
    main()
