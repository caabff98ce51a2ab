"""`ci`: what a GPU runner does for a change, from the pre-flight to one summary. `tox run -e gpu` is this command.

    pre-flight   doctor --strict: is this machine fit to judge by? If not, nothing is measured
    check        every chosen implementation on the cases that have broken such kernels
    run          check and time the chosen cases, with the report
    ab           the commit at which this checkout left the base, and this checkout, measured in turn
    compare      the run against the device's accepted baseline, where there is one

`ab` decides. A baseline was measured on another day and decides only where there is no `ab`, or under --strict-baseline.

Exit codes: 1 something is WRONG or SLOWER; else 2 a step could not be done, the machine is not fit, or wrong usage; else 3
something is UNSURE or MISSING (--allow-unsure lets UNSURE pass); else 0.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.baseline import BASELINES, baseline_of
from harness.commands.compare import share_of
from harness.commands.selection import DEFAULT_LAYOUTS, add_selection
from harness.gate import Job, Step, outcome
from harness.names import UsageError, count_of, path_of, text_of
from harness.rooms import HOUSE
from harness.store import RECORDS, load, new_run
from harness.trees import merge_base, root_of
from harness.words import printable

CI = Path("results/ci")
_RESULTS = {0: "good", 1: "bad", 2: "error", 3: "unsure", None: "not done"}


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the command's options."""
    add_selection(parser)
    add = parser.add_argument
    add("--device", type=text_of, metavar="NAME", help="cpu, which leaves out the pre-flight, or cuda (default: the one GPU)")
    add("--check-suite", default="edges", type=text_of, metavar="NAME", help="what is checked first (default: %(default)s)")
    add("--base", type=text_of, metavar="REF", help="a revision, whose merge base with this checkout is measured beside it, or "
        "a folder (default: $PAGEDBENCH_BASE, else origin/main or the branch that the pull request is for)")  # fmt: skip
    add("--baselines", type=path_of, default=BASELINES, metavar="DIR", help=f"where baselines are (default: {BASELINES})")
    add("--strict-baseline", action="store_true", help="the baseline decides, too, where ab does")
    add("--allow-unsure", action="store_true", help="exit 0 and not 3 where rows are UNSURE and none is MISSING")
    add("--threshold", type=share_of, metavar="SHARE", help="a difference within it is none, e.g. 2%%")
    add("--sm-clock", type=count_of, metavar="MHZ", help="the clock that the GPU is locked to, for the pre-flight")
    add("--out", type=path_of, default=CI, metavar="DIR", help=f"where the folder of all this is made (default: {CI})")


def main(arguments: argparse.Namespace) -> int:
    """Do all steps, write summary.md, and return the exit code."""
    base = _base(arguments)
    folder = new_run(arguments.out)
    job = Job(folder)
    steps = [_preflight(arguments, job)]
    if steps[0].code in (0, None):
        steps += _measure(arguments, job, base)
    code, headline = outcome(steps, arguments.allow_unsure)
    _tell(folder, steps, code, headline)
    return code


def _preflight(arguments: argparse.Namespace, job: Job) -> Step:
    """A machine that is not fit is nobody's regression: error, not bad."""
    if arguments.device == "cpu":
        return Step(name="pre-flight", told="--device cpu: the pre-flight is of GPUs")
    words = ["doctor", "--strict", *_option("--sm-clock", arguments.sm_clock)]
    code, lines = job.run(*words)
    return Step(name="pre-flight", words=words, code=2 if code else 0, told="; ".join(map(printable, lines)))


def _measure(arguments: argparse.Namespace, job: Job, base: str | Step) -> list[Step]:
    chosen, where = _chosen(arguments), _option("--device", arguments.device)
    impls = [word for name in ("impl", "impl_file", "layouts") for word in _options(arguments, name)]
    check = ["check", "--suite", arguments.check_suite, *impls, *where, "--out", str(job.folder / "check")]
    run = ["run", *chosen, *where, "--out", str(job.folder / "run")]
    steps = [job.step("check", check, "check")]
    if steps[0].code == 2:  # wrong usage, or a file of implementations that cannot be loaded: it would only be said again
        return steps
    steps += [job.step("run", run, "run"), _ab(arguments, job, base)]
    return [*steps, _compare(arguments, job, decides=arguments.strict_baseline or steps[-1].code is None)]


def _ab(arguments: argparse.Namespace, job: Job, base: str | Step) -> Step:
    if isinstance(base, Step):
        return base
    out, threshold = str(job.folder / "ab"), _option("--threshold", arguments.threshold)
    where = _option("--device", arguments.device)
    return job.step("ab", ["ab", base, *_chosen(arguments), *where, *threshold, "--runs-dir", out, "--out", out], "ab")


