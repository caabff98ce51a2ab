"""pytest's door: the matrix of implementations and cases as test items, checked, and timed under --benchmark.

A test that asks for the fixture `paged_record` becomes one item for each chosen case and implementation and gets the
record of that row; `judge` makes a pass, a skip or a failure of it. Under --benchmark the row's samples, seconds on the
device, go into pytest-benchmark's table, file and comparison (harness/plugin_timing.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

from harness.commands.selection import DEFAULT_LAYOUTS
from harness.matrix import Matrix
from harness.names import UsageError
from harness.plugin_timing import DeviceClock, Timed
from harness.record import Record

if TYPE_CHECKING:
    from harness.ops.case import Case
    from harness.registry import Entry

_PARAMS = ("paged_case", "paged_entry")
_MATRIX = pytest.StashKey[Matrix]()
_IDLE = "rows are chosen, but no collected test asks for `paged_record`; `--pyargs harness.test_matrix` is one that does"
_REFUSED = "pagedbench_refused"  # what a worker of pytest-xdist hands back

#: name -> (of its argument, what it chooses, whether it may be given again); the same words as `pagedbench run` takes
_CHOICES = {
    "impl": ("GLOBS", "implementations, comma-separated globs", True),
    "impl-file": ("PATH", "a Python file with a table IMPLS of your own", True),
    "layouts": ("NAMES", f"layouts besides each implementation's first, or all (default: {DEFAULT_LAYOUTS})", False),
    "case": ("GLOBS", "cases, comma-separated globs over every suite's", True),
    "suite": ("NAME", "a suite of cases (default: smoke)", False),
    "case-file": ("PATH", "a JSON or TOML file of your own cases", True),
    "shape": ("SHAPE", "one case, e.g. q=32,kv=8,d=128,bs=16,lens=8192x64", True),
    # Not --device: the test suites of Triton and of others who may install this have an option of that name.
    "pagedbench-device": ("NAME", "cpu, cuda or cuda:INDEX (default: the first GPU, else the CPU)", False),
}
_SWITCHES = {
    "benchmark": "time rows that are right",
    "in-process": "measure in this process and not in a worker, for debuggers: a kernel that crashes ends the session",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pagedbench", "paged-attention kernels (pagedbench)")
    for name, what in _SWITCHES.items():
        group.addoption(f"--{name}", dest=_dest(name), action="store_true", help=what)
    for name, (metavar, what, again) in _CHOICES.items():
        how: dict[str, Any] = {"action": "append", "default": []} if again else {}
        group.addoption(f"--{name}", dest=_dest(name), metavar=metavar, help=what, **how)


def _dest(name: str) -> str:
    return "pagedbench_" + name.removeprefix("pagedbench-").replace("-", "_")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse wrong names before anything is collected; a run that asks for nothing of ours loads nothing of ours."""
    timed = config.getoption("pagedbench_benchmark")
    if timed and not config.pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError("--benchmark needs the plugin pytest-benchmark, which is absent or blocked")
    if timed and config.getoption("dist", "no") != "no":
        raise pytest.UsageError("--benchmark times rows in one process, not beside each other in several: give -n 0")
    if timed:
        config.pluginmanager.register(Timed(matrix_of(config)), "pagedbench-timed")
    else:
        config.pluginmanager.register(_Checked(), "pagedbench-checked")
        if _is_chosen(config):
            matrix_of(config)


def _is_chosen(config: pytest.Config) -> bool:
    return any(config.getoption(_dest(name)) not in (None, []) for name in _CHOICES)  # an empty one is to be refused


