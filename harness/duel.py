"""Two arms measured in one run, on one device, in turn: what a difference between two runs could be due to hits both.

Each arm is a process of its own with allocations of its own (arm.py). Case by case both make their rows ready, one after
the other; then each row is visited again and again, in shuffled order, by both arms one right after the other, which of
them goes first being drawn each time. A round is all of it with fresh processes: what memory an arm was given, and which
arm was started first, changes from round to round.
"""

from __future__ import annotations

import dataclasses
import random
import selectors
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harness.child import START, Child
from harness.difference import APART, Difference, paired
from harness.interval import summarise
from harness.messages import Garbled, Kinds, Lines, Script, message_of, require_facts
from harness.names import UsageError
from harness.ops.case import Case
from harness.options import Options
from harness.record import Record
from harness.registry import Entry
from harness.trees import Side
from harness.words import shortened
from harness.work import STALL_S, Work, lost_record

#: What an arm may say; see arm.py.
_KINDS: Kinds = {
    "hello": {"hello": (dict,)},
    "doing": {"doing": (str,), "row": (int, type(None))},
    "record": {"record": (str,), "row": (int,)},
    "ready": {"ready": (list,)},
    "seconds": {"seconds": (float, int, type(None))},
    "lost": {"lost": (str,)},
    "error": {"error": (str,)},
    "done": {"done": (bool,)},
}
_START = START.format(module="harness.arm")

OLD, NEW = 0, 1
#: Attempts at a pair for each that is wanted: a visit with the clock held down makes none.
ATTEMPTS = 2

