"""`rangectl drop`: takes a namespace, a tenant's root or a record out of closed stores.

Owns what is meant and the question before it goes; `rangekv.engine` does the removal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import click
from rangekv.engine.inspection import StoreReport, read_store
from rangekv.engine.pruning import Choice, NotWarm, Pruned, plan, prune
from rangekv.engine.removal import Removed, is_namespace_folder, remove_namespace
from rangekv.format.errors import ExitCode, StoreLocked, UsageError
from rangekv.format.tables import Tables

from rangectl.confirm import confirm_path
from rangectl.describe import content_line, state_line
from rangectl.output import Output, counted, facts, human_bytes
from rangectl.target import one_store, stores_at
from rangectl.verb import Verb, json_option, path_argument

NO_SALT_WORD = "no-salt"
_DIGITS_MIN = 8


@click.command(
    cls=Verb,
    help="Take a namespace, a tenant's root or a record out of closed stores."
    " Without an option PATH is the folder of a namespace and goes with all its ranks. With"
    " --root or --record the stores stay and reopen warm; the bytes of what went stay in the"
    " pack file until their room is used again.",
    examples=(
        "rangectl drop /kv/e883cc25e6c5",
        "rangectl drop /kv/e883cc25e6c5 --root 9f86d081884c7d65 --yes",
        "rangectl drop /kv/e883cc25e6c5/rank-0-of-1 --record 12 --dry-run",
    ),
    exits=(
        ExitCode.CHECK_FAILED,
        ExitCode.ENVIRONMENT,
        ExitCode.COLD,
        ExitCode.UNSUPPORTED,
        ExitCode.NO_STORE,
        ExitCode.LOCKED,
        ExitCode.OTHER_NAMESPACE,
    ),
)
@path_argument
@click.option(
    "--root",
    metavar="DIGEST",
    help="A tenant, by the first digits of its salt as inspect tree shows them, or no-salt;"
    " in every store below PATH.",
)
@click.option(
    "--record",
    type=click.IntRange(0),
    help="A record, by its id as inspect records shows it, and what continues it.",
)
@click.option("--yes", is_flag=True, help="Do not ask for the path again.")
@click.option("--dry-run", is_flag=True, help="Say what would go, and change nothing.")
@json_option
def command(
    *, path: str, root: str | None, record: int | None, yes: bool, dry_run: bool, as_json: bool
) -> int:
    """Ask, remove, and print what went."""
    out = Output("drop", as_json=as_json)
    if root is not None and record is not None:
        raise UsageError("both-kinds", "--root and --record are two drops; give one of them")
    if root is None and record is None:
        return _drop_namespace(path, out, yes=yes, dry_run=dry_run)
    choice = _of_root(root) if root is not None else _of_record(record or 0)
    stores = stores_at(path) if root is not None else [one_store(path)]
    reports = [read_store(store) for store in stores]
    planned = [plan(_warm(report), choice) for report in reports]
    if not any(one.records for one in planned):
        what = f"root {root!r}" if root is not None else f"record {record}"
        raise UsageError(
            "nothing-to-drop", f"no {what} here; see rangectl inspect PATH tree", path=path
        )
    if not dry_run:
        if not yes:
            confirm_path(path, "drop", " ".join(_loss(one) for one in planned))
        planned = [
            prune(report, choice) if one.records else one
            for report, one in zip(reports, planned, strict=True)
        ]
    fields = {"dry_run": dry_run, "path": path, "stores": [asdict(one) for one in planned]}
    out.result(True, fields, _pruned_lines(planned, dry_run))
    return ExitCode.OK


def _drop_namespace(path: str, out: Output, *, yes: bool, dry_run: bool) -> ExitCode:
    if not is_namespace_folder(path) and stores_at(path):
        raise UsageError(
            "not-a-namespace",
            "this is no namespace's folder (12 hex digits); name one, or --root or --record;"
            " rangectl inspect lists them",
            path=path,
        )
    removed = remove_namespace(path, dry_run=True)
    if not dry_run:
        if not yes:
            ranks = counted(len(removed), "store")
            size = human_bytes(sum(one.file_bytes for one in removed))
            held = "; ".join(
                content_line(read_store(one.path)) for one in removed if one.file_bytes
            )
            confirm_path(path, "drop", f"{path} is {ranks}, {size} ({held}). All of it will go.")
        removed = remove_namespace(path)
    fields = {
        "dry_run": dry_run,
        "path": path,
        "freed_bytes": sum(one.file_bytes for one in removed),
        "removed": [asdict(one) for one in removed],
    }
    out.result(True, fields, _removed_lines(path, removed, dry_run))
    return ExitCode.OK


def _warm(report: StoreReport) -> StoreReport:
    """Return the report of a store whose index can be changed; raises StoreLocked, NotWarm."""
    if report.state == "live":
        raise StoreLocked("store-locked", f"{report.detail}; stop it first", path=report.path)
    if not report.keeps_index:
        raise NotWarm(
            "not-warm",
            f"the store is {state_line(report)}: an open would discard its index, {report.detail};"
            " empty it with rangectl format",
            path=report.path,
        )
    return report


def _of_record(record_id: int) -> Choice:
    def choose(tables: Tables) -> set[int]:
        return {row for row, one in enumerate(tables.records) if one.record_id == record_id}

    return choose


def _of_root(text: str) -> Choice:
    """Return the choice of one tenant's records; raises UsageError for a digest that is none."""
    wanted = text.lower()
    digits = len(wanted) >= _DIGITS_MIN and set(wanted) <= set("0123456789abcdef")
    if wanted != NO_SALT_WORD and not digits:
        raise UsageError(
            "bad-root",
            f"--root {text!r}: expected {NO_SALT_WORD} or at least {_DIGITS_MIN} hex digits of a"
            " salt's digest; see rangectl inspect PATH tree",
        )

    def choose(tables: Tables) -> set[int]:
        if wanted == NO_SALT_WORD:
            meant = [0]
        else:
            named = ((root, digest.hex()) for root, digest in enumerate(tables.roots))
            meant = [root for root, name in named if root and name.startswith(wanted)]
        if len(meant) > 1:
            raise UsageError("ambiguous-root", f"--root {text!r} fits {len(meant)} roots")
        return {row for row, one in enumerate(tables.records) if one.root in meant}

    return choose


def _loss(one: Pruned) -> str:
    return f"{one.path}: {counted(one.records, 'record')}, {counted(one.tokens, 'token')} will go."


def _pruned_lines(planned: Sequence[Pruned], dry_run: bool) -> Iterator[str]:
    for one in planned:
        gone = f"{counted(one.records, 'record')}, {counted(one.tokens, 'token')}"
        left = f"{counted(one.records_left, 'record')}, {counted(one.tokens_left, 'token')}"
        yield from facts(
            [
                ("store", one.path),
                ("would drop" if dry_run else "dropped", gone),
                ("room", f"{human_bytes(one.freed_bytes)} free again"),
                ("left", left),
            ]
        )


def _removed_lines(path: str, removed: Sequence[Removed], dry_run: bool) -> Iterator[str]:
    for one in removed:
        yield from facts(
            [
                (
                    "would drop" if dry_run else "dropped",
                    f"{one.path}   {human_bytes(one.file_bytes)}",
                )
            ]
        )
    yield from facts([("namespace", f"{path} is {'still there' if dry_run else 'gone'}")])
