"""A load served once, and what came of it: when each token was on the host, and how blocks stood."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runtime.engine import Engine
from runtime.requests import Sampling
from runtime.traces import Trace

LOOK_EVERY = 16  # steps, at how blocks stand


@dataclass(kw_only=True)
class Served:
    """One run of a load. Seconds count from the first request's arrival.

    submitted      by request
    tokens_at      by request, when each of its tokens was on the host
    utilisation    tokens over slots of live blocks, now and then
    """

    submitted: dict[Hashable, float] = field(default_factory=dict)
    tokens_at: dict[Hashable, list[float]] = field(default_factory=dict)
    utilisation: list[float] = field(default_factory=list)
    num_preemptions: int = 0

    @property
    def elapsed_s(self) -> float:
        """From the first arrival to the last token."""
        return max(times[-1] for times in self.tokens_at.values())

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens_at.values()))

    def first_token_s(self) -> NDArray[np.float64]:
        """TTFT of each request."""
        return np.array([times[0] - self.submitted[request] for request, times in self.tokens_at.items()])

    def per_token_s(self) -> NDArray[np.float64]:
        """TPOT of each request of more than one token: from its first to its last, over their number less one."""
        return np.array([(t[-1] - t[0]) / (len(t) - 1) for t in self.tokens_at.values() if len(t) > 1])

    def between_tokens_s(self) -> NDArray[np.float64]:
        """Inter-token latencies of all requests together."""
        return np.concatenate([np.zeros(0), *(np.diff(times) for times in self.tokens_at.values())])


def serve(
    engine: Engine, trace: Trace, prompts: Sequence[NDArray[np.int32]], sampling: Callable[[int, int], Sampling]
) -> Served:
    """Serve a load from its first request to its last token; `sampling` of its number and its tokens says how each goes on."""
    served, before = Served(), engine.scheduler.num_preemptions
    arrivals = np.zeros(len(trace)) if trace.arrival is None else trace.arrival
    coming = deque(enumerate(arrivals.tolist()))
    begin = time.perf_counter()
    while coming or not engine.is_idle:
        now = time.perf_counter() - begin
        while coming and coming[0][1] <= now:
            index, at = coming.popleft()
            request_id = f"load-{index}"
            served.submitted[request_id] = at
            served.tokens_at[request_id] = []
            engine.submit(prompts[index], sampling(index, int(trace.output[index])), request_id)
        if engine.is_idle:
            time.sleep(min(coming[0][1] - now, 1e-3))
            continue
        events = engine.step()
        now = time.perf_counter() - begin
        for event in events:
            served.tokens_at[event.request_id].append(now)
        if engine.num_steps % LOOK_EVERY == 0 and engine.manager.num_live_blocks:
            slots = engine.manager.num_live_blocks * engine.manager.block_size
            served.utilisation.append(1 - engine.manager.num_empty_slots / slots)
    served.num_preemptions = engine.scheduler.num_preemptions - before
    return served
