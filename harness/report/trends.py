"""The history of a report's rows: where each stood over the runs, and the steps in it with the revision that brought them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from harness.compare import THRESHOLD
from harness.history import Point, by_series, points
from harness.record import Record
from harness.report import charts, units
from harness.report.figures import Figure
from harness.report.tables import Table
from harness.report.verdicts import change
from harness.steps import FALSE_ALARMS, Step, find_steps

#: Rows that are drawn, the largest steps first; the table has all.
MOST_DRAWN = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trend:
    """One row over at least two runs, oldest first, and the steps in it."""

    points: Sequence[Point]
    steps: Sequence[Step]

    @property
    def name(self) -> str:
        return self.points[-1].label

    @property
    def scale(self) -> units.Scale:
        """The unit of all its times."""
        return units.time_scale(self.points[0].device_kind, [point.launch_s for point in self.points])


def find_trends(history: Sequence[Point], records: Sequence[Record]) -> list[Trend]:
    """Return the trends of the rows of `records`, those with the largest steps first.

    All of them together show a step where there is none with probability FALSE_ALARMS at most.
    """
    wanted = {(point.device, *point.series) for point in points(records)}
    series = [line for line in by_series(history).values() if len(line) > 1 and (line[0].device, *line[0].series) in wanted]
    level = FALSE_ALARMS / max(1, len(series))
    found = [Trend(points=line, steps=steps_in(line, level)) for line in series]
    return sorted(found, key=lambda trend: -max((abs(step.ratio - 1) for step in trend.steps), default=0.0))


def steps_in(line: Sequence[Point], level: float, threshold: float | None = None) -> list[Step]:
    """Return the steps of one series that are worth knowing: of more than the threshold, by default its device's."""
    least = THRESHOLD.get(line[0].device_kind, THRESHOLD["cpu"]) if threshold is None else threshold
    return find_steps([point.launch_s for point in line], level, least)


def step_words(line: Sequence[Point], step: Step) -> str:
    """Return a step in words: by how much, at which revision and run, and how sure that is."""
    before, after = line[step.at - 1], line[step.at]
    where = f"at revision {after.revision} (run {after.run}; before it {before.revision}, run {before.run})"
    return f"{change(step.ratio)} {where}{remarks(before, after)}, p = {step.probability:.1g}"


def remarks(before: Point, after: Point) -> str:
    """Say where two runs had the same kernel, so that the environment must have changed, or another GPU of the kind."""
    same = ", same binary" if before.kernel and before.kernel == after.kernel else ""
    return same + (", another GPU of the kind" if before.unit and after.unit and before.unit != after.unit else "")


def step_table(trends: Sequence[Trend]) -> Table:
    """Return a line for each step."""
    lines = []
    for trend in trends:
        for step in trend.steps:
            before, after = trend.points[step.at - 1], trend.points[step.at]
            revision = f"{before.revision} to {after.revision}{remarks(before, after)}"
            lines.append((trend.name, revision, after.run, change(step.ratio), f"{step.probability:.1g}"))
    return Table(heads=("row", "revision", "first run", "change", "p"), lines=tuple(lines), words=3)


def trend_table(trends: Sequence[Trend]) -> Table:
    """Return a line for each row: its first and last time and what lies between them."""
    lines = []
    for trend in trends:
        first, last = trend.points[0].launch_s, trend.points[-1].launch_s
        times = [f"{trend.scale.show(value)} {trend.scale.unit}" for value in (first, last)]
        lines.append((trend.name, str(len(trend.points)), *times, change(last / first), str(len(trend.steps))))
    fold = f"All {units.count(len(lines), 'row')} that two runs or more have"
    heads = ("row", "runs", "first", "last", "last to first", "steps")
    return Table(heads=heads, lines=tuple(lines), fold=fold)


def trend_figures(trends: Sequence[Trend]) -> list[Figure]:
    """Return a picture of each of the first MOST_DRAWN rows that have a step."""
    return [_figure(trend) for trend in trends[:MOST_DRAWN] if trend.steps]


def _figure(trend: Trend) -> Figure:
    scale, line = trend.scale, trend.points
    edges = [0, *(step.at for step in trend.steps), len(line)]
    dots = [
        charts.Dot(value=point.launch_s / scale.size, label=point.revision,
                   title=f"run {point.run}, revision {point.revision}: {scale.show(point.launch_s)} {scale.unit}")
        for point in line
    ]  # fmt: skip
    caption = "; ".join(step_words(line, step) for step in trend.steps)
    table = Table(
        heads=("run", "revision", "started", f"time {scale.unit}"), words=3,
        lines=tuple((point.run, point.revision, point.started_at, scale.show(point.launch_s)) for point in line),
    )
    picture = charts.runs(dots, edges, f"time {scale.unit}", f"{trend.name}: time of {len(line)} runs")
    return Figure(title=trend.name, picture=picture, legend=[], caption=caption, table=table)
