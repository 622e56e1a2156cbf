"""Derives the journals of tests/vectors; all follow the snapshot of SPEC.md 16.3.

A journal that is accepted comes with the state behind each of its commits, the first behind none.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace

from rangekv.format import journal
from rangekv.format.entries import (
    ENTRY,
    HAS_CHECKSUMS,
    NO_PARENT_ID,
    PUBLISH,
    PUBLISHED,
    Entry,
    Publish,
    Published,
    Reset,
    Retire,
    RetireRecord,
)
from rangekv.format.journal import FRAME, HEADER_BYTES, JOURNAL, JournalHeader
from rangekv.format.records import EXTENT, NO_SALT, Extent
from support.hostile import journal_frames, put, sealed_journal

from vectors.examples import Row, example, inputs, root, span

State = dict[str, object]
"""generation_max; of each extent by generation the append mark; of each record its parent."""

FOUR = "journal-four-commits.bin"


@dataclass(frozen=True, slots=True)
class Accepted:
    """A journal, what its commits lead to, and the bytes behind them that are ignored."""

    data: bytes
    after: list[State]
    torn_bytes: int = 0


def header_of(store_uuid: bytes, geometry_digest: bytes) -> JournalHeader:
    given = inputs(FOUR)
    return JournalHeader(store_uuid, int(given["epoch"]), geometry_digest, int(given["unix_ns"]))


def framed(
    header: JournalHeader, *commits: list[Entry], times: list[int] = (), tops: list[int] = ()
) -> bytes:
    """Return a journal; commit n is written at time n with generation_max 12, unless told."""
    data = header.encode()
    link = journal.digest_of(data)
    for at, said in enumerate(commits):
        frame = journal.encode_frame(
            header,
            said,
            commit=at + 1,
            previous=link,
            generation_max=tops[at] if tops else 12,
            unix_ns=times[at] if times else at + 1,
        )
        data, link = data + frame, journal.digest_of(frame)
    return data


def four_commits(header: JournalHeader) -> Accepted:
    """Return the journal of SPEC.md 16.6."""
    (_, commits, extents, records, states), _ = example(FOUR)

    def publish(commit: Row) -> Publish:
        tokens, checksums, rows = array("I"), array("Q"), []
        for row in records:
            if row["commit"] != commit["commit"]:
                continue
            pages = span(row["checksums"])
            parent = row["parent_id"]
            rows.append(
                Published(
                    parent_id=NO_PARENT_ID if parent == "none" else int(parent),
                    flags=HAS_CHECKSUMS if pages else 0,
                    **{
                        name: int(row[name])
                        for name in Published._fields
                        if name in row and name != "parent_id"
                    },
                )
            )
            tokens.extend(span(row["token ids"]))
            checksums.extend(pages)
        return Publish(
            extents=[
                Extent(*(int(row[name]) for name in Extent._fields))
                for row in extents
                if row["commit"] == commit["commit"]
            ],
            records=rows,
            roots=[root(text) for text in commit["roots of PUBLISH"].split(", ")],
            tokens=tokens.tobytes(),
            checksums=checksums.tobytes(),
        )

    def entry(text: str, commit: Row) -> Entry:
        name, *numbers = text.split()
        if name == "PUBLISH":
            return publish(commit)
        if name == "RESET":
            return Reset()
        return {"RETIRE": Retire, "RETIRE_RECORD": RetireRecord}[name](list(map(int, numbers)))

    data = framed(
        header,
        *(
            [entry(text, row) for text in row["entries"].split("; ") if text != "none"]
            for row in commits
        ),
        times=[int(row["unix_ns"]) for row in commits],
        tops=[int(row["generation_max"]) for row in commits],
    )
    return Accepted(
        data,
        [
            state(
                int(row["generation_max"]),
                row["extents (generation: append mark)"],
                row["records"],
            )
            for row in states
        ],
    )


def state(generation_max: int, extents: str, records: str) -> State:
    """Return a state from the notation of SPEC.md: "7: 48, 9: 32" and "21, 22 on 21"."""
    marks = [one.split(": ") for one in extents.split(", ")]
    hung = [one.split(" on ") for one in records.split(", ")]
    return {
        "generation_max": generation_max,
        "extents": {generation: int(mark) for generation, mark in marks},
        "records": {one[0]: int(one[1]) if one[1:] else None for one in hung},
    }


BASE = state(12, "7: 48, 9: 32", "21, 22 on 21, 24 on 21, 25")
GROWN = state(12, "7: 64, 9: 32", "21, 22 on 21, 24 on 21, 25, 31 on 22")


def growing() -> Publish:
    """Return the smallest thing to publish: record 31 behind record 22 in the same extent."""
    return Publish(
        extents=[Extent(7, 1048576, 262144, 0, 64)],
        records=[Published(31, 22, 7, 50, 48, 48, 16, 16, 0, HAS_CHECKSUMS)],
        roots=[NO_SALT],
        tokens=numbers("I", 3000, 16),
        checksums=numbers("Q", 7, 2),
    )


def numbers(code: str, first: int, count: int) -> bytes:
    return array(code, range(first, first + count)).tobytes()


def accepted(header: JournalHeader) -> dict[str, Accepted]:
    """Return journals that a reader accepts whole."""
    grow = growing()
    moved = Publish(
        extents=[Extent(13, 3145728, 131072, 2, 32)],
        records=[Published(41, 21, 13, 60, 0, 32, 32, 32, 0, 0)],
        roots=[root("`tenant`"), NO_SALT],
        tokens=numbers("I", 1032, 16) + numbers("I", 4000, 16),
        checksums=b"",
    )
    moved.records[0] = moved.records[0]._replace(root=1)
    first = Publish(
        extents=[Extent(15, 4194304, 524288, 3, 16)],
        records=[Published(42, NO_PARENT_ID, 15, 61, 0, 0, 16, 0, 0, 0)],
        roots=[NO_SALT],
        tokens=numbers("I", 1000, 16),
        checksums=b"",
    )
    # Record 21 with other tokens in another place; `first` begins as it did.
    other = replace(
        first,
        extents=[Extent(7, 3145728, 65536, 2, 16)],
        records=[first.records[0]._replace(record_id=21, generation=7)],
        tokens=numbers("I", 5000, 16),
    )
    later = replace(moved, records=[moved.records[0]._replace(record_id=43, token_count=16)])
    minor = sealed_journal(put(header.encode(), JOURNAL, 0, "version_minor", 7))
    before = replace(header, epoch=header.epoch - 1)
    displaced = state(13, "7: 64, 9: 32, 13: 32", "21, 24 on 21, 25, 41 on 21")
    return {
        "journal-empty.bin": Accepted(header.encode(), [BASE]),
        FOUR: four_commits(header),
        # Record 41 takes the place of 22, and 31 goes with that; 42 that of 21, with all but 25.
        "journal-displaced.bin": Accepted(
            framed(header, [grow], [moved], [first]),
            [BASE, GROWN, displaced, state(15, "9: 32, 15: 16", "25, 42")],
        ),
        # What is not there changes nothing; the highest generation stays when all is forgotten.
        "journal-nothing-to-retire.bin": Accepted(
            framed(header, [Retire([8, 2**64 - 1]), RetireRecord([23, 2**64 - 1]), Retire()]),
            [BASE, BASE],
        ),
        "journal-forgotten.bin": Accepted(
            framed(header, [Reset(), Reset()], [other], [first]),
            [
                BASE,
                {"generation_max": 12, "extents": {}, "records": {}},
                state(12, "7: 16", "21"),
                state(15, "7: 16, 15: 16", "21, 42"),
            ],
        ),
        # An extent that is over may be named anew, elsewhere; so may a record.
        "journal-named-anew.bin": Accepted(
            framed(header, [Retire([7])], [other], [first]),
            [
                BASE,
                state(12, "9: 32", "25"),
                state(12, "7: 16, 9: 32", "21, 25"),
                state(15, "7: 16, 9: 32, 15: 16", "21, 25, 42"),
            ],
        ),
        # As record 24 begins, but behind the end of record 21: nothing makes way.
        "journal-same-block-elsewhere.bin": Accepted(
            framed(header, [replace(later, tokens=numbers("I", 2000, 16))]),
            [BASE, state(13, "7: 48, 9: 32, 13: 32", "21, 22 on 21, 24 on 21, 25, 43 on 21")],
        ),
        # An extent that no record needs in the end is over, wherever it claims to lie.
        "journal-extent-for-nothing.bin": Accepted(
            framed(header, [replace(grow, extents=[*grow.extents, Extent(14, 5, 7, 9, 1)])]),
            [BASE, GROWN | {"generation_max": 14}],
        ),
        "journal-minor-7.bin": Accepted(minor, [BASE]),
        # Left over by the session before, which was killed in C5: see marker-before.bin.
        "journal-before.bin": Accepted(before.encode(), [BASE]),
    }


def unread(store_uuid: bytes, geometry_digest: bytes) -> Accepted:
    """Return a journal of a blank store: whatever it says, there is nothing that it could name."""
    header = JournalHeader(store_uuid, 1, geometry_digest)
    nothing: State = {"generation_max": 0, "extents": {}, "records": {}}
    return Accepted(framed(header, [growing()]), [nothing, nothing])


def torn(header: JournalHeader) -> dict[str, Accepted]:
    """Return journals whose last commit was under way, or looks so."""
    last = [RetireRecord([31])]
    good = framed(header, [growing()], last)
    start, size = journal_frames(good)[1]
    kept = good[:start]
    frame = good[start:]

    def edited(name: str, value: int | bytes) -> bytes:
        return sealed_journal(put(good, FRAME, start, name, value))

    tails = {
        "short": frame[:-1],
        "head": frame[: FRAME.size],
        "bit": bytes([*frame[:-65], frame[-65] ^ 1, *frame[-64:]]),
        "zeros": bytes(4096),
        "no-magic": edited("magic", b"\x89RJF\r\n\x1a\x0b")[start:],
        "epoch": edited("epoch", 5)[start:],
        "generation-max": edited("generation_max", 2**63)[start:],
        "reserved": edited("reserved", bytes(11) + b"\x01")[start:],
        "length-0": long_as(0, frame),
        "length-of-a-part": long_as(64, frame),
        "length-odd": resized(good, -8)[start:],
        "length-past-the-file": long_as(size + 64, frame),
        "length-asks-for-memory": long_as(2**64 - 64, frame),
        # Every frame begins at a multiple of 64 bytes: this one is not looked for.
        "not-aligned": bytes(32) + frame,
    }
    return {
        f"torn-journal-{case}.bin": Accepted(kept + tail, [BASE, GROWN], len(tail))
        for case, tail in tails.items()
    }


def long_as(length: int, frame: bytes) -> bytes:
    """Let a frame claim a length, sealed as far as there are bytes."""
    frame = put(frame, FRAME, 0, "frame_bytes", length)
    seal = FRAME.seal(frame[: FRAME.seal_offset], frame[FRAME.size : length])
    return frame[: FRAME.seal_offset] + seal + frame[FRAME.size :]


def resized(data: bytes, more: int) -> bytes:
    """Let the last frame be longer by zeros, or shorter."""
    start, size = journal_frames(data)[-1]
    data = data + bytes(more) if more > 0 else data[:more]
    return sealed_journal(put(data, FRAME, start, "frame_bytes", size + more))


def hostile(header: JournalHeader) -> dict[str, tuple[bytes, str]]:
    """Return journals that a reader refuses, each with the code."""
    found = hostile_headers(header) | hostile_chains(header)
    bad = "bad-journal"
    found |= {case: (data, bad) for case, data in hostile_entries(header).items()}
    return found | {case: (data, bad) for case, data in hostile_commits(header).items()}


def hostile_headers(header: JournalHeader) -> dict[str, tuple[bytes, str]]:
    good = framed(header, [growing()])

    def edited(name: str, value: int | bytes) -> bytes:
        return sealed_journal(put(good, JOURNAL, 0, name, value))

    bad, other = "bad-journal", "journal-mismatch"
    return {
        "empty": (b"", bad),
        "short": (good[: HEADER_BYTES - 1], bad),
        "magic": (edited("magic", b"\x89RANGEJL\n\r\x1a\n"), bad),
        "bad-checksum": (put(good, JOURNAL, 0, "unix_ns", 0), bad),
        "major-2": (edited("version_major", 2), "unsupported-version"),
        "reserved": (edited("reserved", bytes(47) + b"\x01"), bad),
        "epoch": (framed(replace(header, epoch=2**63)), bad),
        "other-store": (framed(replace(header, store_uuid=bytes(16))), other),
        "other-geometry": (framed(replace(header, geometry_digest=bytes(16))), other),
        "later-epoch": (framed(replace(header, epoch=5)), other),
        "earlier-epoch": (framed(replace(header, epoch=3)), "dirty-marker"),
    }


def hostile_chains(header: JournalHeader) -> dict[str, tuple[bytes, str]]:
    good = framed(header, [growing()], [Retire([9])], [Reset()])
    (first, _), (second, _), (third, _) = journal_frames(good)
    head, frames = good[:first], [good[first:second], good[second:third], good[third:]]

    def edited(start: int, name: str, value: int | bytes, *, linked: bool = True) -> bytes:
        return sealed_journal(put(good, FRAME, start, name, value), linked=linked)

    def flipped(at: int) -> bytes:
        return good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]

    cases = {
        "other-header": replace(header, unix_ns=0).encode() + good[HEADER_BYTES:],
        "previous": edited(second, "previous_xxh3_128", bytes(16), linked=False),
        "frame-before-rewritten": edited(first, "unix_ns", 99, linked=False),
        "commit-0": edited(first, "commit", 0),
        "commit-left-out": edited(third, "commit", 4),
        "commit-twice": good + frames[2],
        "frame-left-out": head + frames[0] + frames[2],
        "frames-swapped": head + frames[1] + frames[0] + frames[2],
        "first-damaged": flipped(first + FRAME.size),
        "middle-damaged": flipped(second + FRAME.size),
        "middle-without-magic": flipped(second),
        "middle-of-other-epoch": edited(second, "epoch", 5),
        "middle-length-0": head + frames[0] + long_as(0, frames[1]) + frames[2],
        "old-frame-behind-the-tail": good[: third + 64] + bytes(64) + frames[1],
    }
    return {case: (data, "bad-journal") for case, data in cases.items()}


def hostile_entries(header: JournalHeader) -> dict[str, bytes]:
    """Return journals of one commit whose bytes do not add up."""
    good = framed(header, [growing()])
    over = framed(header, [Retire([9])])
    entry = HEADER_BYTES + FRAME.size
    publish = entry + ENTRY.size
    extent = publish + PUBLISH.size + len(NO_SALT)
    record = extent + EXTENT.size
    size = int.from_bytes(good[entry + 8 : publish], "little")

    def frame(name: str, value: int) -> bytes:
        return sealed_journal(put(good, FRAME, HEADER_BYTES, name, value))

    def said(name: str, value: int, data: bytes = good) -> bytes:
        return sealed_journal(put(data, ENTRY, entry, name, value))

    def head(name: str, value: int) -> bytes:
        return sealed_journal(put(good, PUBLISH, publish, name, value))

    def row(name: str, value: int) -> bytes:
        return sealed_journal(put(good, PUBLISHED, record, name, value))

    damaged = put(good, EXTENT, extent, "append_mark_tokens", 48)
    body = damaged[HEADER_BYTES + FRAME.size :]
    seal = FRAME.seal(damaged[HEADER_BYTES : HEADER_BYTES + FRAME.seal_offset], body)
    counts = ("root_count", "extent_count", "record_count", "checksum_count", "token_count")
    return {
        "entry-count": frame("entry_count", 2),
        "entry-count-asks-for-memory": frame("entry_count", 2**32 - 1),
        "entry-not-counted": frame("entry_count", 0),
        "padding": sealed_journal(good[:-1] + b"\x01"),
        "too-much-padding": resized(good, 64),
        "kind-0": said("kind", 0),
        "kind-5": said("kind", 5),
        "kind-5-and-empty": said("kind", 5, framed(header, [Reset()])),
        "entry-flags": said("flags", 1),
        "entry-bytes-0": said("entry_bytes", 0, over),
        "entry-bytes-8": said("entry_bytes", 8, over),
        "entry-bytes-odd": said("entry_bytes", 20, over),
        "entry-past-the-frame": said("entry_bytes", len(good) - entry + 8),
        "entry-asks-for-memory": said("entry_bytes", 2**64 - 8),
        "reset-with-a-body": said("kind", 4, over),
        "publish-without-a-head": said("kind", 1, over),
        "publish-left-over": said("entry_bytes", size + 8),
        "publish-too-short": said("entry_bytes", size - 8),
        "publish-reserved": head("reserved", 1),
        **{f"{name.replace('_', '-')}-past-the-end": head(name, 32) for name in counts},
        **{
            f"{name.replace('_', '-')}-asks-for-memory": head(
                name, 2**32 - 1 if name in counts[:3] else 2**63
            )
            for name in counts
        },
        "row-checksum": damaged[: HEADER_BYTES + FRAME.seal_offset] + seal + body,
        "row-reserved": sealed_journal(put(good, EXTENT, extent, "reserved", 1)),
        "record-flags": row("flags", 3),
        "record-reserved": row("reserved", 1),
    }


def hostile_commits(header: JournalHeader) -> dict[str, bytes]:
    """Return journals whose bytes add up and whose commits contradict what was before them."""
    grow = growing()
    tokens, sums = numbers("I", 3000, 16), numbers("Q", 7, 2)
    new = Extent(13, 3145728, 131072, 2, 32)

    def record(**values: int) -> bytes:
        return framed(header, [replace(grow, records=[grow.records[0]._replace(**values)])])

    def extent(**values: int) -> bytes:
        return framed(header, [replace(grow, extents=[grow.extents[0]._replace(**values)])])

    def both(row: Published, extent: Extent, **values: object) -> bytes:
        return framed(header, [replace(grow, extents=[extent], records=[row], **values)])

    row = grow.records[0]
    elsewhere = row._replace(generation=13, extent_token_start=0)
    child = row._replace(record_id=32, parent_id=31, extent_token_start=0, token_start=64)
    child = child._replace(generation=13)
    family = replace(
        grow, extents=[*grow.extents, new], tokens=tokens + tokens, checksums=sums + sums
    )
    salted = replace(grow, roots=[root("`tenant`")])
    mark = grow.extents[0]._replace(append_mark_tokens=48)
    fallen = replace(grow, extents=[mark], records=[], tokens=b"", checksums=b"")
    empty = replace(fallen, records=[row._replace(token_count=0, flags=0)], extents=grow.extents)
    renamed = replace(grow, records=[row._replace(record_id=2**63)])
    ranked = replace(grow, records=[row._replace(access_rank=2**63)])
    # Its life is short, and it is refused all the same.
    shortly = {
        "no-tokens": empty,
        "too-few-tokens": replace(grow, tokens=tokens[:-4]),
        "too-few-checksums": replace(grow, checksums=sums[:-8]),
        "parent-of-another-root": salted,
        "record-id": renamed,
        "access-rank": ranked,
    }
    return {
        "no-such-root": record(root=1),
        "no-such-generation": record(generation=8),
        "no-such-parent": record(parent_id=30),
        "own-parent": record(parent_id=31),
        "parent-behind-its-child": framed(header, [replace(family, records=[child, row])]),
        "record-that-is-there": record(record_id=25),
        "record-twice": framed(header, [grow], [grow]),
        "record-in-a-retired-extent": framed(
            header, [Retire([9])], [replace(grow, records=[row._replace(generation=9)])]
        ),
        "parent-in-a-retired-extent": framed(header, [Retire([7])], [grow]),
        "parent-retired": framed(header, [RetireRecord([22])], [grow]),
        "parent-forgotten": framed(header, [Reset()], [grow]),
        **{
            f"{case}-and-retired": framed(header, [said, RetireRecord([31, 2**63])])
            for case, said in shortly.items()
        },
        "too-many-tokens": framed(header, [replace(grow, tokens=tokens + tokens)]),
        "too-few-checksums": framed(header, [replace(grow, checksums=sums[:-8])]),
        "too-many-checksums": framed(header, [replace(grow, checksums=sums + sums)]),
        "checksums-of-none": record(flags=0),
        "extent-moved": extent(offset=1048576 + 524288),
        "extent-widened": extent(width=524288),
        "extent-in-another-pack": extent(pack_index=1),
        "mark-falls": framed(header, [grow], [RetireRecord([31]), fallen]),
        "extents-past-the-limit": framed(header, [replace(grow, extents=grow.extents * 33)]),
        "mark-behind-the-stripe": extent(append_mark_tokens=80),
        "behind-the-mark": extent(append_mark_tokens=48),
        "shared-tokens": record(extent_token_start=32),
        "shared-bytes": both(elsewhere, Extent(13, 2097152, 65536, 1, 16)),
        "width": both(elsewhere, new._replace(width=3 * 65536)),
        "misplaced": both(elsewhere, new._replace(offset=3145728 + 65536)),
        "pack": both(elsewhere, new._replace(pack_index=4)),
        "generation": both(elsewhere._replace(generation=2**63), new._replace(generation=2**63)),
        "generation-for-nothing": framed(
            header, [replace(grow, extents=[*grow.extents, new._replace(generation=2**63)])]
        ),
        "start": record(token_start=64),
        "parent-tokens-0": record(parent_tokens=0, token_start=32),
        "parent-tokens-past-the-parent": record(parent_tokens=32, token_start=64),
        "orphan-behind-the-start": record(parent_id=NO_PARENT_ID, parent_tokens=0),
        "half-a-block": both(row._replace(token_count=8), grow.extents[0], tokens=tokens[:32]),
        "as-the-parent-goes-on": both(
            elsewhere._replace(parent_id=21, parent_tokens=16, token_start=16),
            new,
            tokens=numbers("I", 1016, 16),
        ),
    }
