"""Another state of the kernels: where an arm finds its implementations, and how a revision becomes a folder."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.names import UsageError
from harness.rooms import HOUSE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """What an arm runs: the table of a checkout, files of implementations, and where Python looks for modules.

    folder    where it stands: what a kernel reads by a path of no folder lies there; None is where this process does
    state     of an arm that is to run another state of a checkout: the folder of that state, and the checkout, of which it must
              load nothing
    """

    tree: Path = HOUSE
    impl_files: Sequence[str] = ()
    path: Sequence[str] = dataclasses.field(default_factory=lambda: list(sys.path))
    folder: Path | None = None
    state: tuple[Path, Path] | None = None


def sides_of(tree: Path, root: Path, impl_files: Sequence[str]) -> tuple[Side, Side]:
    """The old side, out of `tree`, and the new one, as this process sees it; `tree` is another state of `root`.

    A tree with a table of ours gives its table. Files given by the user, and folders in which Python looks for modules,
    are taken from the tree where they lie within `root`; a file that the tree has not got is left out, and a folder that it
    has not got stays (an environment that lies in the checkout, as tox's do). The harness is the same on both sides.
    The arm of the old side stands in the tree's counterpart of the folder that one stands in, or in the tree.
    Raises UsageError for a tree with no table where there are no files either, and for what would be measured against itself:
    a tree that is `root`, a file outside of it on either side.
    """
    tree, root = tree.resolve(), root.resolve()
    if tree == root:
        raise UsageError(f"{tree} is this checkout itself: both sides would be the same; `pagedbench calibrate` does that")

    def moved(path: str | Path) -> str:
        return counterpart(path, tree, root)

    for file in impl_files:
        _require_state(file, Path(moved(file)), tree, root)
    old_files = [moved(path) for path in impl_files if Path(moved(path)).is_file()]
    old_path = [
        moved(entry) if Path(entry).resolve() != HOUSE and Path(moved(entry)).is_dir() else entry for entry in sys.path
    ]
    has_table = (tree / "impls" / "__init__.py").is_file()
    if not has_table and not impl_files:  # both sides would be this checkout, and the same
        raise UsageError(f"{tree} holds no table of implementations (impls/__init__.py): it is no checkout of this repository")
    here = Path(moved(Path.cwd()))
    folder = here if here.is_dir() else tree
    old = Side(tree=tree if has_table else HOUSE, impl_files=old_files, path=old_path, folder=folder, state=(tree, root))
    return old, Side(impl_files=impl_files)


def counterpart(path: str | Path, tree: Path, root: Path) -> str:
    """Where a path within the checkout `root` leads in `tree`, another state of it; any other path as it is."""
    # A link is followed in the state that it is of, unless it leads into the checkout from outside.
    places = (Path(os.path.abspath(path)), Path(path).resolve())
    return next((str(tree / place.relative_to(root)) for place in places if place.is_relative_to(root)), str(path))


def _require_state(file: str, old: Path, tree: Path, root: Path) -> None:
    """Raise UsageError where a file's place in the other state of its checkout, `old`, is none, or leads to the file itself."""
    place = Path(file).resolve()
    if not place.is_relative_to(root):
        raise UsageError(
            f"--impl-file {file} lies outside {root}, of which {tree} is another state: "
            "both sides would run the same file; stand in the checkout that it belongs to"
        )
    if old.is_file() and not old.resolve().is_relative_to(tree):
        raise UsageError(f"--impl-file {file}: {old} leads out of {tree}, to {old.resolve()}: it is no other state of the file")
    inner = None if old.exists() else root_of(place.parent)
    if inner not in (None, root) and root_of(root) == root:
        raise UsageError(f"--impl-file {file} is of {inner}, a checkout within {root}, which does not hold it; stand there")


def root_of(folder: Path) -> Path | None:
    """The checkout that a folder lies in, if it lies in one."""
    command = ["git", "-C", str(folder), "rev-parse", "--show-toplevel"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return Path(done.stdout.strip()).resolve() if done.returncode == 0 else None


def checkouts_of(folder: Path) -> list[Path]:
    """All worktrees of the repository that a folder lies in; none where it lies in none."""
    command = ["git", "-C", str(folder), "worktree", "list", "--porcelain"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [Path(line.removeprefix("worktree ")).resolve() for line in lines if line.startswith("worktree ")]


@contextlib.contextmanager
def worktree(reference: str, root: Path = HOUSE) -> Iterator[Path]:
    """A folder with another revision of the checkout `root`, taken away afterwards; a folder that is there is used as it is.

    Raises UsageError for what is neither.
    """
    if reference and Path(reference).is_dir():
        yield Path(reference).resolve()
        return

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise UsageError(f"{reference!r} is neither a folder nor a revision of {root}: {done.stderr.strip()}")
        return done.stdout.strip()

    commit = git("rev-parse", "--verify", "--end-of-options", f"{reference}^{{commit}}")
    with tempfile.TemporaryDirectory(prefix="pagedbench-ab-") as scratch:
        tree = Path(scratch).resolve() / commit[:12]
        git("worktree", "add", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def merge_base(reference: str, root: Path) -> str:
    """The commit at which the checkout `root` left `reference`; where it never left, as after a push, the one before its own.

    Raises UsageError where there is no such commit.
    """

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
        if done.returncode:
            why = done.stderr.strip() or "they have no commit in common"
            raise UsageError(f"no commit of {root} to compare with at {reference!r}: {why}; was the history fetched?")
        return done.stdout.strip()

    tip = git("rev-parse", "--verify", "--end-of-options", f"{reference}^{{commit}}")
    head = git("rev-parse", "--verify", "HEAD")
    base = git("merge-base", tip, head)
    return base if base != head else git("rev-parse", "--verify", "HEAD^")
