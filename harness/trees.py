"""Another state of the kernels: where an arm finds its implementations, and how a revision becomes a folder."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.names import UsageError
from harness.rooms import HOUSE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """What an arm runs: the table of a checkout, files of implementations, and where Python looks for modules."""

    tree: Path = HOUSE
    impl_files: Sequence[str] = ()
    path: Sequence[str] = dataclasses.field(default_factory=lambda: list(sys.path))


def sides_of(tree: Path, root: Path, impl_files: Sequence[str]) -> tuple[Side, Side]:
    """The old side, out of `tree`, and the new one, as this process sees it; `tree` is another state of `root`.

    A tree with a table of ours gives its table. Files given by the user, and folders in which Python looks for modules,
    are taken from the tree where they lie within `root`; a file that the tree has not got is left out, and a folder that it
    has not got stays (an environment that lies in the checkout, as tox's do). The harness is the same on both sides.
    Raises UsageError for a tree with no table where there are no files either, and for a file outside `root`, which would be
    measured against itself.
    """
    for file in impl_files:
        if not Path(file).resolve().is_relative_to(root):
            raise UsageError(
                f"--impl-file {file} lies outside {root}, of which {tree} is another state: "
                "both sides would run the same file; stand in the checkout that it belongs to"
            )

    def moved(path: str) -> str:
        place = Path(path).resolve()
        return str(tree / place.relative_to(root)) if place.is_relative_to(root) else path

    old_files = [moved(path) for path in impl_files if Path(moved(path)).is_file()]
    old_path = [
        moved(entry) if Path(entry).resolve() != HOUSE and Path(moved(entry)).is_dir() else entry for entry in sys.path
    ]
    has_table = (tree / "impls" / "__init__.py").is_file()
    if not has_table and not impl_files:  # both sides would be this checkout, and the same
        raise UsageError(f"{tree} holds no table of implementations (impls/__init__.py): it is no checkout of this repository")
    old = Side(tree=tree if has_table else HOUSE, impl_files=old_files, path=old_path)
    return old, Side(impl_files=impl_files)


def root_of(folder: Path) -> Path | None:
    """The checkout that a folder lies in, if it lies in one."""
    command = ["git", "-C", str(folder), "rev-parse", "--show-toplevel"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return Path(done.stdout.strip()).resolve() if done.returncode == 0 else None


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
