"""`ab`: two revisions, or two implementations, measured in one run, in turn, on one device.

    pagedbench ab main                          what this checkout changed against main
    pagedbench ab ../other-checkout             the same, where there is no history
    pagedbench ab main --impl-file kernels.py   kernels of your own, of your repository's main against its files now
    pagedbench ab --impl cuda.a,cuda.b          two implementations of this checkout

Exit codes are those of `compare`. What was measured is written down after each round, and when the run is broken off (exit
code 2).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.commands.compare import add_judging, tell, write
from harness.commands.run import RUNS, Progress
from harness.commands.selection import add_device, add_selection, cases_in, cases_of, entries_of, registry_of, rows_of
from harness.compare import judge, unjudged
from harness.costs import grown
from harness.difference import Difference
from harness.duel import OLD, Duel, Match, Numbers, Pairs, Setup, difference_of, merged
from harness.groups import groups
from harness.match import Pair
from harness.names import UsageError, above_0, count_of, path_of, split_names
from harness.ops.case import Case
from harness.options import Options
from harness.registry import Entry, Registry, matches
from harness.report.verdicts import Comparison
from harness.rooms import HOUSE, load_room
from harness.store import run_folder, write_whole
from harness.trees import Side, counterpart, root_of, sides_of, worktree
from harness.words import printable
from harness.work import STALL_S

#: Rounds of fresh processes, and pairs of visits of each row in a round.
ROUNDS, VISITS = 2, 8


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("reference", nargs="?", metavar="REF",
        help="a revision (with --impl-file: of the repository one stands in), or a folder with another state")  # fmt: skip
    add_selection(parser)
    add_device(parser)
    add_rounds(parser)
    add_judging(parser)
    add("--runs-dir", type=path_of, default=RUNS, metavar="DIR", help=f"where the run's folder is made (default: {RUNS})")


def add_rounds(parser: argparse.ArgumentParser) -> None:
    """Add how much is measured."""
    add = parser.add_argument
    add("--rounds", type=count_of, default=ROUNDS, metavar="N", help="rounds of fresh processes (default: %(default)s)")
    add("--visits", type=count_of, default=VISITS, metavar="N", help="pairs of visits a row and round (default: %(default)s)")
    add("--patient", action="store_true", help="also run what would take minutes on this device")
    add("--stall", type=above_0("seconds"), default=STALL_S, metavar="SECONDS", help="silence after which an arm is killed")


def require_visits(arguments: argparse.Namespace) -> None:
    """Raise UsageError where a round could not tell how its visits scatter."""
    if arguments.visits < 2:
        raise UsageError(f"--visits must be 2 at least (got {arguments.visits}): one pair does not show how pairs scatter")


def main(arguments: argparse.Namespace) -> int:
    """Measure, judge and tell; returns the exit code."""
    require_visits(arguments)
    registry = registry_of(arguments)
    if arguments.reference is None:
        found, names = _two_implementations(arguments, registry), split_names("--impl", arguments.impl)
        same = Side(impl_files=arguments.impl_file)
        return _duel(arguments, found, (same, same), names)
    _, cases = cases_of(arguments)
    rows = rows_of(cases, entries_of(arguments, registry))
    found = [Match(case=case, entries=(entry, entry)) for case, entry in rows]
    # Who brings kernels of their own compares states of their own repository, or of the folder that they stand in.
    root = (root_of(Path.cwd()) or Path.cwd()) if arguments.impl_file else HOUSE
    _require_own(arguments, rows)
    with worktree(arguments.reference, root) as tree:
        sides = sides_of(tree, root, arguments.impl_file)
        if tree == Path(arguments.reference).resolve() and arguments.impl_file and not sides[0].impl_files:
            raise UsageError(
                f"{arguments.reference}: a folder that holds none of {', '.join(arguments.impl_file)} and so no other state of "
                f"{root}; if a revision of that name is meant, write refs/heads/NAME"
            )
        return _duel(arguments, found, sides, [arguments.reference, "this checkout"])


def _require_own(arguments: argparse.Namespace, rows: Sequence[tuple[Case, Entry]]) -> None:
    """Raise UsageError for implementations of installed packages where it is our checkout that has another state."""
    ours = {impl.name for impl in load_room("impls").IMPLS}
    others = list(dict.fromkeys(entry.impl.name for _, entry in rows if entry.impl.name not in ours))
    if others and not arguments.impl_file:
        raise UsageError(
            f"{', '.join(others)}: of an installed package, of which {arguments.reference} is no other state; give the file "
            "with its table by --impl-file, from its checkout, or leave it out by --impl"
        )


def _two_implementations(arguments: argparse.Namespace, registry: Registry) -> list[Match]:
    """Match two named implementations, each in its first layout or the one named, on all cases of their operator."""
    names = split_names("--impl", arguments.impl)
    if len(names) != 2:
        raise UsageError(f"without REF, --impl must name the two implementations, as in --impl a,b (got {len(names)})")
    old, new = (_the_one(name, registry) for name in names)
    _, cases = cases_of(arguments)
    found = [Match(case=case, entries=(old, new)) for case in cases if case.op == old.impl.op == new.impl.op]
    if not found:
        raise UsageError(f"no chosen case is of the operator of both {old} ({old.impl.op}) and {new} ({new.impl.op})")
    return found


def _the_one(name: str, registry: Registry) -> Entry:
    """The implementation that `name` means, in its first layout or in the one named; UsageError where it means several."""
    found = registry.entries([name])
    several = dict.fromkeys(entry.impl.name for entry in found)
    if len(several) > 1:
        raise UsageError(f"without REF, --impl must name two implementations; {name} means {', '.join(several)}")
    return found[0]


def setup_of(arguments: argparse.Namespace, run: str, sides: tuple[Side, Side]) -> Setup:
    """Both arms as the arguments have them."""
    options = Options(suite=arguments.suite or "custom", power="none", ceiling=False, patient=arguments.patient)
    return Setup(sides=sides, device=arguments.device, options=options, run=run, stall_s=arguments.stall)


def _duel(arguments: argparse.Namespace, rows: Sequence[Match], sides: tuple[Side, Side], names: Sequence[str]) -> int:
    """Run both arms, keep the records of each, and tell what came of it. Where that breaks off, what there is is kept."""
    if arguments.out is not None:  # what cannot be written is refused before it is measured
        try:
            arguments.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot write results to {arguments.out}: {error}") from error
    turns = arguments.rounds * len({match.case.name for match in rows})
    with run_folder(arguments.runs_dir) as folder, Progress(turns, quiet=arguments.json) as progress:

        def say(doing: str) -> None:
            progress.say(doing)
            progress.step()

        duel = Duel(setup_of(arguments, folder.name, sides), rows, say)
        bout = Bout(arguments, duel, names, folder)
        try:
            duel.run(arguments.rounds, bout.play, lambda turn: bout.keep())
        except (KeyboardInterrupt, UsageError) as end:
            raise bout.broken_off(end) from None
    print(f"records: {', '.join(map(printable, bout.files))}", file=sys.stderr)
    return tell(bout.comparison(), arguments, folder)


class Bout:
    """What two arms have measured so far: it is judged and written down after each round, and whenever the run ends."""

    def __init__(self, arguments: argparse.Namespace, duel: Duel, names: Sequence[str], folder: Path) -> None:
        self._arguments, self._duel, self._names, self._folder = arguments, duel, names, folder
        self._rounds: dict[int, list[Pairs]] = {number: [[] for _ in range(arguments.rounds)] for number in duel.records}
        self.files = [folder / f"{name}.jsonl" for name in ("old", "new")]
        self._cases = _cases_gone(arguments.case_file, duel.setup.sides[OLD].state)

    def play(self, duel: Duel, turn: int, numbers: Numbers) -> None:
        """Take the visits of a case in a round."""
        for number, pairs in duel.alternate(numbers, self._arguments.visits).items():
            self._rounds[number][turn] = pairs

    def keep(self) -> None:
        """Write old.jsonl and new.jsonl, the i-th sample of a row in one taken beside the i-th in the other, and summary.md."""
        pairs = self._pairs().values()
        for file, records in zip(self.files, ([pair.old for pair in pairs], [pair.new for pair in pairs]), strict=True):
            marked = [dataclasses.replace(record, run=f"{record.run}.{file.stem}") for record in records if record]
            write_whole(file, "".join(f"{record.to_line()}\n" for record in marked))
        write(self.comparison(), self._arguments, self._folder)

    def broken_off(self, end: BaseException) -> UsageError:
        """Keep what there is of a run that ends before its time, and return the line that says so."""
        why = str(end) or "interrupted"
        if not self._pairs():
            return UsageError(f"{why}; nothing was measured" if isinstance(end, KeyboardInterrupt) else why)
        self.keep()
        return UsageError(f"{why}; {self._missing() or 'all rows were measured'}; what was measured is kept in {self._folder}")

    def comparison(self) -> Comparison:
        """The verdicts on all rows that were measured in a round at least."""
        arguments, pairs = self._arguments, self._pairs()
        numbers, both = {id(pair): number for number, pair in pairs.items()}, list(pairs.values())

        def measure(pair: Pair) -> Difference | str:
            return difference_of(self._played(numbers[id(pair)]), pair.record.device_kind)

        judged = judge(both, arguments.threshold, measure)
        notes = [f"{arguments.rounds} rounds of {arguments.visits} pairs of visits a row, both arms in turn."]
        if gone := _gone(self._duel, split_names("--impl", arguments.impl)):
            notes.append(f"Gone in {self._names[1]}: {', '.join(gone)}.")
        if self._cases:
            notes.append(f"Cases that are gone or others in {self._names[1]}: {', '.join(self._cases)}.")
        return Comparison(
            old=self._names[0],
            new=self._names[1],
            judged=judged,
            growths=grown(both),
            groups=groups(judged, arguments.group, arguments.threshold) if arguments.group else None,
            unjudged=unjudged(both),
            threshold=arguments.threshold,
            strict_peers=arguments.strict_peers,
            notes=notes,
            incomplete=self._missing(),
        )

    def _pairs(self) -> dict[int, Pair]:
        """The two records of each row that was measured, by its number."""
        measured = [number for number in self._rounds if self._duel.num_rounds(number)]
        both = {number: merged(self._duel, number, self._played(number)) for number in measured}
        return {number: Pair(old=old, new=new) for number, (old, new) in both.items()}

    def _played(self, number: int) -> list[Pairs]:
        """The visits of the rounds of a row that are over: of others nobody knows yet whether it was right."""
        return self._rounds[number][: self._duel.num_rounds(number)]

    def _missing(self) -> str | None:
        """How many rows were not measured, or not in all rounds."""
        done = [self._duel.num_rounds(number) for number in self._rounds]
        fewer = sum(0 < rounds < self._arguments.rounds for rounds in done)
        parts = {
            f"{done.count(0)} of {len(done)} rows were not measured": done.count(0),
            f"{fewer} of {len(done)} rows were measured in fewer than {self._arguments.rounds} rounds": fewer,
        }
        return ", ".join(part for part, number in parts.items() if number) or None


def _gone(duel: Duel, globs: Sequence[str]) -> list[str]:
    """Implementations, of those chosen, that the old side has and the new one has not, or not in that layout: no row was
    measured of them.
    """
    old, new = (facts["rows"] for facts in duel.facts)
    chosen = [glob.partition("[")[0] for glob in globs] or ["*"]
    names = {row.partition("[")[0] for row in new}
    gone = [(row, row.partition("[")[0]) for row in old if row not in new]
    told = [row if name in names else name for row, name in gone if any(matches(name, glob) for glob in chosen)]
    return list(dict.fromkeys(told))


def _cases_gone(files: Sequence[str], state: tuple[Path, Path] | None) -> list[str]:
    """Cases that the old state's files have, and the new one's not, or others under their names: they were not measured."""
    found = []
    for path in files if state else ():
        assert state is not None
        old = counterpart(path, *state)
        if Path(old).is_file():
            now = {case.name: case.digest for case in cases_in(path)}
            try:
                found += [case.name for case in cases_in(old) if now.get(case.name) != case.digest]
            except UsageError as error:  # mended since, perhaps
                found.append(f"any of a file that cannot be read ({error})")
    return found
