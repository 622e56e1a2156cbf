"""`rangectl inspect`: what a store holds, and what an open would make of it.

Owns the choice between one store and a list; never writes and never repairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
from rangekv.engine.inspection import StoreReport, read_store
from rangekv.format.errors import (
    EnvironmentFault,
    ExitCode,
    RangeError,
    StoreMissing,
    UsageError,
)

from rangectl.describe import state_line, store_facts, store_json, token_facts, used_bytes
from rangectl.output import Output, columns, facts, human_bytes
from rangectl.target import one_store, stores_at
from rangectl.verb import Verb, json_option, no_such, path_argument

VIEWS = ("superblock", "snapshot", "journal", "extents", "records", "packs", "tree", "live")
# The worst state of several stores decides the exit status.
_SEVERITY = (
    ExitCode.OK,
    ExitCode.COLD,
    ExitCode.NO_STORE,
    ExitCode.USAGE,
    ExitCode.ENVIRONMENT,
    ExitCode.UNSUPPORTED,
    ExitCode.CHECK_FAILED,
)

Refused = Mapping[str, RangeError]
"""Stores that cannot even be looked at, by path."""


def _complete_view(context: click.Context, argument: click.Parameter, incomplete: str) -> list[str]:
    return [view for view in VIEWS if view.startswith(incomplete)]


@click.command(
    cls=Verb,
    help="Show what a store holds and what an open would make of it."
    " PATH is a store or a directory above stores; several are listed."
    " VIEW shows one part as it lies on disk, damaged or not, and marks each bad field:"
    " superblock, snapshot, journal, extents, records, packs (a map), tree (of tokens)."
    " live asks the engine that is serving the store.",
    examples=(
        "rangectl inspect /kv",
        "rangectl inspect /kv packs",
        "rangectl inspect /kv superblock --hex",
        "rangectl inspect /kv --diff",
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
@click.argument("view", required=False, metavar="[VIEW]", shell_complete=_complete_view)
@click.option("--hex", "as_hex", is_flag=True, help="With VIEW: offsets and bytes too.")
@click.option(
    "--diff",
    is_flag=True,
    help="Name the fields in which the namespaces below PATH differ; VIEW may be a second PATH.",
)
@click.option("--show-tokens", is_flag=True, help="Print token ids: they are what users wrote.")
@json_option
def command(
    *, path: str, view: str | None, as_hex: bool, diff: bool, show_tokens: bool, as_json: bool
) -> int:
    """Read and print; damage is shown and told by the exit status, not raised."""
    if diff:
        from rangectl.namespace_diff import show_differences

        return show_differences([path] if view is None else [path, view], as_json=as_json)
    if view is not None:
        return _show_view(path, view, as_hex, show_tokens, as_json)
    if as_hex:
        raise UsageError("hex-without-view", f"--hex shows one of {', '.join(VIEWS)}; name one")
    found = stores_at(path)
    reports, refused = _read_all(found)
    told = [*(report.exit_code for report in reports), *(one.exit_code for one in refused.values())]
    status = max(told, key=_SEVERITY.index)
    out = Output("inspect", as_json=as_json)
    if len(found) == 1:
        fields = store_json(reports[0], show_tokens=show_tokens)
        human = _one(reports[0], show_tokens)
    else:
        fields = {
            "stores": [
                *(store_json(report, show_tokens=show_tokens) for report in reports),
                *(
                    {"path": one, "state": "unreadable", "reason": why.code, "detail": why.message}
                    for one, why in refused.items()
                ),
            ],
            "namespaces": _namespaces(reports),
        }
        human = _several(reports, refused)
    out.result(status is ExitCode.OK, fields, human)
    return status


def _read_all(paths: Sequence[str]) -> tuple[list[StoreReport], Refused]:
    """Look at every store; of several, one that cannot be looked at does not hide the others."""
    if len(paths) == 1:
        return [read_store(paths[0])], {}
    reports: list[StoreReport] = []
    refused: dict[str, RangeError] = {}
    for path in paths:
        try:
            reports.append(read_store(path))
        except (StoreMissing, UsageError, EnvironmentFault) as error:
            refused[path] = error
    return reports, refused


def _show_view(path: str, view: str, as_hex: bool, show_tokens: bool, as_json: bool) -> ExitCode:
    if view not in VIEWS:
        raise UsageError("unknown-view", no_such("view", view, list(VIEWS)))
    if view == "live":
        from rangectl.live import live_lines, live_stats

        store = one_store(path)
        stats = live_stats(store)
        fields = {"path": store, "live": stats}
        Output("inspect", as_json=as_json).result(True, fields, live_lines(store, stats))
        return ExitCode.OK
    from rangectl.inspect_view import Wanted, show

    shown = show(one_store(path), view, Wanted(as_json, as_hex, show_tokens))
    status = ExitCode.CHECK_FAILED if shown.bad_fields else shown.report.exit_code
    Output("inspect", as_json=as_json).result(status is ExitCode.OK, shown.fields, shown.lines)
    return status


def _one(report: StoreReport, show_tokens: bool) -> Iterator[str]:
    yield from facts(store_facts(report))
    if show_tokens and report.tables is not None:
        yield from facts(token_facts(report.tables))


def _several(reports: Sequence[StoreReport], refused: Refused) -> Iterator[str]:
    """Yield the stores one by one, then what each namespace takes over all its ranks."""
    yield from columns(_rows(reports, refused))
    yield from (f"unreadable   {why.line()}" for why in refused.values())
    yield ""
    head = ("namespace", "stores", "capacity", "used", "tokens", "model")
    yield from columns(
        [
            head,
            *(
                (
                    one["namespace"] or "blank",
                    str(one["stores"]),
                    human_bytes(one["capacity_bytes"]),
                    human_bytes(one["used_bytes"]),
                    f"{one['tokens']:,}",
                    str(one["model"] or "-"),
                )
                for one in _namespaces(reports)
            ),
        ]
    )


def _namespaces(reports: Sequence[StoreReport]) -> list[dict[str, Any]]:
    """Return what each namespace holds, summed over its stores; blank ones are one group."""
    groups: dict[str | None, dict[str, Any]] = {}
    for report in reports:
        if report.superblock is None:
            continue
        namespace = report.namespace
        name = None if namespace is None else namespace.folder
        group = groups.setdefault(
            name,
            {
                "namespace": name,
                "model": None if namespace is None else namespace.fields.get("model"),
                "stores": 0,
                "capacity_bytes": 0,
                "used_bytes": 0,
                "tokens": 0,
            },
        )
        group["stores"] += 1
        group["capacity_bytes"] += report.superblock.capacity_bytes
        group["used_bytes"] += used_bytes(report)
        group["tokens"] += 0 if report.tables is None else report.tables.token_count
    return list(groups.values())


def _rows(reports: Sequence[StoreReport], refused: Refused) -> Iterator[Sequence[str]]:
    yield "path", "state", "namespace", "capacity", "used", "tokens"
    for report in reports:
        superblock, tables = report.superblock, report.tables
        yield (
            report.path,
            state_line(report),
            "blank" if report.namespace is None else report.namespace.folder,
            "-" if superblock is None else human_bytes(superblock.capacity_bytes),
            "-" if tables is None else human_bytes(used_bytes(report)),
            "-" if tables is None else f"{tables.token_count:,}",
        )
    for path, why in refused.items():
        yield path, f"unreadable ({why.code})", "-", "-", "-", "-"
