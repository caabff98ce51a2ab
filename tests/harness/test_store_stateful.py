"""Records, store and compare in every order, against a naive model: two runs that are appended to, torn, cut and compared."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from harness import store
from harness.compare import judge, unjudged
from harness.match import match
from harness.names import UsageError
from harness.record import Record, parse_line
from harness.store import RECORDS, Appender, load
from tests.harness.runs import row, untimed

# Another process that appends: a line of JSON for each order, "ok" or "refused" for an answer.
NEIGHBOUR = """
import json, sys
from pathlib import Path
from harness.names import UsageError
from harness.record import parse_line
from harness.store import Appender
held = {}
for order in sys.stdin:
    folder, line = json.loads(order)
    try:
        if line is None:
            held.pop(folder).close()
        else:
            if folder not in held:
                held[folder] = Appender(Path(folder))
            held[folder].append(parse_line(line))
        print("ok", flush=True)
    except UsageError:
        print("refused", flush=True)
"""
#: ratio of times -> verdict; visits scatter by a thousandth, thresholds are a hundredth
VERDICTS = {1: "SAME", 2: "SLOWER", 0.5: "FASTER"}
BAD = ("wrong", "failed", "timeout")
SIDES = st.sampled_from(("old", "new"))


class Neighbour:
    """The other process."""

    def __init__(self) -> None:
        house = Path(store.__file__).parent.parent
        self.process = subprocess.Popen(
            [sys.executable, "-c", NEIGHBOUR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=house
        )

    def asked(self, folder: Path, line: str | None) -> str:
        self.process.stdin.write(json.dumps([str(folder), line]) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.communicate()


@dataclasses.dataclass
class Model:
    """What the bytes of one file are, who holds it, and the lines that were ever written whole."""

    text: str = ""
    holder: str | None = None

    def begin(self, holder: str) -> None:
        self.holder = holder
        if self.text and not self.text.endswith("\n"):
            self.text += "\n"

    def records(self, whole: dict[str, Record]) -> list[Record]:
        return [whole[line] for line in self.text.split("\n") if line in whole]

    def num_problems(self, whole: dict[str, Record]) -> int:
        return sum(bool(line) and line not in whole for line in self.text.split("\n"))


@st.composite
def records(draw: st.DrawFn) -> Record:
    """One of few rows, so that repeats meet: right and timed at one of two speeds, right and untimed, bad, or a control's."""
    case, impl = draw(st.sampled_from(("case.a", "case.b\u2028\n"))), draw(st.sampled_from(("cuda.one", "control.two")))
    role = "control" if impl.startswith("control.") else "implementation"
    made = row(case=case, impl=impl, seconds=draw(st.sampled_from((1e-4, 2e-4))), noise=0.001, role=role)
    status = draw(st.sampled_from(("ok", "ok", "ok", "untimed", "unsupported", *BAD)))
    if status == "untimed":
        return dataclasses.replace(made, launch_s=None)
    return made if status == "ok" else untimed(made, status)


class StoreMachine(RuleBasedStateMachine):
    neighbour: Neighbour

    def __init__(self) -> None:
        super().__init__()
        self.scratch = tempfile.TemporaryDirectory()
        self.folders = {side: Path(self.scratch.name) / side for side in ("old", "new")}
        for folder in self.folders.values():
            folder.mkdir()
        self.models = {side: Model() for side in self.folders}
        self.appenders: dict[str, Appender] = {}
        self.whole: dict[str, Record] = {}

    def teardown(self) -> None:
        for side, model in self.models.items():
            if model.holder == "neighbour":
                self.neighbour.asked(self.folders[side], None)
        for appender in self.appenders.values():
            appender.close()
        self.scratch.cleanup()

    @rule(side=SIDES, record=records())
    def append(self, side, record):
        """Opened at need; refused where the other process holds the file, which then stays as it is."""
        model, line = self.models[side], record.to_line()
        self.whole[line] = record
        if model.holder == "neighbour":
            with pytest.raises(UsageError, match="another run is writing to it"):
                Appender(self.folders[side])
            return
        if model.holder is None:
            self.appenders[side] = Appender(self.folders[side])
            model.begin("self")
        self.appenders[side].append(record)
        model.text += line + "\n"

    @rule(side=SIDES, record=records())
    def append_from_another_process(self, side, record):
        model, line = self.models[side], record.to_line()
        self.whole[line] = record
        said = self.neighbour.asked(self.folders[side], line)
        assert said == ("refused" if model.holder == "self" else "ok")
        if said == "ok":
            if model.holder is None:
                model.begin("neighbour")
            model.text += line + "\n"

    @rule(side=SIDES)
    def close(self, side):
        model = self.models[side]
        if model.holder == "self":
            self.appenders.pop(side).close()
        elif model.holder == "neighbour":
            assert self.neighbour.asked(self.folders[side], None) == "ok"
        model.holder = None

    @precondition(lambda self: any(model.holder == "self" for model in self.models.values()))
    @rule(record=records(), share=st.floats(0, 1))
    def crash(self, record, share):
        """Half a line, and nobody who ends it."""
        side = next(side for side, model in self.models.items() if model.holder == "self")
        line = record.to_line()
        self.whole[line] = record
        torn = line[: int(share * len(line))]
        os.write(self.appenders[side]._file, torn.encode())
        self.models[side].text += torn
        self.close(side)

    @rule(side=SIDES, length=st.integers(0, 2000))
    def cut(self, side, length):
        """A disk that was full, a copy that broke off: the end is gone, a line or two of it."""
        model = self.models[side]
        if model.holder is None and model.text:
            model.text = model.text[: max(0, len(model.text) - length)]
            os.truncate(self.folders[side] / RECORDS, len(model.text))

    @invariant()
    def what_was_written_whole_is_read(self):
        for side, folder in self.folders.items():
            if not (folder / RECORDS).exists():
                continue
            found, problems = load(folder)
            assert found == self.models[side].records(self.whole)
            assert len(problems) == self.models[side].num_problems(self.whole)
            assert [parse_line(record.to_line()) for record in found] == found

    @invariant()
    def verdicts_are_those_of_the_last_lines(self):
        sides = [self.models[side].records(self.whole) for side in ("old", "new")]
        old, new = ({record.case: record for record in side if record.role != "control"} for side in sides)
        wanted = {case: naive(old.get(case), new.get(case)) for case in {*old, *new}}
        pairs = match(*sides).pairs

        assert {item.record.case: item.verdict for item in judge(pairs)} == {c: v for c, v in wanted.items() if v}
        assert sum(unjudged(pairs).values()) == sum(v is None for v in wanted.values())


def naive(old: Record | None, new: Record | None) -> str | None:
    """The verdict over one row; None is not judged."""
    if new and new.status in BAD:
        return "WRONG"
    times = [record and record.launch_s for record in (old, new)]
    if not any(times):
        return None
    if not all(times):
        return "MISSING" if times[0] else "NEW"
    return VERDICTS[round(2 * times[1].median / times[0].median) / 2]


def test_the_store_is_as_the_naive_one():
    """Whatever is appended, torn or cut, and by whom: whole lines are records, in order, and a row's last one is compared."""
    StoreMachine.neighbour = Neighbour()
    try:
        StoreMachine.TestCase.settings = settings(
            max_examples=40, stateful_step_count=30, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(HealthCheck),
        )
        StoreMachine.TestCase().runTest()
    finally:
        StoreMachine.neighbour.end()