def _compare(arguments: argparse.Namespace, job: Job, decides: bool) -> Step:
    """Hold the run against the baseline of the device that its records name."""
    run = job.folder / "run"
    records = load(run)[0] if (run / RECORDS).is_file() else []
    devices = sorted({record.device for record in records})
    if not devices:
        return Step(name="compare", told="there is no record to compare", decides=decides)
    file = baseline_of(devices[0], arguments.baselines)
    if not file.is_file():
        return Step(name="compare", told=f"no baseline for {devices[0]} ({file}); `pagedbench accept RUN -m WHY` makes one")
    choice = [word for name in ("impl", "case", "impl_file", "device", "threshold") for word in _options(arguments, name)]
    # A baseline may hold more layouts and cases than a run measures: what it was not asked for is not missing.
    choice += _option("--layouts", arguments.layouts or DEFAULT_LAYOUTS)
    if not arguments.case and (arguments.suite or arguments.shape or arguments.case_file):
        choice += _option("--case", ",".join(sorted({record.case for record in records})))
    words = ["compare", str(run), *choice, "--baselines", str(arguments.baselines), "--out", str(job.folder / "compare")]
    words += ["--rerun-unsure", "--runs-dir", str(job.folder / "rerun")]
    return job.step("compare", words, "compare", decides=decides)


def _base(arguments: argparse.Namespace) -> str | Step:
    """What `ab` measures beside this checkout: a commit, a folder, or the step that says why there is neither.

    Raises UsageError where what was asked for is not there.
    """
    asked = arguments.base or os.environ.get("PAGEDBENCH_BASE")
    # Who brings kernels of their own compares revisions of their own repository, as in `ab`.
    root = root_of(Path.cwd()) if arguments.impl_file else root_of(HOUSE)
    if asked and Path(asked).is_dir():
        return asked
    if root is None:
        if asked:
            raise UsageError(f"--base {asked}: neither a folder nor is there a git checkout here")
        return Step(name="ab", told="nothing to compare with: no git checkout here; --base takes a folder, too")
    guess = f"origin/{os.environ.get('GITHUB_BASE_REF') or 'main'}"
    try:
        return merge_base(asked or guess, root)[:12]
    except UsageError as why:
        if asked:
            raise
        return Step(name="ab", told=f"nothing to compare with: {why}; or name it: --base REF or PAGEDBENCH_BASE")


def _chosen(arguments: argparse.Namespace) -> list[str]:
    """What was chosen, as words for another command."""
    names = ("impl", "impl_file", "layouts", "case", "suite", "case_file", "shape")
    return [word for name in names for word in _options(arguments, name)]


def _options(arguments: argparse.Namespace, name: str) -> list[str]:
    return _option("--" + name.replace("_", "-"), getattr(arguments, name))


def _option(option: str, value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [f"{option}={one}" for one in values if one is not None]


def _tell(folder: Path, steps: Sequence[Step], code: int, headline: str) -> None:
    """Write summary.md, and tell GitHub where it is, if it asks."""
    from harness.report.comment import comment

    lines = [[step.name, _result(step), step.told] for step in steps]
    summary = folder / "summary.md"
    text = comment(headline, lines, _sections(folder, steps))
    summary.write_text(text, encoding="utf-8", errors="backslashreplace")
    for variable, found in (
        ("GITHUB_STEP_SUMMARY", text),
        ("GITHUB_OUTPUT", f"folder={folder}\nsummary={summary}\nexit-code={code}\n"),
    ):
        if os.environ.get(variable):
            with Path(os.environ[variable]).open("a", encoding="utf-8", errors="backslashreplace") as out:
                out.write(found)
    print(printable(headline), f"summary: {printable(summary)}", sep="\n")


def _result(step: Step) -> str:
    return _RESULTS[step.code] + ("" if step.decides or step.code in (0, None) else ", does not decide")


def _sections(folder: Path, steps: Sequence[Step]) -> list[Any]:
    """The parts of the summary, what must be looked at first."""
    from harness.report.comment import Section, faults, times

    records = {name: load(folder / name)[0] for name in ("check", "run") if (folder / name / RECORDS).is_file()}
    found = faults([record for name in records for record in records[name]])
    sections = [Section(title="Not right", text=found, folded=False)] if found else []
    titles = {"ab": "Against the base, measured in turn", "compare": "Against the baseline, measured on another day"}
    for step in steps:
        if step.comparison is not None:
            text = (folder / step.name / "summary.md").read_text(encoding="utf-8").partition("\n\n")[2].strip()
            sections.append(Section(title=titles[step.name], text=text, folded=not step.decides))
    table = times(records.get("run", []))
    again = "\n".join(f"pagedbench {shlex.join(step.words)}" for step in steps if step.words)
    sections += [table] if table else []
    return [*sections, Section(title="The steps, to be run by hand", text=f"```\n{again}\n```")]
