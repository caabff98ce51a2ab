"""What a replay measured: of the slots that an allocator held, how many had tokens in them."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Waste:
    """Averages over the steps in which anything ran. Shares are 0 to 1.

    utilisation     token states over reserved slots; above 1 where sequences share
    tokens, internal, external, free
                    of the pool: slots with a token; reserved without one; free while a request waits that would fit into the
                    free slots and fits into no hole; free otherwise
    num_rejected    requests longer than the pool can ever hold
    """

    trace: str
    allocator: str
    num_requests: int
    num_rejected: int
    num_steps: int
    utilisation: float
    tokens: float
    internal: float
    external: float
    free: float
    copied_tokens: int
    num_preemptions: int
    mean_running: float
    max_running: int

    def as_dict(self) -> dict[str, object]:
        """One flat record."""
        return asdict(self)


class Meter:
    """Sums over steps, in one order of additions, so that two replays of the same steps agree to the last bit."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_steps = 0
        self.utilisation = 0.0
        self.tokens = self.reserved = self.held_back = self.running = self.max_running = 0

    def step(self, *, tokens: int, stored: int, reserved: int, held_back: int, running: int) -> None:
        """One step: logical tokens, slots that hold one, slots reserved, free slots that are of no use, sequences."""
        self.num_steps += 1
        self.utilisation += tokens / reserved
        self.tokens += stored
        self.reserved += reserved
        self.held_back += held_back
        self.running += running
        if running > self.max_running:
            self.max_running = running

    def waste(
        self, *, trace: str, allocator: str, num_requests: int, num_rejected: int, copied_tokens: int, num_preemptions: int
    ) -> Waste:
        """What it comes to."""
        steps = max(self.num_steps, 1)
        whole = steps * self.num_slots
        return Waste(
            trace=trace,
            allocator=allocator,
            num_requests=num_requests,
            num_rejected=num_rejected,
            num_steps=self.num_steps,
            utilisation=self.utilisation / steps,
            tokens=self.tokens / whole,
            internal=(self.reserved - self.tokens) / whole,
            external=self.held_back / whole,
            free=1 - (self.reserved + self.held_back) / whole,
            copied_tokens=copied_tokens,
            num_preemptions=num_preemptions,
            mean_running=self.running / steps,
            max_running=self.max_running,
        )
