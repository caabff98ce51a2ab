"""One process that may die: it measures rows and tells its parent, a line of JSON at a time. See workers.py.

Lines it reads: a piece of work each. Lines it writes: {"hello": facts of the device}, {"doing": what, "row": number,
"words": bytes of output so far}, {"record": ..., "row": number}, {"lost": why} before it gives up a device that answers no
more, {"error": why} for wrong usage, {"done": seconds by phase}.
"""

from __future__ import annotations

from typing import Any

from harness.channel import Channel, serve
from harness.registry import default_registry
from harness.work import rows_from_json


def main(channel: int) -> None:
    """Work through what standard input asks for; `channel` is the descriptor that the parent reads."""
    serve(channel, _work)


def _work(parent: Channel) -> None:
    desk = _Desk(parent)
    for asked in parent.asked():
        parent.tell(done=desk.work(asked))


class _Desk:
    """Holds the session from one piece of work to the next, as long as what is asked is of the same run and device."""

    def __init__(self, parent: Channel) -> None:
        self._parent = parent
        self._asked: dict[str, Any] = {}
        self._session: Any = None

    def work(self, asked: dict[str, Any]) -> dict[str, float]:
        """Work through a piece, tell its records, and return the seconds that it took by phase."""
        from harness.session import DeviceLost, Task

        rows = {name: asked.pop(name) for name in ("rows", "cases")}
        if asked != self._asked:
            self._asked, self._session = asked, _session(asked)
        session = self._session
        session.spent_s.clear()
        self._parent.tell(hello=session.facts())
        tasks = [
            Task(number=number, case=case, entry=entry)
            for number, (case, entry) in rows_from_json(rows, session.registry).items()
        ]
        try:
            for number, record in session.run_tasks(tasks, self._doing):
                self._parent.tell(record=record.to_line(), row=number)
        except DeviceLost as lost:
            self._parent.give_up(lost=str(lost))  # what a lost context would do on the way out is not worth waiting for
        return dict(session.spent_s)

    def _doing(self, doing: str, row: int | None) -> None:
        self._parent.tell(doing=doing, row=row, words=self._parent.printed())


def _session(asked: dict[str, Any]) -> Any:
    from harness.device import find_device
    from harness.options import Options
    from harness.session import Session

    find_device(asked["device"]).make_current()  # before users' files are run: what they make on "cuda" is to lie there
    registry = default_registry(asked["impl_files"], rehearsed=True)
    return Session(Options(**asked["options"]), registry, asked["device"], run=asked["run"], isolated=True)
