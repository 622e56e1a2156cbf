"""`rangectl restore-benchmark`: what a restore costs on this machine, at every object size.

Owns the arguments and the printing; `benchmark` runs and `benchmark_report` counts.
"""

from __future__ import annotations

from pathlib import Path

import click
from rangekv.format.errors import ExitCode
from rangekv.format.geometry import ModelGeometry

from rangectl.ablations import ABLATIONS
from rangectl.output import Output
from rangectl.verb import EXISTING_DIRECTORY, Listed, Size, Verb, device_option, json_option


@click.command(
    cls=Verb,
    help="Measure what restoring a prefix costs, at every object size.",
    examples=(
        "rangectl restore-benchmark --dir /kv",
        "rangectl restore-benchmark --dir /kv --repeat 15 --json",
        "rangectl restore-benchmark --device cuda --payload-path gds",
        "rangectl restore-benchmark --ablate scalar-index,object-issue --plot range.svg",
    ),
    exits=(ExitCode.CHECK_FAILED, ExitCode.ENVIRONMENT),
)
@click.option(
    "--dir",
    "folder",
    default=".",
    show_default=True,
    type=EXISTING_DIRECTORY,
    help="Directory on the disk to measure; all that is written there is removed.",
)
@click.option(
    "--payload",
    type=Size(),
    default="2GiB",
    show_default=True,
    help="KV of the prefix; the run takes three times as much disk and 1.4 times memory.",
)
@click.option("--layers", default=32, show_default=True, type=click.IntRange(1, 1024))
@click.option("--token-bytes", default=4096, show_default=True, help="K and V of a token, a layer.")
@click.option("--block-tokens", default=8, show_default=True, help="Tokens of a block.")
@click.option(
    "--repeat",
    default=5,
    show_default=True,
    type=click.IntRange(1, 1000),
    help="Runs of each arm at each object size; a verdict takes 15.",
)
@click.option(
    "--compute-ms-per-layer",
    default=0.0,
    type=click.FloatRange(0),
    help="Also restore for a consumer that computes so long on each layer.",
)
@click.option(
    "--ablate",
    "ablations",
    default=(),
    type=Listed(click.Choice(list(ABLATIONS))),
    help=f"Also run the range arm with one cost put back: any of {', '.join(ABLATIONS)}.",
)
@click.option(
    "--claim-after-ms",
    default=20.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Time between lookup and claim for the ablation no-prefetch.",
)
@click.option(
    "--concurrent",
    "concurrency",
    default=(),
    type=Listed(click.IntRange(1, 64)),
    help="Also restore so many requests at once, as in 1,2,4,8,16, and beside saves.",
)
@click.option(
    "--read-workers",
    default=8,
    show_default=True,
    type=click.IntRange(1, 64),
    help="Spans that Range's arms read at once, the engine's setting read_workers.",
)
@device_option("Where Range's banks and the blocks that it restores to lie.")
@click.option(
    "--payload-path",
    type=click.Choice(["posix", "compat", "gds"]),
    help="Which way Range's bytes take: posix, with --device cuda gds; what runs is printed.",
)
@click.option("--fio", is_flag=True, help="Also read the same spans with fio.")
@click.option(
    "--plot",
    "picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw time against object size into FILE.svg or FILE.png.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@click.option("--allow-buffered", is_flag=True, help="Go on where there is no O_DIRECT.")
@json_option
def command(
    *,
    folder: Path,
    payload: int,
    layers: int,
    token_bytes: int,
    block_tokens: int,
    repeat: int,
    compute_ms_per_layer: float,
    ablations: tuple[str, ...],
    claim_after_ms: float,
    concurrency: tuple[int, ...],
    read_workers: int,
    device: str,
    payload_path: str | None,
    fio: bool,
    picture: Path | None,
    seed: int,
    allow_buffered: bool,
    as_json: bool,
) -> int:
    """Run and print; a count that depends on the object size is a failed check."""
    # Imported late: numpy is needed for the run, not for the help.
    from rangectl.benchmark import run_benchmark
    from rangectl.benchmark_plan import Setup
    from rangectl.benchmark_plot import draw, require_plot
    from rangectl.benchmark_tables import human

    out = Output("restore-benchmark", as_json=as_json)
    setup = Setup(
        folder=folder,
        model=ModelGeometry(layers, token_bytes, block_tokens),
        payload_bytes=payload,
        repeat=repeat,
        seed=seed,
        allow_buffered=allow_buffered,
        compute_seconds=compute_ms_per_layer / 1000,
        ablations=ablations,
        claim_delay_seconds=claim_after_ms / 1000,
        concurrency=concurrency,
        read_workers=read_workers,
        device=device,
        payload_path=payload_path or ("posix" if device == "cpu" else "gds"),
        fio=fio,
    )
    if picture is not None:
        require_plot(picture)
    total_bytes = len(setup.points()) * repeat * payload
    with out.progress("restore-benchmark", total_bytes) as advance:
        report = run_benchmark(setup, advance)
    if picture is not None:
        draw(report, picture)
    held = not report.faults()
    out.result(held, report.as_json(), human(report))
    return ExitCode.OK if held else ExitCode.CHECK_FAILED