Numbers = Sequence[int]
Pairs = list[tuple[float, float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What the arms run, and what both have in common."""

    sides: tuple[Side, Side] = dataclasses.field(default_factory=lambda: (Side(), Side()))
    device: str | None = None
    options: Options = dataclasses.field(default_factory=lambda: Options(power="none", ceiling=False))
    run: str = "unsaved"
    stall_s: float = STALL_S


@dataclasses.dataclass(frozen=True, kw_only=True)
class Match:
    """One row: the entries that meet on a case, which are the same unless two implementations are held together."""

    case: Case
    entries: tuple[Entry, Entry]


class ArmDied(Exception):
    """An arm ended, fell silent or lost its device; the message says how."""


class Arm:
    """The parent's end of one arm's process."""

    def __init__(self, setup: Setup, side: int) -> None:
        self.side, self._stall_s = side, setup.stall_s
        self._doing, self._lines = "starting", Lines()
        self._script = Script(())
        of = setup.sides[side]
        self._child = Child(_START, of.path, of.folder)
        self.send(
            tree=str(of.tree),
            state=[str(folder) for folder in of.state or ()],
            device=setup.device,
            impl_files=list(of.impl_files),
            options=dataclasses.asdict(setup.options),
            run=setup.run,
        )

    def send(self, **message: Any) -> None:
        """Tell the arm something; that it has died shows when it is asked."""
        if "rows" in message:
            self._script = Script([{**row, "case": message["case"]["name"]} for row in message["rows"]])
        self._child.send(message)

    def hear(self, *wanted: str) -> dict[str, Any]:
        """Return the next message that has one of these keys, and what it was doing is forgotten. Raises ArmDied.

        An error that the arm reports is wrong usage, or the harness's own.
        """
        try:
            while True:
                message = message_of(self._line(), _KINDS)
                if "error" in message:
                    raise UsageError(message["error"])
                if "lost" in message:
                    raise ArmDied(f"lost the device: {message['lost']}")
                if "doing" in message:
                    self._doing = message["doing"]
                elif any(key in message for key in wanted):
                    return self._understood(message)
                else:
                    raise Garbled(f"{shortened(str(message), 200)}, where {' or '.join(wanted)} was due")
        except Garbled as how:
            raise ArmDied(f"spoilt its channel in '{self._doing}': {how}{self._child.last_words()}") from how

    def _understood(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message, its record as such; raises Garbled where it does not fit the rows that were asked for."""
        if "hello" in message:
            require_facts(message["hello"], "slug", "kind", "uuid")
        elif "record" in message:
            message["record"] = self._script.record(message["record"], message["row"])
        elif "ready" in message:
            for number in message["ready"]:
                self._script.require_row(number)
        return message

    def _line(self) -> bytes:
        with selectors.DefaultSelector() as selector:
            selector.register(self._child.channel, selectors.EVENT_READ)
            while not self._lines.whole:
                if not selector.select(self._stall_s):
                    raise ArmDied(f"silent for {self._stall_s:.0f} s in '{self._doing}'{self._child.last_words()}")
                chunk = self._child.channel.read(1 << 16)
                if not chunk:
                    raise ArmDied(f"died in '{self._doing}': {self._child.ending()}{self._child.last_words()}")
                self._lines.add(chunk)
        return self._lines.whole.pop(0)

    def close(self) -> None:
        """End the process, however it is, and whatever it started."""
        self._child.close()


Play = Callable[["Duel", int, Numbers], None]
After = Callable[[int], None]


class Duel:
    """All rounds of two arms. `play(duel, round, numbers)` is called whenever both have these rows of a case ready.

    records    by row number, each side's record of each round
    facts      of the two arms: device, toolchain, revision, the rows that its tree has, as name[LAYOUT]
    """

    def __init__(self, setup: Setup, matches: Sequence[Match], progress: Callable[[str], None] = lambda _: None) -> None:
        self.setup, self.matches, self.progress = setup, matches, progress
        self.records: dict[int, tuple[list[Record], list[Record]]] = {n: ([], []) for n in range(len(matches))}
        self.facts: list[dict[str, Any]] = [{}, {}]
        self._arms: list[Arm | None] = [None, None]
        self._chance = random.Random(0)

    def run(self, rounds: int, play: Play, after: After = lambda turn: None) -> None:
        """Play all cases in each of `rounds` rounds, and call `after(round)` behind each, when no arm is left.

        UsageError where an arm cannot start; a death costs its case.
        """
        cases: dict[str, list[int]] = {}
        for number, match in enumerate(self.matches):
            cases.setdefault(match.case.name, []).append(number)
        try:
            for turn in range(rounds):
                for name, numbers in cases.items():
                    self.progress(f"round {turn + 1} of {rounds}: {name}")
                    self._case(turn, numbers, play)
                self.close()
                after(turn)
        finally:
            self.close()

    def num_rounds(self, number: int) -> int:
        """How many rounds of a row are over: fewer than were asked for where the run was broken off."""
        return min(map(len, self.records[number]))

    def close(self) -> None:
        """End both arms."""
        for side, arm in enumerate(self._arms):
            if arm is not None:
                arm.close()
                self._arms[side] = None

    def _case(self, turn: int, numbers: Numbers, play: Play) -> None:
        """One case of one round: every row gets a record on both sides, whatever happens."""
        seen: list[dict[int, Record]] = [{}, {}]
        died: dict[int, str] = {}
        try:
            self._start(turn)
            ready = {side: self._prepare(side, numbers, seen[side]) for side in self._sides(turn)}
            common = [number for number in numbers if all(number in (some or ()) for some in ready.values())]
            if common:
                play(self, turn, common)
            for side, some in ready.items():
                if some is not None:
                    self._finish(side, seen[side])
        except _Fallen as fallen:
            died[fallen.side] = fallen.why
            self.close()
        for number in numbers:
            for side in (OLD, NEW):
                self.records[number][side].append(seen[side].get(number) or self._absent(side, number, died))

    def _sides(self, turn: int) -> tuple[int, int]:
        return (OLD, NEW) if turn % 2 == 0 else (NEW, OLD)

    def _start(self, turn: int) -> None:
        """Start the arms that are not there; an arm that dies before it has said hello ends the whole run."""
        for side in self._sides(turn):
            if self._arms[side] is not None:
                continue
            self._arms[side] = arm = Arm(self.setup, side)
            try:
                self.facts[side] = arm.hear("hello")["hello"]
            except ArmDied as death:
                raise UsageError(f"the {('old', 'new')[side]} arm {death}") from death
        devices = [facts["device"]["uuid"] or facts["device"]["slug"] for facts in self.facts]
        if devices[OLD] != devices[NEW]:
            raise UsageError(f"the two arms are on different devices: {' and '.join(devices)}")

    def _ask(self, side: int, *wanted: str, **message: Any) -> dict[str, Any]:
        """Send an arm a message, if there is one, and return its answer. Raises _Fallen where it has died."""
        arm = self._arms[side]
        assert arm is not None
        try:
            if message:
                arm.send(**message)
            return arm.hear(*wanted)
        except ArmDied as death:
            raise _Fallen(side, str(death)) from death

    def _prepare(self, side: int, numbers: Numbers, seen: dict[int, Record]) -> list[int] | None:
        """Have a case's rows checked and made ready; return the numbers of those that are, None if the case is over."""
        rows = [
            {"number": n, "entry": str(self.matches[n].entries[side]), "params": dict(self.matches[n].entries[side].params)}
            for n in numbers
        ]
        message = self._ask(side, "record", "ready", "done", case=self.matches[numbers[0]].case.to_json(), rows=rows)
        while "record" in message:
            seen[message["row"]] = message["record"]
            message = self._ask(side, "record", "ready", "done")
        return list(message["ready"]) if "ready" in message else None

    def _finish(self, side: int, seen: dict[int, Record]) -> None:
        """Take the records of what was ready."""
        message = self._ask(side, "record", "done", finish=True)
        while "record" in message:
            seen[message["row"]] = message["record"]
            message = self._ask(side, "record", "done")

    def _absent(self, side: int, number: int, died: Mapping[int, str]) -> Record:
        """The record of a row that its arm said nothing of."""
        match, options = self.matches[number], self.setup.options
        if side in died:
            status, reason = "failed", died[side]
        elif died:
            status, reason = "skipped", f"the other arm {next(iter(died.values()))}"
        else:
            of = self.setup.sides[side]
            place = of.state[0] if of.state else of.tree
            status, reason = "unsupported", f"{place} has no such implementation or parameter"
        work = Work(options=options, device=self.setup.device, run=self.setup.run, impl_files=(), rows=())
        return lost_record(work, self.facts[side], status, reason, match.case, match.entries[side])

    def alternate(self, numbers: Numbers, visits: int) -> dict[int, Pairs]:
        """Visit rows in both arms, in turn, until each has `visits` pairs or has had ATTEMPTS as many tries."""
        pairs: dict[int, Pairs] = {number: [] for number in numbers}
        for _ in range(ATTEMPTS * visits):
            waiting = [number for number in numbers if len(pairs[number]) < visits]
            self._chance.shuffle(waiting)
            for number in waiting:
                seconds: list[float | None] = [None, None]
                for side in self._chance.sample((OLD, NEW), 2):
                    seconds[side] = self._ask(side, "seconds", visit=number)["seconds"]
                old, new = seconds
                if old is not None and new is not None:
                    pairs[number].append((old, new))
        return pairs

    def spin(self, side: int, seconds: Mapping[int, float]) -> None:
        """Let rows of one arm spin for so long after each launch from now on."""
        self._ask(side, "ready", spin={str(number): share for number, share in seconds.items()})


class _Fallen(Exception):
    """An arm died while a case was played."""

    def __init__(self, side: int, why: str) -> None:
        super().__init__(why)
        self.side, self.why = side, why


def merged(duel: Duel, number: int, rounds: Sequence[Pairs]) -> tuple[Record, Record]:
    """A row's two records over all rounds, with the visits of its pairs, in the same order on both sides, as samples.

    A row that was not right in every round is what it was in the first round in which it was not. One without a pair
    keeps what its arm measured alone.
    """
    pairs = [pair for of_round in rounds for pair in of_round]
    made = []
    for side in (OLD, NEW):
        records = duel.records[number][side]
        record = next((record for record in records if record.status != "ok"), records[0])
        is_paired = bool(pairs) and record.status == "ok"
        times = summarise([pair[side] for pair in pairs]) if is_paired else record.launch_s
        made.append(dataclasses.replace(record, launch_s=times))
    return made[OLD], made[NEW]


def difference_of(rounds: Sequence[Pairs], device_kind: str) -> Difference | str:
    """Compare the pairs of all rounds, in their order, or say why that cannot be."""
    if all(len(pairs) < 2 for pairs in rounds):
        return f"{sum(len(pairs) for pairs in rounds)} pairs of visits came about, two in no round; the clock was held down"
    if any(min(pair) <= 0 for pairs in rounds for pair in pairs):
        return "a visit took no time at all"
    return paired(rounds, APART.get(device_kind))
