"""The steps of `pagedbench ci`: each a process of its own, and what all of them together say."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.compare import VERDICTS
from harness.store import RECORDS, load
from harness.words import printable

#: What a step runs: the command, as the shell would, with this process's path, whatever lies in the current folder.
_START = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from harness.cli import main; sys.exit(main())"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One step: its words, exit code (None: not done), what came of it, and the comparison that it made."""

    name: str
    told: str
    words: Sequence[str] = ()
    code: int | None = None
    decides: bool = True
    comparison: Mapping[str, Any] | None = None


class Job:
    """Runs steps as processes of their own, so that none holds the GPU for the next; log.txt keeps what they say."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *words: str) -> tuple[int, list[str]]:
        """Run `pagedbench WORDS`, showing its output; return its exit code and its lines. A killed process is code 2."""
        lines = [f"$ pagedbench {shlex.join(words)}"]
        print(lines[0], flush=True)
        with subprocess.Popen(
            [sys.executable, "-u", "-c", _START, json.dumps(sys.path), *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8", errors="replace",
        ) as process:  # fmt: skip
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line.rstrip("\n"))
        code = process.returncode
        with (self.folder / "log.txt").open("a", encoding="utf-8") as log:
            log.write("\n".join([*lines, f"exit code {code}", ""]) + "\n")
        return (code if code in (0, 1, 2, 3) else 2), lines[1:]

    def step(self, name: str, words: Sequence[str], out: str, **fields: Any) -> Step:
        """Run a step whose results go to the folder `out` of ours; what came of it is its comparison or its rows."""
        from harness.report import summary_line

        code, lines = self.run(*words)
        found = self.folder / out
        _lift(found)
        comparison = None
        told = printable(next((line for line in reversed(lines) if line.strip()), "said nothing").removeprefix("pagedbench: "))
        if code != 2 and (found / "comparison.json").is_file():
            comparison = json.loads((found / "comparison.json").read_text(encoding="utf-8"))
            told = f"{comparison['headline']} against {comparison['old']}"
        elif code != 2 and (found / RECORDS).is_file():
            records = load(found)[0]
            told = summary_line(records)
            if code == 0 and not any(record.status == "ok" for record in records):
                code, told = 2, f"nothing ran: {told}"  # a gate that looks at nothing must not be green
        return Step(name=name, words=words, code=code, told=told, comparison=comparison, **fields)


def _lift(folder: Path) -> None:
    """Put what a command wrote into a folder of its own, named by the time, into the step's: its place is known then."""
    inner = [path for path in folder.glob("*") if path.is_dir()]
    for path in inner[0].iterdir() if len(inner) == 1 else ():
        path.rename(folder / path.name)
    if len(inner) == 1:
        inner[0].rmdir()


def outcome(steps: Sequence[Step], allow_unsure: bool = False) -> tuple[int, str]:
    """The exit code of all steps together, and the headline: the verdict, and what made it so."""
    decisive = [(step, _code(step, allow_unsure)) for step in steps if step.decides]
    code = next((code for code in (1, 2, 3) if any(found == code for _, found in decisive)), 0)
    causes = [step for step, found in decisive if found == code]
    told = [step for step, _ in decisive if step.comparison is not None]
    if code == 0 and not told:
        return 0, "RIGHT, and compared with nothing"
    shown = causes if code else told
    return code, f"{_word(code, shown)}: " + "; ".join(f"{step.name}: {step.told}" for step in shown)


def _code(step: Step, allow_unsure: bool) -> int | None:
    return 0 if allow_unsure and step.code == 3 and not _count(step, "MISSING") else step.code


def _word(code: int, causes: Sequence[Step]) -> str:
    """WRONG before SLOWER, MISSING before UNSURE; where all is new, that nothing was held against anything."""
    if code == 1:
        is_wrong = any(step.comparison is None or _count(step, "WRONG") for step in causes)
        return "WRONG" if is_wrong else "SLOWER"
    if code == 3:
        return "MISSING" if any(_count(step, "MISSING") for step in causes) else "UNSURE"
    if code == 0 and all(_count(step, "NEW") == _count(step, *VERDICTS) for step in causes):
        return "RIGHT, and compared with nothing"
    return {0: "PASS", 2: "NOT MEASURED"}[code]


def _count(step: Step, *verdicts: str) -> int:
    return sum(int(step.comparison["counts"][verdict]) for verdict in verdicts) if step.comparison else 0
