"""The study as plots."""

from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from runtime.models import MODELS
from runtime.pool_picture import draw_pool
from runtime.study import CLAIMS
from runtime.waste import Waste

SHARES = (("tokens", "tab:green"), ("internal", "tab:orange"), ("external", "tab:red"), ("free", "0.9"))


def draw_all(rows: Sequence[Waste], folder: Path) -> list[Path]:
    """Every picture of the study; returns their paths."""
    import matplotlib

    matplotlib.use("Agg")  # no window, on any machine
    pictures = {
        "utilisation.png": _draw_utilisation,
        "pool_shares.png": _draw_shares,
        "block_size.png": _draw_block_size,
        "at_once.png": _draw_at_once,
        "preemptions.png": _draw_preemptions,
        "copied.png": _draw_copied,
    }
    for name, draw in pictures.items():
        draw(rows, folder / name)
    draw_pool(folder / "pool.png")
    return [folder / name for name in (*pictures, "pool.png")]


def _traces(rows: Sequence[Waste]) -> list[str]:
    """Traces in order; those with prefixes stand with the trace that they were made from."""
    return list(dict.fromkeys(row.trace.removesuffix("+prefix") for row in rows))


def _of(rows: Sequence[Waste], trace: str) -> list[Waste]:
    return [row for row in rows if row.trace.removesuffix("+prefix") == trace]


def _panels(rows: Sequence[Waste], height: float) -> tuple[Any, Any]:
    from matplotlib import pyplot as plt

    count = len(_traces(rows))
    figure, axes = plt.subplots(1, count, figsize=(2 + 4.2 * count, height), sharey=True, layout="constrained", squeeze=False)
    axes[0][0].margins(y=0.01)
    return figure, axes[0]


def _save(figure: Any, path: Path, title: str = "") -> None:
    from matplotlib import pyplot as plt

    if title:
        figure.suptitle(fill(title, width=int(9 * figure.get_figwidth())))  # one trace makes a narrow picture
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_utilisation(rows: Sequence[Waste], path: Path) -> None:
    figure, panels = _panels(rows, 6)
    for axes, trace in zip(panels, _traces(rows), strict=True):
        shown = _of(rows, trace)
        shares = [100 * row.utilisation for row in shown]
        bars = axes.barh([row.allocator for row in shown], shares, color=[_colour(row) for row in shown])
        background = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # the dotted lines pass behind the numbers
        axes.bar_label(bars, fmt="%.0f%%", padding=3, fontsize=8, bbox=background)
        for claim in CLAIMS[:2]:
            axes.axvline(100 * claim.utilisation, color="black", linestyle=":", linewidth=1, zorder=0)
        axes.set_xlim(0, max(*shares, 100) * 1.15)
        axes.set_title(trace)
        axes.set_xlabel("token states over reserved slots, %")
    panels[0].invert_yaxis()
    _save(figure, path, "Utilisation; dotted: the article's 40% (contiguous) and 90% (paged); above 100%: shared")


def _colour(row: Waste) -> str:
    if row.allocator.startswith("paged"):
        return "tab:blue"
    return "tab:purple" if "samples" in row.allocator or "prefixes" in row.allocator else "tab:gray"


def _draw_shares(rows: Sequence[Waste], path: Path) -> None:
    figure, panels = _panels(rows, 6)
    for axes, trace in zip(panels, _traces(rows), strict=True):
        shown = _of(rows, trace)
        left = [0.0] * len(shown)
        for share, colour in SHARES:
            widths = [100 * getattr(row, share) for row in shown]
            axes.barh([row.allocator for row in shown], widths, left=left, color=colour, label=share)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.set_xlim(0, 100)
        axes.set_title(trace)
        axes.set_xlabel("of the pool's slots, %")
    panels[0].invert_yaxis()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    _save(figure, path, "Where the pool went, averaged over time; the pool that empties behind the last requests is in it")


def _draw_block_size(rows: Sequence[Waste], path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 5), layout="constrained")
    for trace in _traces(rows):
        paged = [row for row in _of(rows, trace) if row.allocator.startswith("paged ")]
        sizes = [int(row.allocator.split()[1]) for row in paged]
        axes.plot(sizes, [100 * (1 - row.utilisation) for row in paged], marker="o", label=trace)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("block size, tokens")
    axes.set_ylabel("reserved slots without a token, %")
    axes.set_title("Waste against block size: about half a block a sequence")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    _save(figure, path)


def _draw_at_once(rows: Sequence[Waste], path: Path) -> None:
    _draw_bars(
        rows, path, lambda row: row.mean_running, "sequences held at once (mean)", "Sequences held at once in the same pool"
    )


def _draw_preemptions(rows: Sequence[Waste], path: Path) -> None:
    title = "Requests thrown out, to be computed again, because somebody's token found no room"
    _draw_bars(rows, path, lambda row: row.num_preemptions, "preemptions", title)


def _draw_copied(rows: Sequence[Waste], path: Path) -> None:
    title = f"Copied: runs that grow, and blocks of forks that go on; {MODELS[0].name}"
    _draw_bars(rows, path, lambda row: row.copied_tokens * MODELS[0].token_bytes / 1e9, "copied, GB", title)


def _draw_bars(rows: Sequence[Waste], path: Path, value: Callable[[Waste], float], label: str, title: str) -> None:
    figure, panels = _panels(rows, 6)
    for axes, trace in zip(panels, _traces(rows), strict=True):
        shown = _of(rows, trace)
        values = [value(row) for row in shown]
        bars = axes.barh([row.allocator for row in shown], values, color=[_colour(row) for row in shown])
        axes.bar_label(bars, labels=[f"{found:,.0f}" for found in values], padding=2, fontsize=8)
        axes.set_xlim(0, max(*values, 1) * 1.2)
        axes.set_title(trace)
        axes.set_xlabel(label)
    panels[0].invert_yaxis()
    _save(figure, path, title)
