"""The picture of the collectives: median time over size, a panel for each operation."""

from __future__ import annotations

import os

from fusedcomm.benchmarks.harness import CaseResult
from fusedcomm.benchmarks.harness.plot import COLOURS
from fusedcomm.benchmarks.harness.stats import median, quartiles

#: path -> colour and line; others take what is left.
_STYLES = {
    "fusedcomm": (COLOURS[1], "-"),
    "fusedcomm, symmetric": (COLOURS[5], "--"),
    "gloo": (COLOURS[0], "-"),
    "MPI": (COLOURS[2], "-"),
    "copies": (COLOURS[3], ":"),
}


def draw(results: list[CaseResult], title: str, path: str | os.PathLike[str]) -> None:
    """Write the picture; the file's ending gives the format.

    Lines are medians, bands lie between the quartiles. Raises ImportError without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ImportError("--plot needs matplotlib: pip install fusedcomm[cli]") from missing
    ops = list(dict.fromkeys(result.labels["op"] for result in results))
    figure = Figure(figsize=(3.4 * len(ops), 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(ops), sharey=True, squeeze=False)[0]
    for axes, op in zip(panels, ops, strict=True):
        mine = [result for result in results if result.labels["op"] == op]
        mine.sort(key=lambda result: result.labels["bytes"])
        for name in dict.fromkeys(name for result in mine for name in result.paths):
            colour, line = _STYLES.get(name, (COLOURS[6], ":"))
            found = [result for result in mine if name in result.paths]
            sizes = [result.labels["bytes"] for result in found]
            samples = [result.paths[name].samples_ms for result in found]
            bands = [quartiles(one) for one in samples]
            axes.plot(sizes, [1e3 * median(one) for one in samples], line, color=colour, label=name)
            axes.fill_between(
                sizes,
                [1e3 * low for low, _ in bands],
                [1e3 * high for _, high in bands],
                color=colour,
                alpha=0.2,
                linewidth=0,
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = [1 << 10, 1 << 15, 1 << 20, 1 << 25]
        axes.set_xticks(ticks, ["1 KB", "32 KB", "1 MB", "32 MB"])
        axes.set_title(op, fontsize=10)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("median, µs (band: quartiles)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.suptitle(title, fontsize=9)
    figure.savefig(path)