def matrix_of(config: pytest.Config) -> Matrix:
    """Return the run's matrix, made on first use."""
    if _MATRIX not in config.stash:
        chosen = argparse.Namespace(
            **{_dest(name).removeprefix("pagedbench_"): config.getoption(_dest(name)) for name in (*_CHOICES, *_SWITCHES)}
        )
        timed = config.getoption("pagedbench_benchmark")
        try:
            config.stash[_MATRIX] = Matrix(chosen, config.rootpath / "results" / "runs" if timed else None)
        except UsageError as error:
            raise pytest.UsageError(str(error)) from error
    return config.stash[_MATRIX]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make an item of each row for a test that asks for one; pytest-benchmark groups them by case."""
    if not set(_PARAMS) <= set(metafunc.fixturenames):
        return
    timed = metafunc.config.getoption("pagedbench_benchmark")  # pytest-benchmark, whose mark it is, may be absent otherwise
    rows = [
        pytest.param(
            case, entry, id=f"{case}-{entry}", marks=[pytest.mark.benchmark(group=case, timer=DeviceClock())] if timed else []
        )
        for case, entry in matrix_of(metafunc.config).rows
    ]
    metafunc.parametrize(_PARAMS, rows, indirect=True)


@pytest.fixture
def paged_case(request: pytest.FixtureRequest) -> Case:
    """The item's case."""
    return _row_of(request)[0]


@pytest.fixture
def paged_entry(request: pytest.FixtureRequest) -> Entry:
    """The item's implementation in one of its layouts."""
    return _row_of(request)[1]


def _row_of(request: pytest.FixtureRequest) -> tuple[Case, Entry]:
    names = _names(request.node)
    assert names is not None, "pytest_generate_tests names the row of every item that asks for one"
    return matrix_of(request.config).rows[names]


@pytest.fixture
def paged_measured(request: pytest.FixtureRequest, paged_case: Case, paged_entry: Entry) -> Record:
    """What came of the item's row. Results that cannot be written end the session: the next row's could not either."""
    try:
        return matrix_of(request.config).record((paged_case.name, str(paged_entry)))
    except (UsageError, OSError) as error:
        pytest.exit(f"pagedbench: {error}", returncode=pytest.ExitCode.INTERRUPTED)


class _Checked:
    """Where nothing is timed no item asks for `benchmark`, so that --benchmark-only and --benchmark-skip know."""

    @pytest.fixture
    def paged_record(self, paged_measured: Record) -> Record:
        """The record of the item's row, checked."""
        return paged_measured


def judge(record: Record) -> None:
    """Pass for a record that is "ok"; skip one that is unsupported or skipped; fail for any other. All with the reason."""
    if record.status in ("unsupported", "skipped"):
        pytest.skip(f"{record.row} on {record.case} is {record.status}: {record.reason}")
    if record.status != "ok":
        pytest.fail(f"{record.row} on {record.case} is {record.status}: {record.reason}", pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse a choice that no collected test would act on."""
    timed = config.getoption("pagedbench_benchmark") and not any("benchmark" in _fixtures(item) for item in items)
    if not (timed or _is_chosen(config)) or any(map(_names, items)):
        return
    if (told := getattr(config, "workeroutput", None)) is None:
        raise pytest.UsageError(_IDLE)
    told[_REFUSED] = True  # a worker of pytest-xdist, whose own errors nobody sees: the process that started it raises
    items.clear()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Refuse what a worker of pytest-xdist was to refuse."""
    if getattr(node, "workeroutput", {}).get(_REFUSED):
        raise pytest.UsageError(_IDLE)


def _fixtures(item: pytest.Item) -> Sequence[str]:
    return getattr(item, "fixturenames", ())


def pytest_collection_finish(session: pytest.Session) -> None:
    """Measure what is left after -k and the like, and no other row."""
    wanted = {names for item in session.items if (names := _names(item))}
    if wanted:
        matrix = matrix_of(session.config)
        matrix.wanted = [names for names in matrix.rows if names in wanted]


def _names(item: pytest.Item) -> tuple[str, str] | None:
    params = getattr(getattr(item, "callspec", None), "params", {})
    return (params[_PARAMS[0]], params[_PARAMS[1]]) if set(_PARAMS) <= set(params) else None


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let the worker go and write the report."""
    if _MATRIX in session.config.stash:
        try:
            session.config.stash[_MATRIX].close()
        except OSError as error:
            pytest.exit(f"pagedbench: no report: {error}", returncode=pytest.ExitCode.INTERRUPTED)
