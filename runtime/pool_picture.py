"""The pool over time: every block at every step, coloured by the sequence that holds it."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runtime.manager import BlockManager
from runtime.replay import Replay
from runtime.stores import PagedStore, Store
from runtime.traces import synthetic, with_prefixes

FREE, CACHED = -1, -2
NUM_BLOCKS, BLOCK_SIZE, NUM_STEPS = 96, 16, 420


@dataclass
class PoolFilm:
    """One column a step: who holds each block (a request, FREE or CACHED), and by how many tables it is held."""

    manager: BlockManager
    owners: list[NDArray[np.int64]] = field(default_factory=list)
    holders: list[NDArray[np.int64]] = field(default_factory=list)

    def shoot(self, step: int, store: Store) -> None:
        """Add a column."""
        owner = np.full(self.manager.num_physical_blocks, FREE, np.int64)
        holders = np.zeros(owner.size, np.int64)
        owner[self.manager.cached_blocks] = CACHED
        for sequence_id, state in self.manager.sequences.items():
            held = np.array(state.block_table, np.int64)
            owner[held[holders[held] == 0]] = sequence_id  # a shared block keeps the colour of the first that holds it
            holders[held] += 1
        self.owners.append(owner)
        self.holders.append(holders)


def film() -> PoolFilm:
    """A small pool and 60 requests behind three system prompts."""
    trace = synthetic("sharegpt", 60, seed=3, max_length=400)
    trace = with_prefixes(trace, num_prefixes=3, prefix_length=4 * BLOCK_SIZE, seed=3)
    manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    shots = PoolFilm(manager)
    Replay(trace, PagedStore(manager, prefixes=trace), on_step=shots.shoot).run("film")
    return shots


def draw_pool(path: Path) -> None:
    """Draw the film's first steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shots = film()
    owners = np.stack(shots.owners[:NUM_STEPS], axis=1)
    holders = np.stack(shots.holders[:NUM_STEPS], axis=1)
    figure, axes = plt.subplots(figsize=(12, 6.5), layout="constrained")
    axes.imshow(_colours(owners), aspect="auto", interpolation="nearest", origin="lower")
    block, step = np.nonzero((holders > 1) & (np.arange(owners.shape[1]) % 6 == 3))
    axes.scatter(step, block, s=3, c="black", marker="o", linewidths=0)
    axes.set_xlabel("step (one token for every running sequence)")
    axes.set_ylabel("physical block")
    used = 100 * np.mean(owners >= 0)
    axes.set_title(
        f"{NUM_BLOCKS} blocks of {BLOCK_SIZE} tokens: a colour is a sequence, and wherever its next block was free it lies "
        f"({used:.0f}% held)"
    )
    axes.legend(
        handles=[
            Patch(facecolor="white", edgecolor="black", label="free"),
            Patch(facecolor="0.82", edgecolor="black", label="cached: nobody holds it, can be found again"),
            Line2D([], [], color="black", marker="o", markersize=3, linestyle="", label="shared by several sequences"),
        ],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.1),
        ncols=3,
        frameon=False,
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _colours(owners: NDArray[np.int64]) -> NDArray[np.float64]:
    """RGB of each block and step; neighbours in time get hues far apart."""
    from matplotlib.colors import hsv_to_rgb

    hue = (owners * 0.618034) % 1
    saturation = np.where(owners % 2 == 0, 0.55, 0.75)
    value = np.where(owners % 3 == 0, 0.80, 0.95)
    colours: NDArray[np.float64] = hsv_to_rgb(np.stack((hue, saturation, value), axis=-1))
    colours[owners == FREE] = 1.0
    colours[owners == CACHED] = 0.82
    return colours
