"""A trace through an allocator, step by step: let in what fits, give all a token, measure, let go what is done.

First come, first served; who finds no room stops those behind. Where a token finds none, the request let in last is thrown
out with all it has, and waits at the front to be computed again; nobody is let in until another has ended.
"""

from collections import defaultdict, deque
from collections.abc import Callable

from runtime.errors import OutOfBlocks
from runtime.stores import Store
from runtime.traces import Trace
from runtime.waste import Meter, Waste

Picture = Callable[[int, Store], None]


class Replay:
    """One run. `on_step(step, store)` is called after each step's measurement."""

    def __init__(self, trace: Trace, store: Store, *, step_s: float = 0.03, on_step: Picture | None = None) -> None:
        self._store = store
        self._trace = trace
        self._on_step = on_step
        self._prompt, self._output = trace.prompt.tolist(), trace.output.tolist()
        self._arrival = None if trace.arrival is None else (trace.arrival / step_s).astype(int).tolist()
        self._next = 0  # the first request that has never been let in
        self._thrown_out: deque[int] = deque()
        self._done: dict[int, int] = {}  # tokens that thrown-out requests had generated
        self._running: dict[int, int] = {}  # request -> step of its last token, in the order in which they were let in
        self._ending: defaultdict[int, list[int]] = defaultdict(list)
        self._tokens = 0  # of one sample of each running request
        self._step = 0
        self._closed = False  # whether somebody must end before anybody is let in
        self._num_preemptions = self._num_rejected = 0
        self._meter = Meter(store.num_slots)

    def run(self, allocator: str) -> Waste:
        """To the end of the trace."""
        while True:
            waiting = self._let_in()
            if not self._running and not self._skip_to_arrival():
                break
            if not self._running:
                continue
            self._grow()
            self._measure(waiting)
            self._let_go()
            self._step += 1
        return self._meter.waste(
            trace=self._trace.name,
            allocator=allocator,
            num_requests=len(self._trace),
            num_rejected=self._num_rejected,
            copied_tokens=self._store.copied_tokens,
            num_preemptions=self._num_preemptions,
        )

    def _head(self) -> int | None:
        """The request whose turn it is."""
        if self._thrown_out:
            return self._thrown_out[0]
        if self._next == len(self._prompt) or (self._arrival and self._arrival[self._next] > self._step):
            return None
        return self._next

    def _let_in(self) -> int | None:
        """Let requests in; returns the one for which there is no room."""
        if self._closed:  # the answer of the last time stands, for nothing has been freed
            return self._head()
        while (request := self._head()) is not None:
            done = self._done.get(request, 0)
            length, final = self._prompt[request] + done, self._prompt[request] + self._output[request]
            if not self._store.can_ever(self._prompt[request], final):
                self._leave_queue(request)
                self._num_rejected += 1
                continue
            if not self._store.open(request, length, final, alone=not self._running):
                self._closed = True
                return request
            self._leave_queue(request)
            last = self._step + self._output[request] - done - 1
            self._running[request] = last
            self._ending[last].append(request)
            self._tokens += length
        return None

    def _leave_queue(self, request: int) -> None:
        if self._thrown_out:
            self._thrown_out.popleft()
            self._done.pop(request, None)
        else:
            self._next += 1

    def _skip_to_arrival(self) -> bool:
        """Pass the time until somebody comes; False where nobody will."""
        if self._arrival is None or self._next == len(self._prompt):
            return False
        self._step = self._arrival[self._next]
        return True

    def _grow(self) -> None:
        while True:
            try:
                self._store.grow(self._running)
            except OutOfBlocks:
                self._throw_out()
                continue
            self._tokens += len(self._running)
            return

    def _throw_out(self) -> None:
        """Close the request that was let in last. One that cannot even go on alone is rejected."""
        request, last = self._running.popitem()
        self._store.close(request)
        self._ending[last].remove(request)
        done = self._output[request] - (last - self._step + 1)
        self._tokens -= self._prompt[request] + done
        if not self._running:
            self._num_rejected += 1
            self._closed = False
            return
        self._num_preemptions += 1
        self._closed = True
        self._thrown_out.appendleft(request)
        self._done[request] = done

    def _measure(self, waiting: int | None) -> None:
        store = self._store
        if not self._running:
            return
        held_back = 0
        if waiting is not None:
            length = self._prompt[waiting] + self._done.get(waiting, 0)
            held_back = store.held_back(length, self._prompt[waiting] + self._output[waiting])
        tokens = self._tokens * store.num_samples
        self._meter.step(
            tokens=tokens,
            stored=store.stored(tokens),
            reserved=store.reserved(),
            held_back=held_back,
            running=len(self._running) * store.num_samples,
        )
        if self._on_step:
            self._on_step(self._step, store)

    def _let_go(self) -> None:
        for request in self._ending.pop(self._step, ()):
            del self._running[request]
            self._closed = False
            self._store.close(request)
            self._tokens -= self._prompt[request] + self._output[request]
