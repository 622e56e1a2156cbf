"""A second reader of the format, written from SPEC.md alone; it shares no code with Range.

    python decoder.py superblock FILE [0|1]
    python decoder.py marker FILE
    python decoder.py snapshot FILE SUPERBLOCK_FILE [0|1]
    python decoder.py journal FILE SNAPSHOT_FILE SUPERBLOCK_FILE [0|1]

prints what it found as JSON, or the code of the refusal. Numbers in comments are sections of SPEC.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import sys
from itertools import pairwise
from pathlib import Path

import msgpack
import xxhash

# 10
COUNTER_MAX = 2**63 - 1
STRIPE_MAX = PAGE_MAX = 33554432
RANKS_MAX = PACKS_MAX = ROOTS_MAX = 65536
LAYERS_MAX = 1024
NAMESPACE_MAX = 2048
SECTIONS_MAX = 8
UNKNOWN_SECTION_MAX = 1048576
POSITION_MAX = 2**32 - 1

JOURNAL_MAX = 1073741824

DATA_OFFSET = 1048576
NONE_32, NONE_64 = 2**32 - 1, 2**64 - 1
ENTRY_BYTES = {1: 96, 2: 4, 3: 8, 4: 48, 5: 32}  # 8.2


class Refused(Exception):
    """The bytes are not what SPEC.md demands; the argument is the code."""


def demand(holds: bool, code: str) -> None:
    if not holds:
        raise Refused(code)


def xxh3_64(data: bytes) -> bytes:
    return xxhash.xxh3_64_intdigest(data).to_bytes(8, "little")


def xxh3_128(data: bytes) -> bytes:
    return xxhash.xxh3_128_intdigest(data).to_bytes(16, "little")


# 4: self-test
assert xxh3_64(b"").hex(" ") == "c2 94 d3 38 05 80 06 2d"
assert xxh3_128(b"").hex(" ") == "7f 49 8d 46 24 c3 01 60 d8 98 47 01 d3 06 aa 99"


def named(names: str, layout: str, data: bytes) -> dict:
    return dict(zip(names.split(), struct.unpack("<" + layout, data), strict=True))


def decode_superblock(page: bytes, copy_index: int) -> dict:  # 11.1
    bad = "bad-superblock"
    demand(len(page) == 4096, bad)
    demand(page[:12] == bytes.fromhex("89 52 41 4e 47 45 50 4b 0d 0a 1a 0a"), bad)
    demand(page[4080:] == xxh3_128(page[:4080]), bad)
    found = named(
        "version_major version_minor superblock_bytes copy_index feature_compat feature_ro_compat "
        "feature_incompat store_uuid sequence epoch file_bytes data_offset pack_bytes "
        "stripe_bytes_max stripe_bytes_min pack_count alignment layer_count token_bytes "
        "block_tokens layout_id checksum_id created_unix_ns inode btime_sec btime_nsec "
        "inode_generation identity_flags fs_magic rank world_size namespace_sha256 "
        "namespace_bytes checksum_page_blocks",
        "HHIIQQQ16sQQQQQQQIIIIIHHQQQIIIIII32sII",
        page[12:232],
    )
    known = found["version_major"] == 1 and found["feature_incompat"] == 0
    demand(known, "unsupported-version")
    demand(not any(page[232:1024]) and not any(page[3072:4080]), bad)
    demand(found["superblock_bytes"] == 4096 and found["data_offset"] == DATA_OFFSET, bad)
    demand(found["alignment"] == 4096 and found["copy_index"] == copy_index, bad)
    demand(found["sequence"] <= COUNTER_MAX and found["epoch"] <= COUNTER_MAX, bad)
    demand(found["rank"] < found["world_size"] <= RANKS_MAX, bad)
    demand(found["file_bytes"] >= DATA_OFFSET, bad)
    namespace = page[1024 : 1024 + found["namespace_bytes"]]
    demand(found["namespace_bytes"] <= NAMESPACE_MAX, bad)
    demand(not any(page[1024 + len(namespace) : 3072]), bad)
    found["geometry_xxh3_128"] = xxh3_128(page[80:144] + page[228:232])  # 8.1
    found["blank"] = not any(page[96:124] + page[128:144] + page[192:232])  # 6.2
    found["namespace"] = None
    if not found["blank"]:
        demand(geometry_is_accepted(found), bad)
        found["namespace"] = decode_namespace(namespace, bad)
        demand(found["namespace_sha256"] == hashlib.sha256(namespace).digest(), bad)
    return found


def geometry_is_accepted(g: dict) -> bool:  # 7.1
    if not (g["layer_count"] and g["token_bytes"] and g["block_tokens"] and g["pack_count"]):
        return False
    block_bytes = g["block_tokens"] * g["token_bytes"]
    unit = math.lcm(block_bytes, 4096)
    narrow, wide = g["stripe_bytes_min"], g["stripe_bytes_max"]
    page_blocks = g["checksum_page_blocks"]
    return (
        narrow > 0
        and narrow % unit == 0
        and wide in [narrow << k for k in range(64)]
        and wide <= STRIPE_MAX
        and g["layer_count"] <= LAYERS_MAX
        and g["pack_bytes"] == g["layer_count"] * wide
        and g["pack_count"] <= PACKS_MAX
        and DATA_OFFSET + g["pack_count"] * g["pack_bytes"] <= g["file_bytes"]
        and page_blocks > 0
        and page_blocks % (unit // block_bytes) == 0
        and page_blocks * block_bytes <= PAGE_MAX
        and g["layout_id"] in (1, 2)
        and g["checksum_id"] in (0, 1)
    )


def decode_namespace(data: bytes, code: str) -> dict:  # 6.1
    try:
        fields = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except Exception:
        raise Refused(code) from None
    demand(isinstance(fields, dict) and all(type(key) is str for key in fields), code)
    demand(list(fields) == sorted(fields), code)
    for value in fields.values():
        demand(type(value) in (str, int), code)
        demand(isinstance(value, int) or len(value.encode()) <= 256, code)
    demand(msgpack.packb(fields) == data, code)
    return fields


def decode_marker(data: bytes) -> dict:  # 9
    bad = "bad-marker"
    demand(len(data) == 128, bad)
    demand(data[:12] == bytes.fromhex("89 52 41 4e 47 45 44 4d 0d 0a 1a 0a"), bad)
    demand(data[120:] == xxh3_64(data[:120]), bad)
    names = "version store_uuid epoch unix_ns pid reserved_0 boot_id"
    found = named(names, "I16sQQII16s", data[12:72])
    demand(found["version"] == 1 and found["epoch"] <= COUNTER_MAX, bad)
    demand(found.pop("reserved_0") == 0 and not any(data[72:120]), bad)
    return found


def decode_snapshot(data: bytes, superblock: dict) -> dict:  # 11.4, 11.5
    found, sections = decode_head(data, superblock)
    bodies = {}
    end = 256 + 48 * len(sections)
    for one in sections:
        demand(not any(data[end : one["offset"]]), "bad-snapshot")
        end = one["offset"] + one["length"]
        bodies[one["kind"]] = data[one["offset"] : end]
        demand(xxh3_128(bodies[one["kind"]]) == one["section_xxh3_128"], "bad-snapshot")
    found["extents"] = extent_rows(bodies[4], "bad-snapshot")
    found["records"] = rows(
        "record_id token_index checksum_index access_rank extent extent_token_start token_start "
        "token_count parent parent_tokens root flags reserved",
        "QQQQIIIIIIII24s",
        bodies[1],
        "bad-snapshot",
    )
    found["tokens"] = list(struct.unpack(f"<{len(bodies[2]) // 4}I", bodies[2]))
    found["checksums"] = list(struct.unpack(f"<{len(bodies[3]) // 8}Q", bodies[3]))
    found["roots"] = [bodies[5][at : at + 32] for at in range(0, len(bodies[5]), 32)]
    roots = found["roots"]
    demand(found["generation_max"] <= COUNTER_MAX, "bad-snapshot")
    demand(bool(roots) and not any(roots[0]) and len(set(roots)) == len(roots), "bad-snapshot")
    if not superblock["blank"]:  # else the limits have left no entries
        check_extents(found, superblock)
        check_records(found, superblock)
    return found


def decode_head(data: bytes, superblock: dict) -> tuple[dict, list[dict]]:  # 11.4
    bad = "bad-snapshot"
    demand(len(data) >= 256, bad)
    demand(data[:12] == bytes.fromhex("89 52 41 4e 47 45 53 4e 0d 0a 1a 0a"), bad)
    found = named(
        "version_major version_minor header_bytes section_count snapshot_bytes store_uuid epoch "
        "generation_max pack_mtime_sec pack_mtime_nsec identity_flags inode btime_sec btime_nsec "
        "inode_generation file_bytes geometry_xxh3_128 published_unix_ns record_count token_count",
        "HHIIQ16sQQQIIQQIIQ16sQQQ",
        data[12:152],
    )
    count = min(found["section_count"], SECTIONS_MAX)
    table = data[256 : 256 + 48 * count]
    demand(data[240:256] == xxh3_128(data[:240] + table), bad)
    demand(found["version_major"] == 1, "unsupported-version")
    demand(not any(data[152:240]) and found["section_count"] == count, bad)
    demand(found["header_bytes"] == 256 and found["snapshot_bytes"] == len(data), bad)
    demand(found["pack_mtime_nsec"] < 10**9 and found["epoch"] <= COUNTER_MAX, bad)
    demand(len(table) == 48 * count, bad)
    entry = "kind flags offset length count section_xxh3_128"
    sections = [named(entry, "IIQQQ16s", table[at : at + 48]) for at in range(0, 48 * count, 48)]
    limits = limits_of(superblock)
    end, kind_before = 256 + 48 * count, 0
    for one in sections:
        demand(one["offset"] == (end + 63) // 64 * 64 and one["kind"] > kind_before, bad)
        end, kind_before = one["offset"] + one["length"], one["kind"]
        if one["kind"] not in ENTRY_BYTES:
            demand(not one["flags"] & 1, "unknown-section")
            demand(one["flags"] == 0, bad)
            demand(one["length"] <= UNKNOWN_SECTION_MAX, "snapshot-limits")
            continue
        demand(one["flags"] == 1, bad)
        demand(one["length"] == one["count"] * ENTRY_BYTES[one["kind"]], bad)
        demand(one["count"] <= limits[one["kind"]], "snapshot-limits")
    counts = {one["kind"]: one["count"] for one in sections}
    demand(all(kind in counts for kind in ENTRY_BYTES) and end == len(data), bad)
    demand((found["record_count"], found["token_count"]) == (counts[1], counts[2]), bad)
    return found, sections


def limits_of(g: dict) -> dict[int, int]:  # 10
    if g["blank"]:
        return {1: 0, 2: 0, 3: 0, 4: 0, 5: ROOTS_MAX}
    block_bytes = g["block_tokens"] * g["token_bytes"]
    records = g["pack_count"] * (g["pack_bytes"] // (g["layer_count"] * block_bytes))
    extents = g["pack_count"] * (g["stripe_bytes_max"] // g["stripe_bytes_min"])
    tokens, checksums = records * g["block_tokens"], records * g["layer_count"]
    return {1: records, 2: tokens, 3: checksums, 4: extents, 5: ROOTS_MAX}


def extent_rows(section: bytes, code: str) -> list[dict]:  # 8.3
    names = "generation offset width pack_index append_mark_tokens reserved"
    return rows(names, "QQQII8s", section, code)


def rows(names: str, layout: str, section: bytes, code: str) -> list[dict]:
    size = struct.calcsize("<" + layout)
    found = []
    for at in range(0, len(section), size + 8):
        body = section[at : at + size]
        demand(section[at + size : at + size + 8] == xxh3_64(body), code)
        found.append(named(names, layout, body))
        demand(not any(found[-1].pop("reserved")), code)
    return found


def check_extents(found: dict, g: dict) -> None:  # 11.5, 5
    taken = []
    for one in found["extents"]:
        width, size = one["width"], g["layer_count"] * one["width"]
        widths = [g["stripe_bytes_min"] << k for k in range(64)]
        demand(width in widths and width <= g["stripe_bytes_max"], "bad-snapshot")
        demand(one["pack_index"] < g["pack_count"], "bad-snapshot")
        start = one["offset"] - DATA_OFFSET - one["pack_index"] * g["pack_bytes"]
        demand(start >= 0 and start + size <= g["pack_bytes"], "bad-snapshot")
        demand(start % size == 0, "bad-snapshot")
        demand(one["generation"] <= found["generation_max"], "bad-snapshot")
        mark = one["append_mark_tokens"]
        demand(mark % g["block_tokens"] == 0 and mark * g["token_bytes"] <= width, "bad-snapshot")
        taken.append((one["offset"], one["offset"] + size))
    demand_disjoint(taken)


def check_records(found: dict, g: dict) -> None:  # 11.5, 6 to 10
    bad, size = "bad-snapshot", g["block_tokens"]
    tokens, records, extents = found["tokens"], found["records"], found["extents"]
    next_token = next_checksum = 0
    taken, places = [], set()
    for row, one in enumerate(records):
        demand(one["flags"] == 0 and one["root"] < len(found["roots"]), bad)
        demand(one["record_id"] <= COUNTER_MAX and one["access_rank"] <= COUNTER_MAX, bad)
        demand(one["extent"] < len(extents) and one["token_count"] > 0, bad)
        for name in ("token_count", "token_start", "extent_token_start"):
            demand(one[name] % size == 0, bad)
        demand(one["token_start"] + one["token_count"] <= POSITION_MAX, bad)
        start = one["extent_token_start"]
        end = start + one["token_count"]
        demand(end <= extents[one["extent"]]["append_mark_tokens"], bad)
        taken.append(((one["extent"], start), (one["extent"], end)))
        demand(one["token_index"] == next_token, bad)
        next_token += one["token_count"]
        if one["checksum_index"] != NONE_64:
            demand(one["checksum_index"] == next_checksum, bad)
            next_checksum += pages_of(one["token_count"], g)
        first = tokens[one["token_index"] : one["token_index"] + size]
        if one["parent"] == NONE_32:
            demand(one["parent_tokens"] == 0 and one["token_start"] == 0, bad)
        else:
            demand(one["parent"] < row, bad)
            parent, at = records[one["parent"]], one["parent_tokens"]
            demand(one["root"] == parent["root"] and 1 <= at <= parent["token_count"], bad)
            demand(one["token_start"] == parent["token_start"] + at, bad)
            there = parent["token_index"] + at
            demand(at == parent["token_count"] or first != tokens[there : there + size], bad)
        places.add((one["root"], one["parent"], one["parent_tokens"], tuple(first)))
    demand(next_token == len(tokens) and next_checksum == len(found["checksums"]), bad)
    demand(len({one["record_id"] for one in records}) == len(places) == len(records), bad)
    demand_disjoint(taken)


def pages_of(token_count: int, g: dict) -> int:  # 7.4
    page_tokens = g["checksum_page_blocks"] * g["block_tokens"]
    return g["layer_count"] * -(-token_count // page_tokens)


def demand_disjoint(ranges: list[tuple]) -> None:
    ranges.sort()
    for (_, end), (start, _) in pairwise(ranges):
        demand(end <= start, "bad-snapshot")


def recover(data: bytes, marker: dict | None, snapshot: dict, superblock: dict) -> dict:
    """Return what a journal and the snapshot of a dirty store lead to."""  # 11.6
    journal = decode_journal(data)
    mine = journal["store_uuid"] == snapshot["store_uuid"]
    ahead = journal["epoch"] - snapshot["epoch"]
    if mine and ahead == 1:
        same = journal["geometry_xxh3_128"] == snapshot["geometry_xxh3_128"]
        opened = superblock["epoch"] - snapshot["epoch"]
        demand(same and opened in (0, 1), "journal-mismatch")
        state = replay(journal, snapshot, superblock)
    else:
        demand(mine and ahead <= 0, "journal-mismatch")
        demand(marker is not None, "epoch-mismatch")
        closed = superblock["epoch"] == snapshot["epoch"] >= marker["epoch"]
        demand(closed and marker["store_uuid"] == superblock["store_uuid"], "dirty-marker")
        state = state_of(snapshot, superblock)
    return {key: journal[key] for key in ("ends", "torn_bytes")} | state


def decode_journal(data: bytes) -> dict:  # 9.2, 11.6
    bad = "bad-journal"
    demand(128 <= len(data) <= JOURNAL_MAX, bad)
    demand(data[:12] == bytes.fromhex("89 52 41 4e 47 45 4a 4c 0d 0a 1a 0a"), bad)
    demand(data[112:128] == xxh3_128(data[:112]), bad)
    names = "version_major version_minor store_uuid epoch unix_ns geometry_xxh3_128"
    found = named(names, "HH16sQQ16s", data[12:64])
    demand(found["version_major"] == 1, "unsupported-version")
    demand(not any(data[64:112]) and found["epoch"] <= COUNTER_MAX, bad)
    found["frames"], found["ends"] = [], [128]
    link = data[112:128]
    while (frame := frame_at(data, found["ends"][-1], found["epoch"])) is not None:
        demand(frame["commit"] == len(found["ends"]) and frame["previous"] == link, bad)
        found["frames"].append(frame)
        found["ends"].append(found["ends"][-1] + frame["frame_bytes"])
        link = frame["xxh3_128"]
    for at in range(found["ends"][-1], len(data), 64):
        demand(frame_at(data, at, found["epoch"]) is None, bad)
    found["torn_bytes"] = len(data) - found["ends"][-1]
    return found


def frame_at(data: bytes, at: int, epoch: int) -> dict | None:  # 9.3, 11.6
    head = data[at : at + 96]
    if len(head) < 96 or head[:8] != bytes.fromhex("89 52 4a 46 0d 0a 1a 0a"):
        return None
    names = "commit epoch frame_bytes unix_ns generation_max previous entry_count reserved"
    found = named(f"{names} xxh3_128", "QQQQQ16sI12s16s", head[8:])
    size = found["frame_bytes"]
    if size % 64 or not 96 <= size <= len(data) - at:
        return None
    found["body"] = data[at + 96 : at + size]
    holds = (
        found["xxh3_128"] == xxh3_128(head[:80] + found["body"])
        and found["epoch"] == epoch
        and not any(found["reserved"])
        and found["generation_max"] <= COUNTER_MAX
    )
    return found if holds else None


def decode_entries(frame: dict, g: dict) -> list[tuple]:  # 9.4, 11.7
    """Return (kind, what it says) of each entry."""
    bad, body, at, said = "bad-journal", frame["body"], 0, []
    for _ in range(frame["entry_count"]):
        demand(len(body) - at >= 16, bad)
        kind, flags, size = struct.unpack("<IIQ", body[at : at + 16])
        demand(flags == 0 and size % 8 == 0 and 16 <= size <= len(body) - at, bad)
        own = body[at + 16 : at + size]
        demand(kind in (1, 2, 3) or (kind == 4 and not own), bad)
        if kind == 1:
            said.append((kind, decode_publish(own, g)))
        else:
            said.append((kind, struct.unpack(f"<{len(own) // 8}Q", own)))
        at += size
    demand(len(body) - at < 64 and not any(body[at:]), bad)
    return said


def decode_publish(body: bytes, g: dict) -> dict:  # 9.5, 9.6
    bad, limits = "bad-journal", limits_of(g)
    demand(len(body) >= 32, bad)
    roots, extents, records, reserved, checksums, tokens = struct.unpack("<IIIIQQ", body[:32])
    demand(reserved == 0, bad)
    counts = {5: roots, 4: extents, 1: records, 3: checksums, 2: tokens}
    demand(all(count <= limits[kind] for kind, count in counts.items()), bad)
    parts, at = [], 32
    for size in (32 * roots, 48 * extents, 64 * records, 8 * checksums, 4 * tokens):
        parts.append(body[at : at + size])
        at += size
    demand(at <= len(body) < at + 8 and not any(body[at:]), bad)
    names = (
        "record_id parent generation access_rank extent_token_start token_start token_count "
        "parent_tokens root flags reserved"
    )
    found = {
        "roots": [parts[0][at : at + 32] for at in range(0, 32 * roots, 32)],
        "extents": extent_rows(parts[1], bad),
        "records": [
            named(names, "QQQQIIIIIIQ", parts[2][at : at + 64]) for at in range(0, 64 * records, 64)
        ],
        "checksums": list(struct.unpack(f"<{checksums}Q", parts[3])),
        "tokens": list(struct.unpack(f"<{tokens}I", parts[4])),
    }
    for one in found["records"]:
        demand(one["flags"] in (0, 1) and one.pop("reserved") == 0, bad)
        demand(one["record_id"] <= COUNTER_MAX and one["access_rank"] <= COUNTER_MAX, bad)
    return found


def state_of(snapshot: dict, g: dict) -> dict:
    """Return a snapshot by generations and record_ids; parents come before their children."""
    records = {}
    for row in snapshot["records"]:
        one = {name: row[name] for name in KEPT}
        one["generation"] = snapshot["extents"][row["extent"]]["generation"]
        one["parent"] = None
        if row["parent"] != NONE_32:
            one["parent"] = snapshot["records"][row["parent"]]["record_id"]
        one["root"] = snapshot["roots"][row["root"]]
        one["tokens"] = snapshot["tokens"][row["token_index"] :][: row["token_count"]]
        one["checksums"] = None
        if row["checksum_index"] != NONE_64:
            pages = pages_of(row["token_count"], g)
            one["checksums"] = snapshot["checksums"][row["checksum_index"] :][:pages]
        records[row["record_id"]] = one
    extents = {one["generation"]: one for one in snapshot["extents"]}
    return {
        "generation_max": snapshot["generation_max"],
        "extents": extents,
        "records": records,
    }


KEPT = ("access_rank", "extent_token_start", "token_start", "token_count", "parent_tokens")


def replay(journal: dict, snapshot: dict, g: dict) -> dict:  # 11.7
    state = state_of(snapshot, g)
    if g["blank"]:
        return state
    for frame in journal["frames"]:
        state["generation_max"] = max(state["generation_max"], frame["generation_max"])
        for kind, said in decode_entries(frame, g):
            if kind == 1:
                publish(state, said, g)
            elif kind == 2:
                for generation in said:
                    state["extents"].pop(generation, None)
                held = [k for k, one in state["records"].items() if one["generation"] in said]
                take_out(state, held)
            elif kind == 3:
                take_out(state, said)
            else:
                state["extents"], state["records"] = {}, {}
    needed = {one["generation"] for one in state["records"].values()}
    state["extents"] = {key: one for key, one in state["extents"].items() if key in needed}
    try:
        check_state(state, g)
    except Refused:
        raise Refused("bad-journal") from None
    return state


def publish(state: dict, said: dict, g: dict) -> None:  # 11.7, 3 to 5
    bad, size = "bad-journal", g["block_tokens"]
    records = state["records"]
    for one in said["extents"]:
        known = state["extents"].get(one["generation"])
        if known is not None:
            same = all(one[name] == known[name] for name in ("offset", "width", "pack_index"))
            demand(same and one["append_mark_tokens"] >= known["append_mark_tokens"], bad)
        state["extents"][one["generation"]] = one
        state["generation_max"] = max(state["generation_max"], one["generation"])
    tokens, checksums = said["tokens"], said["checksums"]
    for row in said["records"]:
        demand(row["root"] < len(said["roots"]) and row["generation"] in state["extents"], bad)
        demand(row["record_id"] not in records, bad)
        one = {name: row[name] for name in KEPT} | {"generation": row["generation"]}
        one["root"] = said["roots"][row["root"]]
        one["parent"] = None if row["parent"] == NONE_64 else row["parent"]
        if one["parent"] is not None:
            demand(one["parent"] in records, bad)
            demand(records[one["parent"]]["root"] == one["root"], bad)
        one["tokens"], tokens = tokens[: row["token_count"]], tokens[row["token_count"] :]
        demand(len(one["tokens"]) == row["token_count"] > 0, bad)
        one["checksums"] = None
        if row["flags"] == 1:
            pages = pages_of(row["token_count"], g)
            one["checksums"], checksums = checksums[:pages], checksums[pages:]
            demand(len(one["checksums"]) == pages, bad)
        place = [one[name] for name in ("root", "parent", "parent_tokens")]
        for key, other in list(records.items()):
            there = [other[name] for name in ("root", "parent", "parent_tokens")]
            if there == place and other["tokens"][:size] == one["tokens"][:size]:
                take_out(state, [key])
        records[row["record_id"]] = one
    demand(not tokens and not checksums, bad)


def take_out(state: dict, ids: list[int]) -> None:  # 9.4
    gone = set(ids)
    for key, one in state["records"].items():
        if one["parent"] in gone:
            gone.add(key)
    for key in gone & state["records"].keys():
        del state["records"][key]


def check_state(state: dict, g: dict) -> None:  # 11.7, 7
    """Write the state as the tables of a snapshot, and check those."""
    generations, ids = list(state["extents"]), list(state["records"])
    held = {one["root"] for one in state["records"].values()} - {bytes(32)}
    found = {
        "generation_max": state["generation_max"],
        "extents": list(state["extents"].values()),
        "roots": [bytes(32), *held],
        "records": [],
        "tokens": [],
        "checksums": [],
    }
    for key, one in state["records"].items():
        row = {name: one[name] for name in KEPT} | {"record_id": key, "flags": 0}
        row["extent"] = generations.index(one["generation"])
        row["root"] = found["roots"].index(one["root"])
        row["parent"] = NONE_32 if one["parent"] is None else ids.index(one["parent"])
        row["token_index"], row["checksum_index"] = len(found["tokens"]), NONE_64
        found["tokens"] += one["tokens"]
        if one["checksums"] is not None:
            row["checksum_index"] = len(found["checksums"])
            found["checksums"] += one["checksums"]
        found["records"].append(row)
    demand(state["generation_max"] <= COUNTER_MAX, "bad-journal")
    demand(len(found["roots"]) <= ROOTS_MAX, "bad-journal")
    check_extents(found, g)
    check_records(found, g)


def main(kind: str, path: str, *rest: str) -> int:
    data = Path(path).read_bytes()
    try:
        if kind == "superblock":
            found = decode_superblock(data, int(rest[0]) if rest else 0)
        elif kind == "marker":
            found = decode_marker(data)
        elif kind == "journal":
            superblock = decode_superblock(Path(rest[1]).read_bytes(), int((*rest, 0)[2]))
            snapshot = decode_snapshot(Path(rest[0]).read_bytes(), superblock)
            found = recover(data, None, snapshot, superblock)
        else:
            page = Path(rest[0]).read_bytes()
            found = decode_snapshot(data, decode_superblock(page, int((*rest, 0)[1])))
    except Refused as refusal:
        print(refusal)
        return 1
    print(json.dumps(found, indent=1, default=bytes.hex))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
