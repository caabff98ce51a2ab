"""A request on its way: its sequences, and what of each is known, fed and on the way back from the device.

    tokens known to the host        |<------------ len(tokens) ------------>|
    sampled, still on the device                                            |<- num_pending ->|
    keys and values launched        |<------- num_fed ------->|<---------- num_unfed -------->|
"""

from __future__ import annotations

from runtime.requests import Answer, Request

NO_STATE = -1  # the token to be fed is known to the host


class Sequence:
    """One answer in the making.

    tokens         known ids, the prompt's first
    num_fed        tokens whose forward pass is launched: the manager's length
    num_pending    tokens sampled by steps that are not collected: 1 where a step is in flight
    state          place of its last token on the device
    index          which answer of its request
    """

    __slots__ = ("finish", "group", "index", "max_length", "num_fed", "num_pending", "sequence_id", "state", "tokens")

    def __init__(self, sequence_id: int, group: Group, tokens: list[int], state: int, index: int = 0) -> None:
        self.sequence_id, self.group, self.tokens, self.state, self.index = sequence_id, group, tokens, state, index
        self.max_length = group.max_length
        self.num_fed = 0
        self.num_pending = 0
        self.finish: str | None = None

    @property
    def num_unfed(self) -> int:
        """Tokens to be fed before the next can be sampled; 0 for one that has all of its tokens, seen or not."""
        total = len(self.tokens) + self.num_pending
        return total - self.num_fed if total < self.max_length else 0

    @property
    def num_outputs(self) -> int:
        """New tokens, the pending one included."""
        return len(self.tokens) + self.num_pending - self.group.num_prompt


class Group:
    """A request and its sequences: admitted, preempted, resumed and ended together.

    stops        token ids that end an answer, and how that is called
    is_forked    whether all sequences that it comes to are there
    in_flight    whether the host has to see a step's results before the next one: beams
    """

    def __init__(self, request: Request, eos: frozenset[int]) -> None:
        sampling = request.sampling
        self.request = request
        self.num_prompt = int(request.prompt.size)
        self.max_length = self.num_prompt + sampling.max_tokens
        self.width = sampling.width
        ends = {} if sampling.ignore_eos or sampling.num_beams else dict.fromkeys(eos, "eos")
        self.stops = {**dict.fromkeys(sampling.stop_token_ids, "stop"), **ends}
        self.sequences: list[Sequence] = []
        self.scores: list[float] = [0.0]  # of beams, in the order of sequences
        self.is_forked = self.width == 1
        self.is_beam_search = sampling.num_beams > 0
        self.in_flight = False
        self.preempted_by: str | None = None
        self.answers: dict[int, Answer] = {}

    def feeds(self) -> list[tuple[Sequence, int]]:
        """Sequences that can be fed now, and how many tokens each at most.

        Beams are held together: none feeds its last token before all can, for their next tokens are chosen among all.
        """
        if self.in_flight:
            return []
        if len(self.sequences) == 1:  # most are so, and this is asked of all in every step
            (sequence,) = self.sequences
            unfed = sequence.num_unfed
            return [(sequence, unfed)] if unfed else []
        found = [(sequence, sequence.num_unfed) for sequence in self.sequences]
        if self.is_beam_search and any(unfed > 1 for _, unfed in found):
            found = [(sequence, unfed - 1) for sequence, unfed in found]
        return [(sequence, unfed) for sequence, unfed in found if unfed]

    @property
    def is_done(self) -> bool:
        return len(self.answers) == self.width
