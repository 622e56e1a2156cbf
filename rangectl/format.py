"""`rangectl format`: an existing store gets a new identity and an empty index.

Owns the question before the destruction; `rangekv.engine.reformat` does it.
"""

from __future__ import annotations

import os
import re
from uuid import UUID

import click
from rangekv.engine.inspection import StoreReport, read_store
from rangekv.engine.reformat import reformat
from rangekv.format.errors import (
    ExitCode,
    NotAStore,
    StoreLocked,
    UnsupportedVersion,
    UsageError,
)

from rangectl.binding_options import binding_options, read_binding
from rangectl.confirm import confirm_path
from rangectl.describe import content_line, superblock_json
from rangectl.output import Output, facts
from rangectl.target import one_store
from rangectl.verb import Verb, json_option, path_argument

_RANK_FOLDER = re.compile(r"(?:dp-\d+-)?rank-(\d+)-of-(\d+)", re.ASCII)


@click.command(
    cls=Verb,
    help="Give an existing store a new identity and an empty index."
    " The preallocated file stays; all that is cached in it is lost.",
    examples=("rangectl format /kv/blank/rank-0-of-1", "rangectl format /kv/test --yes"),
    exits=(
        ExitCode.CHECK_FAILED,
        ExitCode.ENVIRONMENT,
        ExitCode.UNSUPPORTED,
        ExitCode.NO_STORE,
        ExitCode.LOCKED,
    ),
)
@path_argument
@binding_options
@click.option(
    "--rank",
    type=click.IntRange(0),
    help="Where both superblocks are lost: whose store it is. Default: as its directory is called.",
)
@click.option("--world-size", type=click.IntRange(1), help="Goes with --rank: of how many.")
@click.option("--yes", is_flag=True, help="Do not ask for the path again.")
@click.option("--dry-run", is_flag=True, help="Say what would be lost, and change nothing.")
@json_option
def command(
    *,
    path: str,
    layers: int | None,
    token_bytes: int | None,
    block_tokens: int | None,
    namespace: tuple[str, ...],
    rank: int | None,
    world_size: int | None,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Ask, empty the store, and print what it was and what it is."""
    binding = read_binding(layers, token_bytes, block_tokens, namespace)
    store = one_store(path)
    before = read_store(store)
    if before.state == "live":
        raise StoreLocked("store-locked", f"{before.detail}; stop it first", path=store)
    if before.reason == "truncated-pack":
        raise NotAStore("truncated-pack", before.detail, path=store)
    if before.state == "unsupported":
        raise UnsupportedVersion(before.reason or "unsupported-version", before.detail, path=store)
    rank, world_size = _whose(before, rank, world_size)
    out = Output("format", as_json=as_json)
    lost = [("store", store), ("was", content_line(before))]
    if dry_run:
        out.result(
            True,
            {"dry_run": True, "path": store, "lost_tokens": _tokens(before)},
            facts([*lost, ("would be", "empty, under a new identity")]),
        )
        return ExitCode.OK
    if not yes:
        loss = f"{store} is {content_line(before)}. All of it will be lost."
        confirm_path(store, "format", loss)
    after = reformat(
        store,
        model=binding.model,
        namespace=binding.namespace,
        rank=rank,
        world_size=world_size,
    )
    out.result(
        True,
        {"dry_run": False, "path": store, "lost_tokens": _tokens(before), **superblock_json(after)},
        facts([*lost, ("is", f"empty, {UUID(bytes=after.store_uuid)}   epoch {after.epoch}")]),
    )
    return ExitCode.OK


def _whose(before: StoreReport, rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return (rank, world size) of the store: its superblock tells, or the options, or its name."""
    if (rank is None) != (world_size is None):
        raise UsageError("bad-rank", "--rank and --world-size go together")
    known = before.superblock
    if known is not None:
        if rank is not None:
            raise UsageError(
                "bad-rank",
                f"the superblock says rank {known.rank} of {known.world_size};"
                " leave --rank and --world-size out",
                path=before.path,
            )
        return known.rank, known.world_size
    if rank is None or world_size is None:
        named = _RANK_FOLDER.fullmatch(os.path.basename(before.path))
        rank, world_size = (int(named[1]), int(named[2])) if named else (0, 1)
    if rank >= world_size:
        raise UsageError("bad-rank", f"rank {rank} of {world_size} cannot be", path=before.path)
    return rank, world_size


def _tokens(before: StoreReport) -> int:
    return 0 if before.tables is None else before.tables.token_count
