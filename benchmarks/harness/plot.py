"""The picture of a benchmark: per case, each path's median time over the baseline's."""

from __future__ import annotations

import os

from fusedcomm.benchmarks.harness.case import CaseResult
from fusedcomm.benchmarks.harness.stats import compare

#: Okabe and Ito's palette, in the order in which paths first occur.
COLOURS = ("#999999", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")


def draw(results: list[CaseResult], title: str, path: str | os.PathLike[str]) -> None:
    """Write the picture; the file's ending gives the format.

    A bar is the path's time as a multiple of the baseline's (shorter is faster), its whisker the
    95 % interval. Raises ImportError when matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ImportError("--plot needs matplotlib: pip install fusedcomm[cli]") from missing
    names = list(dict.fromkeys(name for result in results for name in result.paths))
    rows = sum(len(result.paths) + 1 for result in results)
    figure = Figure(figsize=(10, 1.6 + 0.2 * rows), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    labelled: set[str] = set()
    longest = 1.0
    ticks: list[tuple[float, str]] = []
    row = 0
    for result in results:
        baseline = result.paths[result.baseline]
        label = f"{result.name}\n1 = {result.baseline}"
        ticks.append((row + (len(result.paths) - 1) / 2, label))
        for name, measured in result.paths.items():
            ratio = compare((measured.samples_ms, baseline.samples_ms))
            axes.barh(
                row,
                ratio.value,
                height=0.85,
                color=COLOURS[names.index(name) % len(COLOURS)],
                xerr=[[ratio.value - ratio.low], [ratio.high - ratio.value]],
                error_kw={"elinewidth": 0.8},
                label=None if name in labelled else name,
            )
            labelled.add(name)
            longest = max(longest, ratio.value)
            row += 1
        row += 1
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks([at for at, _ in ticks], [text for _, text in ticks], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * longest)  # a whisker may be longer: it is cut
    axes.set_xlabel("time relative to the baseline (shorter is faster)")
    figure.suptitle(title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=len(names))
    figure.savefig(path)
