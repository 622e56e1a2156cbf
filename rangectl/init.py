"""`rangectl init`: preallocate stores, so that lack of space shows now and not while serving.

Owns the arguments and the printing; `rangekv.engine.stores` makes the files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

import click
from rangekv.engine.allocation import Progress
from rangekv.engine.create import Created, create
from rangekv.engine.inspection import read_store
from rangekv.engine.stores import create_ranks
from rangekv.format.errors import ExitCode, UsageError
from rangekv.format.geometry import DATA_OFFSET

from rangectl.binding_options import (
    BLOCK_TOKENS,
    Binding,
    binding_options,
    model_binding,
    read_binding,
)
from rangectl.describe import content_line, geometry_json, shape_facts
from rangectl.output import Advance, Output, facts, human_bytes
from rangectl.verb import Size, Verb, json_option, path_argument


@click.command(
    cls=Verb,
    help="Preallocate a store."
    " It is blank, and the first engine that opens it binds it to its model; with the geometry"
    " options or a model's config the store is made in PATH itself and bound at once.",
    examples=(
        "rangectl init /kv --capacity 64GiB --world-size 2",
        "rangectl init /kv/test --capacity 16GiB --model Llama-3.1-8B/config.json --dry-run",
        "rangectl init /kv/test --capacity 4GiB --layers 32 --token-bytes 4096 --block-tokens 16"
        " --namespace model=test",
    ),
    exits=(ExitCode.ENVIRONMENT, ExitCode.LOCKED),
)
@path_argument
@click.option(
    "--capacity", type=Size(), required=True, help="KV to hold in all, shared by the ranks."
)
@click.option(
    "--world-size",
    default=1,
    show_default=True,
    type=click.IntRange(1, 65_536),
    help="Ranks of the engine: one store each.",
)
@binding_options
@click.option(
    "--model", "config", metavar="FILE", help="Take the geometry from a model's config.json."
)
@click.option(
    "--tp-size",
    type=click.IntRange(1, 65_536),
    help="With --model: ranks that share its KV heads, one store each below PATH.",
)
@click.option("--zero", is_flag=True, help="Write every byte, so that first saves are faster.")
@click.option("--dry-run", is_flag=True, help="Say what would be made, and make nothing.")
@json_option
def command(
    *,
    path: str,
    capacity: int,
    world_size: int,
    layers: int | None,
    token_bytes: int | None,
    block_tokens: int | None,
    namespace: tuple[str, ...],
    config: str | None,
    tp_size: int | None,
    zero: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Make the stores and print what was made."""
    out = Output("init", as_json=as_json)
    shape = None
    if config is not None:
        if layers is not None or token_bytes is not None:
            raise UsageError(
                "two-geometries", "--model says --layers and --token-bytes; leave them"
            )
        from rangectl.model_config import read_model_config

        shape = read_model_config(config)
        binding = model_binding(shape, tp_size or 1, block_tokens or BLOCK_TOKENS, namespace)
    else:
        if tp_size is not None:
            raise UsageError("no-model", "--tp-size divides the heads of --model; give that too")
        binding = read_binding(layers, token_bytes, block_tokens, namespace)
    if binding.model is not None and world_size > 1:
        raise UsageError("half-bound", "a bound store is one rank's; leave --world-size out")
    with out.progress("init", capacity) as advance:
        try:
            made = _make(
                path,
                capacity,
                tp_size or world_size,
                binding,
                zero=zero,
                dry_run=dry_run,
                progress=_stepwise(advance),
            )
        except UsageError as refused:
            if refused.code != "store-exists" or refused.path is None:
                raise
            raise _exists(refused.path) from refused
    fields = _as_json(made, dry_run) | {"model": None if shape is None else asdict(shape)}
    lines = _as_text(made, dry_run)
    if shape is not None:
        heads = f"{shape.layer_count} layers, {shape.kv_heads} KV heads of {shape.head_dim}"
        model = f"{shape.name}   {heads}, {shape.kv_dtype}"
        lines = chain(facts([("model", model)]), lines)
    out.result(True, fields, lines)
    return ExitCode.OK


def _make(path: str, capacity: int, world_size: int, binding: Binding, **how: Any) -> list[Created]:
    how |= {"model": binding.model, "namespace": binding.namespace}
    if binding.model is None or world_size > 1:
        return create_ranks(path, capacity_bytes=capacity, world_size=world_size, **how)
    return [create(path, capacity_bytes=capacity, **how)]


def _exists(path: str) -> UsageError:
    """Say what is there already."""
    return UsageError(
        "store-exists",
        f"a store is here already ({content_line(read_store(path))}); look at it with rangectl"
        " inspect, empty it with rangectl format",
        path=path,
    )


def _stepwise(advance: Advance) -> Progress:
    """Turn "so far" of one store after another into steps of one bar."""
    last = 0

    def progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal last
        advance(done_bytes - last)
        last = 0 if done_bytes == total_bytes else done_bytes

    return progress


def _as_json(made: Sequence[Created], dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "stores": [
            {
                "path": one.path,
                "file_bytes": one.file_bytes,
                "capacity_bytes": one.file_bytes - DATA_OFFSET,
                "blank": one.geometry is None,
                "geometry": None if one.geometry is None else geometry_json(one.geometry),
                "filesystem": one.filesystem,
                "free_bytes_before": one.free_bytes,
                "can_be_warm": one.can_be_warm,
            }
            for one in made
        ],
    }


def _as_text(made: Sequence[Created], dry_run: bool) -> Iterator[str]:
    for one in made:
        yield from facts([("would create" if dry_run else "created", one.path), *_shape(one)])


def _shape(one: Created) -> Iterator[tuple[str, str]]:
    capacity_bytes = one.file_bytes - DATA_OFFSET
    if one.geometry is None:
        yield "capacity", f"{human_bytes(capacity_bytes)}, blank: the first engine binds it"
    else:
        yield from shape_facts(one.geometry, capacity_bytes)
    yield "file", f"{one.file_bytes} bytes on {one.filesystem}, all of them allocated"
    if not one.can_be_warm:
        yield "warning", f"{one.filesystem} cannot prove a file's identity: never warm after close"
