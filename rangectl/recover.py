"""`rangectl recover`: do offline what an open would do after a session that did not close.

Owns what is said of it; the open and the close are the engine's.
"""

from __future__ import annotations

import click
from rangekv.engine.inspection import StoreReport, read_store
from rangekv.engine.pruning import prune
from rangekv.format.errors import (
    ExitCode,
    NotAStore,
    StoreLocked,
    UnsupportedVersion,
)

from rangectl.describe import content_line
from rangectl.output import Output, facts
from rangectl.target import one_store
from rangectl.verb import Verb, json_option, path_argument

_LOST = {
    "would-recover": "what was published after the last commit",
    "cold": "all of it; the next session starts empty",
}


@click.command(
    cls=Verb,
    help="Keep what the journal of a killed session proves."
    " The store is warm afterwards. The next engine would do the same; this does it now, and says"
    " what is kept and what is lost.",
    examples=("rangectl recover /kv --dry-run", "rangectl recover /kv --json"),
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
@click.option("--dry-run", is_flag=True, help="Say what would be kept, and change nothing.")
@json_option
def command(*, path: str, dry_run: bool, as_json: bool) -> int:
    """Look, recover where there is something to recover, and print what became of it."""
    store = one_store(path)
    found = read_store(store)
    _refuse(found)
    recovers = found.state == "would-recover" and not dry_run
    state: str = found.state
    records, tokens = 0, 0
    if recovers:
        kept = prune(found, lambda _: set())
        state, records, tokens = "recovered", kept.records_left, kept.tokens_left
    elif found.tables is not None and found.reason is None:
        records, tokens = len(found.tables.records), found.tables.token_count
    lost = _LOST.get(found.state, "nothing")
    Output("recover", as_json=as_json).result(
        found.reason is None,
        {
            "dry_run": dry_run,
            "path": store,
            "found": found.state,
            "state": state,
            "reason": found.reason,
            "detail": found.detail,
            "records": records,
            "tokens": tokens,
            "lost": lost,
        },
        facts(
            [
                ("store", store),
                ("found", content_line(found)),
                *([("detail", found.detail)] if found.reason is not None else []),
                ("lost", lost),
                ("now", "warm" if recovers else "as it was"),
            ]
        ),
    )
    return found.exit_code


def _refuse(found: StoreReport) -> None:
    if found.state == "live":
        raise StoreLocked("store-locked", f"{found.detail}; stop it first", path=found.path)
    if found.state == "unusable":
        raise NotAStore(found.reason or "not-a-store", found.detail, path=found.path)
    if found.state == "unsupported":
        raise UnsupportedVersion(
            found.reason or "unsupported-version", found.detail, path=found.path
        )
