"""A trace through one paged allocator by counting: no block has a name, so a step costs the same for any number of sequences.

All running sequences get a token a step, so a sequence let in at step a with n tokens needs a block at every step s with
s = a - n modulo the block size: counting the sequences of each such phase tells how many blocks a step needs. `Replay`
over the block manager comes to the same numbers, bit for bit; a test holds the two together.
"""

from collections import defaultdict, deque

from runtime.stores import WATERMARK
from runtime.traces import BadTrace, Trace
from runtime.waste import Meter, Waste


class Count:
    """One run over `num_blocks` blocks of `block_size` tokens, in a closed loop, nothing shared."""

    def __init__(self, trace: Trace, *, num_blocks: int, block_size: int) -> None:
        if trace.arrival is not None:
            raise BadTrace(f"Count {trace.name}: arrivals are not counted; replay the trace through the block manager")
        self._trace = trace
        self._num_blocks, self._block_size = num_blocks, block_size
        self._free = num_blocks
        self._watermark = int(WATERMARK * num_blocks)
        self._prompt, self._output = trace.prompt.tolist(), trace.output.tolist()
        self._next = 0
        self._thrown_out: deque[tuple[int, int]] = deque()  # request, tokens generated before
        self._running: dict[int, tuple[int, int]] = {}  # request -> step let in, tokens then
        self._phases = [0] * block_size
        self._ending: defaultdict[int, list[int]] = defaultdict(list)
        self._step = self._tokens = 0
        self._closed = False
        self._num_preemptions = self._num_rejected = 0
        self._meter = Meter(num_blocks * block_size)

    def run(self, allocator: str) -> Waste:
        """To the end of the trace."""
        size, meter, running = self._block_size, self._meter, self._running
        while True:
            if not self._closed:
                self._let_in()
            if not running:
                break
            while (needed := self._phases[self._step % size]) > self._free:
                self._throw_out()
            self._free -= needed
            self._tokens += len(running)
            reserved = (self._num_blocks - self._free) * size
            meter.step(tokens=self._tokens, stored=self._tokens, reserved=reserved, held_back=0, running=len(running))
            for request in self._ending.pop(self._step, ()):
                self._close(request, self._prompt[request] + self._output[request])
                self._closed = False
            self._step += 1
        return meter.waste(
            trace=self._trace.name,
            allocator=allocator,
            num_requests=len(self._trace),
            num_rejected=self._num_rejected,
            copied_tokens=0,
            num_preemptions=self._num_preemptions,
        )

    def _let_in(self) -> None:
        size = self._block_size
        while self._thrown_out or self._next < len(self._prompt):
            request, done = self._thrown_out[0] if self._thrown_out else (self._next, 0)
            if -(-(self._prompt[request] + self._output[request]) // size) > self._num_blocks:
                self._num_rejected += 1
                self._next += 1
                continue
            length = self._prompt[request] + done
            if length // size + 1 > self._free - (self._watermark if self._running else 0):
                self._closed = True
                return
            if self._thrown_out:
                self._thrown_out.popleft()
            else:
                self._next += 1
            self._free -= -(-length // size)
            self._tokens += length
            self._running[request] = (self._step, length)
            self._phases[(self._step - length) % size] += 1
            self._ending[self._step + self._output[request] - done - 1].append(request)

    def _throw_out(self) -> None:
        request = next(reversed(self._running))
        begun, length = self._running[request]
        generated = self._step - begun
        final = self._prompt[request] + self._output[request]
        self._ending[begun + final - length - 1].remove(request)
        self._close(request, length + generated)
        self._thrown_out.appendleft((request, length + generated - self._prompt[request]))
        self._num_preemptions += 1
        self._closed = True

    def _close(self, request: int, tokens: int) -> None:
        begun, length = self._running.pop(request)
        self._phases[(begun - length) % self._block_size] -= 1
        self._free += -(-tokens // self._block_size)
        self._tokens -= tokens
