"""The picture of a restore benchmark: time against object count, and what each ablation adds.

Owns drawing with matplotlib, which only `--plot` needs; never measures.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rangekv.format.errors import EnvironmentFault, UsageError

if TYPE_CHECKING:
    from rangectl.benchmark_report import Report
    from rangectl.statistics import Paired

SUFFIXES = (".svg", ".png")


def require_plot(file: Path) -> None:
    """Raise UsageError where a picture of this name could not be drawn, before anything is run."""
    if file.suffix not in SUFFIXES:
        raise UsageError(
            "bad-plot", f"--plot {file}: expected a name that ends in {' or '.join(SUFFIXES)}"
        )
    try:
        import matplotlib as found
    except ImportError as error:
        raise UsageError(
            "no-matplotlib",
            "--plot needs matplotlib, which the extra `plot` brings: pip install 'rangekv[plot]'",
        ) from error
    del found


def draw(report: Report, file: Path) -> None:
    """Write the picture to `file`, replacing it; raises EnvironmentFault where that fails."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    panels = 2 if report.setup.ablations else 1
    figure, axes = pyplot.subplots(1, panels, figsize=(7 * panels, 5), squeeze=False)
    try:
        _draw_times(axes[0][0], report)
        if report.setup.ablations:
            _draw_ablations(axes[0][1], report)
        figure.tight_layout()
        figure.savefig(file)
    except OSError as error:
        raise EnvironmentFault(
            "plot-failed", f"the picture cannot be written: {error.strerror}", path=str(file)
        ) from error
    finally:
        pyplot.close(figure)


def _draw_times(axes: Any, report: Report) -> None:
    """Draw each arm's median over object counts, with its range; layerwise points stand alone."""
    whole = [result for result in report.points if not result.point.layerwise]
    layerwise = [result for result in report.points if result.point.layerwise]
    for arm in report.points[0].arms:
        colour = None
        for points, marker, line in ((whole, "o", "-"), (layerwise, "s", "none")):
            seconds = [result.arms[arm].seconds for result in points]
            middles = [median(one) for one in seconds]
            bars = axes.errorbar(
                [result.point.objects for result in points],
                middles,
                yerr=[
                    [middle - min(one) for middle, one in zip(middles, seconds, strict=True)],
                    [max(one) - middle for middle, one in zip(middles, seconds, strict=True)],
                ],
                marker=marker,
                linestyle=line,
                capsize=3,
                color=colour,
                label=arm if marker == "o" else None,
            )
            colour = bars.lines[0].get_color()
    axes.set_xscale("log", base=2)
    counts = sorted({result.point.objects for result in report.points})
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("objects of the same payload (squares: layerwise)")
    axes.set_ylabel("seconds, median and range")
    axes.set_title(f"Restore of {report.setup.payload_bytes / 2**30:g} GiB, {report.path}")
    axes.legend()


def _draw_ablations(axes: Any, report: Report) -> None:
    """Draw a bar for each ablation: what it adds at the largest number of objects."""
    result = max(report.points, key=lambda result: result.point.objects)
    names = list(report.setup.ablations)
    for offset, label, added in (
        (-0.2, "all layers", [result.added_seconds(name) for name in names]),
        (0.2, "first layer", [result.added_to_first_layer(name) for name in names]),
    ):
        axes.bar(
            [index + offset for index in range(len(names))],
            [one.median for one in added],
            width=0.4,
            yerr=[
                [one.median - _ends(one)[0] for one in added],
                [_ends(one)[1] - one.median for one in added],
            ],
            capsize=3,
            label=label,
        )
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("seconds added, median and range of pairs")
    axes.set_title(f"Ablations at {result.label}")
    axes.legend()


def _ends(added: Paired) -> tuple[float, float]:
    return added.interval or (added.low, added.high)
