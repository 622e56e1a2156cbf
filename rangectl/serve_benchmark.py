"""`rangectl serve-benchmark`: time to the first token of a vLLM server that restores.

Owns the arguments and the printing; `serve_run` asks and `server` runs vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click
from rangekv.format.errors import ExitCode, UsageError

from rangectl.output import Output, columns
from rangectl.scratch import scratch_directory
from rangectl.serve_connectors import (
    example_transfer,
    leave_page_cache,
    offers_example,
    range_transfer,
)
from rangectl.serve_run import ARMS, EXAMPLE, Samples, ServePlan, run
from rangectl.server import Server, running
from rangectl.statistics import PAIRS_MIN, Paired
from rangectl.verb import EXISTING_DIRECTORY, Size, Verb, json_option

if TYPE_CHECKING:
    from rangectl.serve_kv import Comparison

TARGET = 1.10
"""Range after a restart ÷ vLLM's own prefix-cache hit, while saves go on."""

VOCABULARY_DEFAULT = 10_000
RATIOS = (("range", "prefix_cache"), ("range", "recompute"), ("range", EXAMPLE))


@click.command(
    cls=Verb,
    help="Measure how soon a vLLM server that restores a prefix answers.",
    examples=(
        "rangectl serve-benchmark Qwen/Qwen3-0.6B --dir /kv --capacity 32GiB",
        "rangectl serve-benchmark ./model --prefix 2048 --repeat 15 -- --dtype float32",
    ),
    exits=(ExitCode.CHECK_FAILED, ExitCode.ENVIRONMENT),
)
@click.argument("model")
@click.argument("server_arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- VLLM_ARGS]")
@click.option(
    "--dir",
    "folder",
    default=".",
    show_default=True,
    type=EXISTING_DIRECTORY,
    help="Directory on the disk to measure; all that is written there is removed.",
)
@click.option(
    "--capacity",
    type=Size(),
    default="8GiB",
    show_default=True,
    help="Of the store; about 2.5 times the KV of all prefixes. Too little is refused.",
)
@click.option("--prefix", "prefix_tokens", default=2048, show_default=True, help="In tokens.")
@click.option("--suffix", "suffix_tokens", default=64, show_default=True, help="In tokens.")
@click.option(
    "--repeat",
    default=5,
    show_default=True,
    type=click.IntRange(1, 1000),
    help=f"Prefixes, each of them one pair of every arm; a verdict takes {PAIRS_MIN}.",
)
@click.option(
    "--beside",
    default=3,
    show_default=True,
    type=click.IntRange(0, 1000),
    help="Further prefixes, restored while another request decodes.",
)
@click.option(
    "--example/--no-example",
    default=True,
    show_default=True,
    help="Measure vLLM's ExampleConnector too. It knows whole prompts only and shares no server "
    "with another connector: it is asked the same prompts as Range, in the same order, but minutes "
    "later, so its pairs are of prompts and not of moments.",
)
@click.option("--load-mode", default="auto", type=click.Choice(["auto", "layerwise", "async"]))
@click.option("--start-timeout", "start_s", default=600.0, help="Seconds for vLLM to start.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@json_option
def command(
    *,
    model: str,
    server_arguments: tuple[str, ...],
    folder: Path,
    capacity: int,
    prefix_tokens: int,
    suffix_tokens: int,
    repeat: int,
    beside: int,
    example: bool,
    load_mode: str,
    start_s: float,
    seed: int,
    as_json: bool,
) -> int:
    """Run the servers and print; a wrong answer, wrong KV or no hit is a failed check."""
    from rangectl.serve_kv import compare, require_room

    out = Output("serve-benchmark", as_json=as_json)
    offered = example and offers_example()
    plan = ServePlan(
        prefix_tokens,
        suffix_tokens,
        repeat,
        beside,
        seed,
        vocabulary=_vocabulary(model),
        example=offered,
    )
    with scratch_directory(folder, "serve") as scratch:
        stores = {name: scratch / name for name in ("range", EXAMPLE)}
        for store in stores.values():
            store.mkdir()
        transfers = {
            "range": range_transfer(
                stores["range"], {"capacity": capacity, "load_mode": load_mode}
            ),
            EXAMPLE: example_transfer(stores[EXAMPLE]),
        }

        @contextmanager
        def launch(connector: str, part: str) -> Iterator[Server]:
            log = scratch / f"{connector}-{part}.log"
            leave_page_cache(stores[EXAMPLE])
            if (connector, part) == ("range", "measure"):
                require_room(stores["range"], repeat + beside)
            transfer = transfers[connector]
            with running(model, transfer, server_arguments, log, start_s=start_s) as server:
                yield server

        requests = 2 * (1 + offered) * (repeat + beside)
        with out.progress("serve-benchmark", requests) as advance:
            samples = run(plan, launch, advance)
        kv = compare(stores["range"], samples.promises)
    if example and not offered:
        samples.absent[EXAMPLE] = "the installed vLLM does not have it"
    faults = samples.faults + kv.faults
    out.result(not faults, _as_json(plan, samples, kv), _human(plan, samples, kv))
    return ExitCode.CHECK_FAILED if faults else ExitCode.OK


def _vocabulary(model: str) -> int:
    """Return how many token ids a model on disk knows; of one from a hub, what all of them do."""
    path = Path(model, "config.json")
    if not path.exists():
        return VOCABULARY_DEFAULT
    try:
        config = json.loads(path.read_text("utf-8"))
        return int(config.get("text_config", config)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            "bad-model", f"its config.json names no vocab_size: {error}", path=str(path)
        ) from None


def _ratios(samples: Samples) -> dict[str, Paired]:
    return {
        f"{upper} ÷ {lower}": Paired.ratio(samples.seconds[upper], samples.seconds[lower])
        for upper, lower in RATIOS
        if lower in samples.seconds
    }


def _as_json(plan: ServePlan, samples: Samples, kv: Comparison) -> dict[str, object]:
    return {
        "prefix_tokens": plan.prefix_tokens,
        "suffix_tokens": plan.suffix_tokens,
        "seed": plan.seed,
        "arms": {
            arm: {"first_token_seconds": samples.seconds[arm], "cached_tokens": samples.cached[arm]}
            for arm in ARMS
            if arm in samples.seconds
        },
        "absent": samples.absent,
        "ratios": {
            name: {"median": each.median, "low": each.low, "high": each.high}
            for name, each in _ratios(samples).items()
        },
        "beside": {
            "quiet_gap_seconds": samples.quiet_gap_s,
            "longest_gap_seconds": samples.longest_gap_s,
        },
        "kv": {
            "promised_tokens": kv.promised_tokens,
            "behind_tokens": kv.behind_tokens,
            "layers": kv.layer_count,
            "largest_difference": kv.largest if isfinite(kv.largest) else None,
            "tolerance": kv.tolerance,
        },
        "faults": samples.faults + kv.faults,
    }


def _human(plan: ServePlan, samples: Samples, kv: Comparison) -> Iterator[str]:
    yield f"prompts      {plan.prefix_tokens:,} tokens of prefix, {plan.suffix_tokens} of their own"
    yield f"samples      {plan.repeat} of each arm, taken in turn, seed {plan.seed}; median (range)"
    if EXAMPLE in samples.seconds:
        yield f"             {EXAMPLE}: on the same prompts, by a server of its own afterwards"
    yield ""
    rows = [("arm", "first token", "cached tokens")]
    for arm in ARMS:
        if arm in samples.seconds:
            cached = samples.cached[arm]
            rows.append((arm, _seconds(samples.seconds[arm]), f"{min(cached):,}-{max(cached):,}"))
    yield from columns(rows)
    for arm, reason in samples.absent.items():
        yield f"{arm} is left out: {reason}"
    yield ""
    for name, ratio in _ratios(samples).items():
        target = TARGET if name.endswith("prefix_cache") else None
        verdict = None if target is None else ratio.verdict(target)
        yield (
            f"{name}  {ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"
            + (f"  target ≤ {target:.2f}" if target is not None else "")
            + (f": {verdict.value}" if verdict is not None else "")
        )
    if plan.repeat < PAIRS_MIN:
        yield f"no verdict below {PAIRS_MIN} pairs: --repeat {PAIRS_MIN} gives one"
    if samples.quiet_gap_s:
        yield ""
        yield f"a request that decodes: {1e3 * median(samples.quiet_gap_s):.0f} ms between tokens"
    for arm, gaps in samples.longest_gap_s.items():
        yield f"longest beside {arm}: {1e3 * median(gaps):.0f} ms"
    yield ""
    yield (
        f"KV compared: {kv.promised_tokens:,} tokens x {kv.layer_count} layers, largest difference "
        f"{kv.largest:.2g} of an element's RMS (allowed {kv.tolerance:g})"
    )
    yield f"and computed on top of them: {kv.behind_tokens:,} tokens"
    for fault in samples.faults + kv.faults:
        yield f"FAULT {fault}"


def _seconds(samples: list[float]) -> str:
    return f"{median(samples):.3f} s ({min(samples):.3f}-{max(samples):.3f})"
