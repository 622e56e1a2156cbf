"""`rangectl verify`: is a store whole, and with --read-data, are its bytes what was saved.

Owns the findings and the exit status; never repairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click
from rangekv.engine.inspection import Reading, StoreReport, reading
from rangekv.format.errors import ExitCode, StoreLocked, UsageError

from rangectl.describe import state_line
from rangectl.output import Output, counted, facts, human_bytes
from rangectl.target import one_store
from rangectl.verb import Verb, json_option, path_argument

if TYPE_CHECKING:
    from rangectl.payload_check import Media, PayloadCounts
    from rangectl.subset import Subset

# An index that reads as damaged is corruption; one that is only out of date is a cold store.
_DAMAGED = ("bad-snapshot", "snapshot-limits", "unknown-section")


@dataclass(frozen=True, slots=True)
class Payload:
    """What reading the payload showed, and how much of it was read."""

    counts: PayloadCounts
    media: Media
    subset: Subset
    seed: int
    chosen_count: int
    page_count: int
    """Pages that have a checksum."""


@click.command(
    cls=Verb,
    help="Check a store's structure and, on request, its payload.",
    examples=(
        "rangectl verify /kv",
        "rangectl verify /kv --read-data --json",
        "rangectl verify /kv --read-data-subset 1/7",
    ),
    exits=(
        ExitCode.CHECK_FAILED,
        ExitCode.ENVIRONMENT,
        ExitCode.COLD,
        ExitCode.UNSUPPORTED,
        ExitCode.NO_STORE,
        ExitCode.LOCKED,
    ),
)
@path_argument
@click.option("--read-data", is_flag=True, help="Read every page and compare its checksum.")
@click.option(
    "--read-data-subset",
    "share",
    metavar="SHARE",
    help="Read a share of the pages: 1/7 (the first of seven parts), 10% or 4GiB.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Decides which pages a share is: the same seed, the same pages.",
)
@click.option(
    "--threads", type=click.IntRange(1, 64), default=4, show_default=True, help="Reads at a time."
)
@json_option
def command(
    *, path: str, read_data: bool, share: str | None, seed: int, threads: int, as_json: bool
) -> int:
    """Check, print the counts, and say by the exit status what was found."""
    out = Output("verify", as_json=as_json)
    subset = _subset(read_data, share)
    store = one_store(path)
    payload = None
    with reading(store) as current:
        report = current.report
        if report.state == "live":
            raise StoreLocked("store-locked", f"{report.detail}; stop it first", path=store)
        damage = _structure(report)
        if subset is not None and report.keeps_index:
            payload = _read(current, subset, seed, threads, out)
    status = _status(report, damage, payload)
    fields = {
        "path": store,
        "state": report.state,
        "reason": report.reason,
        "damage": damage,
        "records": 0 if report.tables is None else len(report.tables.records),
        "pages": None if payload is None else asdict(payload.counts),
        "subset": None if payload is None else _subset_json(payload),
        "media": None if payload is None else asdict(payload.media),
    }
    lines = _as_text(report, damage, payload, asked=subset is not None)
    out.result(status is ExitCode.OK, fields, lines)
    return status


def _subset(read_data: bool, share: str | None) -> Subset | None:
    """Return what is to be read, or None for the structure alone."""
    if read_data and share is not None:
        raise UsageError("both-shares", "--read-data reads all; leave --read-data-subset out")
    if not read_data and share is None:
        return None
    from rangectl.subset import Subset

    return Subset.parse("100%" if share is None else share)


def _structure(report: StoreReport) -> list[str]:
    """Return what is damaged in the metadata, one line each."""
    damage = [
        f"superblock {'AB'[slot.copy_index]}: {slot.problem.message}"
        for slot in report.slots
        if slot.problem is not None
    ]
    if report.state == "unusable":
        damage.append(report.detail)
    if report.reason in _DAMAGED:
        damage.append(f"snapshot: {report.detail}")
    return damage


def _read(current: Reading, subset: Subset, seed: int, threads: int, out: Output) -> Payload | None:
    geometry, tables = current.report.geometry, current.report.tables
    if geometry is None or tables is None:
        return None
    from rangectl.payload_check import check_payload, page_sizes

    sizes = page_sizes(geometry, tables)
    chosen = subset.choose(sizes, seed)
    with out.progress("verify", int(sizes[chosen].sum())) as advance:
        counts, media = check_payload(current, geometry, tables, chosen, advance, threads)
    return Payload(counts, media, subset, seed, int(chosen.sum()), len(sizes))


def _status(report: StoreReport, damage: list[str], payload: Payload | None) -> ExitCode:
    if damage or (payload is not None and payload.counts.bad):
        return report.exit_code if report.state == "unsupported" else ExitCode.CHECK_FAILED
    return report.exit_code


def _subset_json(payload: Payload) -> dict[str, Any]:
    return {
        "share": payload.subset.text,
        "seed": payload.seed,
        "pages": payload.chosen_count,
        "of_pages": payload.page_count,
    }


def _as_text(
    report: StoreReport, damage: list[str], payload: Payload | None, *, asked: bool
) -> Iterator[str]:
    lines: list[tuple[str, str]] = [("state", state_line(report)), ("path", report.path)]
    if report.state != "warm":
        lines.append(("detail", report.detail))
    lines += [("damage", line) for line in damage] or [("structure", "ok")]
    if report.tables is not None:
        lines.append(("records", f"{len(report.tables.records):,}"))
    yield from facts(lines)
    if payload is not None:
        yield from facts(_payload_facts(payload))
        yield from _bad_lines(payload.counts)
    elif asked and not report.blank:
        yield from facts([("payload", "not read: an open would not serve it")])


def _payload_facts(payload: Payload) -> Iterator[tuple[str, str]]:
    counts, media = payload.counts, payload.media
    if payload.chosen_count < payload.page_count:
        share = f"{payload.subset.text} with seed {payload.seed}"
        yield (
            "subset",
            f"{share}: {payload.chosen_count:,} of {counted(payload.page_count, 'page')}",
        )
    yield "pages ok", f"{counts.ok:,}"
    yield "pages bad", f"{counts.bad:,}"
    yield "unverifiable", f"{counts.unverifiable:,} pages without a checksum"
    if counts.read_bytes:
        physical = media.physical_read_bytes
        told = "unknown" if physical is None else human_bytes(physical)
        how = "O_DIRECT" if media.direct else "buffered, after dropping the cached pages"
        verdict = "" if media.proved else "; not proved: some of it may have come from memory"
        yield (
            "media",
            f"{human_bytes(counts.read_bytes)} by {how}, the kernel counted {told}{verdict}",
        )


def _bad_lines(counts: PayloadCounts) -> Iterator[str]:
    if counts.bad:
        yield from facts([("records bad", f"{len(counts.bad_records):,}")])
    for page in counts.bad_pages:
        yield (
            f"bad page     record {page.record_id}, extent {page.extent}, layer"
            f" {page.layer_index}, from token {page.token_start} (page {page.page_index}),"
            f" at byte {page.offset} in pack {page.pack_index}: {page.problem}"
        )
    if counts.bad > len(counts.bad_pages):
        yield f"             and {counts.bad - len(counts.bad_pages):,} more"
