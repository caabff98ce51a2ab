"""The engine: requests in, tokens out, on any implementation of the registry.

    engine = Engine(load("qwen3-tiny", dtype="f32"), num_blocks=256)
    answers = engine.generate([[1, 2, 3], [4, 5]], Sampling(max_tokens=8))

A step launches the next batch before it looks at what the one before sampled, so the device never waits for the host.
docs/runtime.md walks through one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from harness.names import UsageError
from harness.ops.dtypes import torch_dtype
from harness.registry import Registry
from runtime.attention import activate, bind_caches, is_bound, new_handle
from runtime.batch import Batch
from runtime.beams import Found, best_continuations
from runtime.clock import StepClock
from runtime.graphs import GraphBucket, why_no_replay
from runtime.kernels import CacheShape, Kernels
from runtime.manager import BlockManager
from runtime.model import Model
from runtime.requests import Answer, Event, InvalidRequest, Request, Sampling
from runtime.sampler import sample, upload, warm_up_sampler
from runtime.scheduler import Scheduler
from runtime.settings import Settings, num_blocks
from runtime.steps import Bucket, Buckets, Result, Runner, bucket_sizes
from runtime.swapping import BlockMover


@dataclass(kw_only=True)
class Flight:
    """A launched step whose samples are on their way: a row of the ring, and the event behind their copy (None on a CPU).

    tokens            int64 [num_sampled] on the host, valid after the event
    best, scores      of each beam search, on the host as well
    """

    batch: Batch
    tokens: torch.Tensor
    searches: list[tuple[torch.Tensor, torch.Tensor]]
    event: Any


class Engine:
    """Serves one model. Raises UsageError, Unsupported or InvalidRequest for what cannot be meant; see `Settings`."""

    def __init__(
        self, model: Model, settings: Settings | None = None, registry: Registry | None = None, **changes: Any
    ) -> None:
        settings = Settings(**changes) if settings is None else dataclasses.replace(settings, **changes)
        self.model, self.settings = model, settings
        self.max_model_len = min(settings.max_model_len or model.max_model_len, model.max_model_len)
        config = model.config
        shape = CacheShape(
            num_layers=config.num_hidden_layers, num_q_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads, head_dim=config.head_dim, scale=config.head_dim**-0.5, dtype=model.dtype,
            block_size=settings.block_size, num_blocks=num_blocks(model, settings, self.max_model_len),
            max_seq_len=self.max_model_len, device=model.device,
        )  # fmt: skip
        q_len = min(settings.max_num_tokens, self.max_model_len)
        self.kernels = Kernels(shape, max_q_len=q_len, decode=settings.impl, prefill=settings.prefill, registry=registry)
        caches = self.kernels.empty_caches()
        self.handle = new_handle()
        bind_caches(model.module, self.handle, *caches)
        if settings.compile != "no":
            model.compile(settings.compile)
        self.manager = BlockManager(shape.num_blocks, settings.block_size, num_host_blocks=settings.num_host_blocks)
        self.scheduler = Scheduler(
            self.manager, max_num_tokens=settings.max_num_tokens, max_num_seqs=settings.max_num_seqs,
            max_model_len=self.max_model_len, eos=model.eos, preempt_by=settings.preempt_by,
        )  # fmt: skip
        self._mover = BlockMover(self.kernels, *caches, settings.num_host_blocks)
        limits = {"max_num_seqs": settings.max_num_seqs, "max_num_tokens": settings.max_num_tokens}
        with torch.inference_mode():
            self.runner = Runner(model, self.kernels, self.handle, **limits)
            self.why_no_graphs = self._why_no_graphs(caches[0][0], caches[1][0])
        least = 1 if settings.compile == "no" else 2  # to a compiler a single token is another graph
        self.buckets = Buckets(bucket_sizes(settings.max_num_seqs, least), self._make_bucket)
        pinned = shape.kind == "cuda"
        self._ring = [torch.zeros(settings.max_num_seqs, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._flying: Flight | None = None
        self._pool: Any = None  # of memory, which graphs share
        self._heard: dict[Hashable, deque[Event]] = {}  # of streams: what steps have brought, whoever asked for the step
        self._ids = itertools.count()
        self.num_steps = 0
        self.clock: StepClock | None = None  # who wants to know how long steps take sets one
        weakref.finalize(self, activate, self.handle, None)

    def _why_no_graphs(self, key_cache: torch.Tensor, value_cache: torch.Tensor) -> str | None:
        """Why decode steps are launched kernel by kernel, or None where they are replayed."""
        if self.kernels.shape.kind != "cuda":
            return "there is no GPU"
        if not self.settings.graphs:
            return "the settings say so"
        return why_no_replay(self.kernels, self.runner.decode_buffers, key_cache, value_cache)

    def _make_bucket(self, size: int) -> Bucket:
        if self.why_no_graphs is not None:
            return self.runner.bucket(size)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            return self.runner.bucket(size, functools.partial(GraphBucket, pool=self._pool))
        except RuntimeError as why:  # something of the model cannot be captured; who records the engine's times is told
            self.why_no_graphs = f"{self.model.name} in a CUDA graph: {why}"
            return self.runner.bucket(size)

    def close(self) -> None:
        """Give the caches and graphs back; the model can then serve another engine."""
        activate(self.handle, None)
        if is_bound(self.model.module, self.handle):
            nothing = (None,) * self.kernels.shape.num_layers
            bind_caches(self.model.module, self.handle, nothing, nothing)
        if self.settings.compile != "no":
            self.model.uncompile()
        for name in ("_mover", "runner", "buckets"):
            self.__dict__.pop(name, None)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Make all buckets and the sampler's kernel, seconds on a GPU; else each is made when it is first needed."""
        self.buckets.make_all()
        warm_up_sampler(self.model.vocab_size, torch_dtype(self.model.dtype), self.model.device)

    # Requests

    def submit(self, prompt: Iterable[int], sampling: Sampling | None = None, request_id: Hashable = None,
               salt: Hashable = None) -> Hashable:  # fmt: skip
        """Queue a request; returns its id, one nobody has where none is given. Raises InvalidRequest.

        UsageError where the engine serves nobody any more.
        """
        self._require_open("submit")
        if request_id is None:
            request_id = next(name for name in map("request-{}".format, self._ids) if name not in self.scheduler.groups)
        request = Request.of(request_id, prompt, sampling or Sampling(), salt)
        largest = int(request.prompt.max())
        if largest >= self.model.vocab_size:
            raise InvalidRequest(f"request {request_id!r}: token ids are below {self.model.vocab_size} (got {largest})")
        beams = request.sampling.num_beams
        if beams > self.model.vocab_size:
            raise InvalidRequest(f"request {request_id!r}: num_beams must be at most {self.model.vocab_size}, the tokens that "
                                 f"the first one is chosen from (got {beams})")  # fmt: skip
        self.scheduler.submit(request)
        self._heard.pop(request_id, None)  # of an ended request, whose stream has what it heard
        return request_id

    def abort(self, request_id: Hashable) -> list[Event]:
        """End a request now. Raises InvalidRequest for one that is not served."""
        return self._tell(self.scheduler.abort(request_id))

    def _tell(self, events: list[Event]) -> list[Event]:
        """Keep what streams wait for; whoever asked for a step, here or in another stream, is told all."""
        for event in events:
            if event.request_id in self._heard:
                self._heard[event.request_id].append(event)
        return events

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be done or to be waited for."""
        return self.scheduler.is_idle and self._flying is None

    def generate(self, prompts: Sequence[Iterable[int]], sampling: Sampling | Sequence[Sampling]) -> list[list[Answer]]:
        """Serve prompts to the end; the answers of each, in order. Refuses all if it refuses one."""
        prompts = list(prompts)
        each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        if len(each) != len(prompts):
            raise InvalidRequest(f"generate: give one Sampling, or one for each of {len(prompts)} prompts (got {len(each)})")
        ids: list[Hashable] = []
        try:
            for prompt, one in zip(prompts, each, strict=True):
                ids.append(self.submit(prompt, one))
            groups = [self.scheduler.groups[request_id] for request_id in ids]
            while not all(group.is_done for group in groups):
                self.step()
        except BaseException:  # also an interrupt: nobody else would ask for their end
            for request_id in ids:
                if request_id in self.scheduler.groups:
                    self.abort(request_id)
            raise
        return [[group.answers[index] for index in range(group.width)] for group in groups]

    def stream(self, prompt: Iterable[int], sampling: Sampling | None = None, request_id: Hashable = None) -> Iterator[Event]:
        """Serve a request and yield its events as they come; others, streams too, go on beside it, whoever asks for steps."""
        request_id = self.submit(prompt, sampling, request_id)
        group, heard = self.scheduler.groups[request_id], deque[Event]()
        self._heard[request_id] = heard
        try:
            while heard or not group.is_done:
                if not heard:
                    self.step()
                while heard:
                    yield heard.popleft()
        finally:
            if self._heard.get(request_id) is heard:
                del self._heard[request_id]
            if not group.is_done:  # whoever listened has gone
                self.abort(request_id)

    def _require_open(self, door: str) -> None:
        if "runner" not in self.__dict__:
            raise UsageError(f"Engine.{door}: the engine is closed")
        if not is_bound(self.model.module, self.handle):
            raise UsageError(f"Engine.{door}: the model serves another engine, made later: one model, one engine at a time")

    # A step

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Launch the next batch, then take in the one before; returns what has become known.

        A step that breaks off, wherever and by whatever, ends all requests as abort() would and empties the pool: what
        they were to feed and move may be in no block.
        """
        self._require_open("step")
        try:
            return self._step()
        except BaseException:  # also an interrupt, which most often comes while the device is waited for
            self._flying = None
            self._tell(self.scheduler.abandon())
            raise

    def _step(self) -> list[Event]:
        batch = self.scheduler.schedule()
        self._mover.swap_out(self.scheduler.swap_out)  # also where nobody runs: what left the pool is read again
        self._mover.swap_in(self.scheduler.swap_in)
        flight = None
        if batch is not None:
            flight = self._launch(batch)
            self.scheduler.launched(batch)
            self.num_steps += 1
        landed, self._flying = self._flying, flight
        return [] if landed is None else self._land(landed)

    def _launch(self, batch: Batch) -> Flight:
        """Put a batch on the device's queue, block copies first, and its samples' way back behind it."""
        self._mover.copy(batch.copies)
        places = batch.sampled_from + [place for _, tokens in batch.searched for place in tokens]
        if batch.is_decode:
            bucket = self.buckets.of(len(batch.rows))
            bucket.buffers.fill(batch, bucket.size)
            bucket.buffers.upload(bucket.size)
            bucket.plan()
            begin = self.clock.now() if self.clock else None
            result = bucket.run()
            rows = places
        else:
            begin = self.clock.now() if self.clock else None
            result = self._run_mixed(batch, places)
            rows = list(range(len(places)))
        if self.clock:
            self.clock.note(batch, begin)
        tokens = self._sample(batch, result, rows)
        return self._send_back(batch, result, rows, tokens)

    def _run_mixed(self, batch: Batch, places: list[int]) -> Result:
        buffers = self.runner.mixed_buffers
        buffers.fill(batch, len(batch.rows))
        nobody = self.settings.max_num_seqs
        states = [s.state for s in batch.sampled]
        buffers.fill_samples(places, states + [nobody] * (len(places) - len(states)))
        buffers.upload(len(batch.rows))
        return self.runner.run_mixed(batch.num_tokens, len(batch.rows), batch.num_ones, len(places))

    def _sample(self, batch: Batch, result: Result, rows: list[int]) -> torch.Tensor:
        """int64 [num_sampled] on the device: the tokens of batch.sampled, where their states keep them, too."""
        count = len(batch.sampled)
        drawn = [i for i, sequence in enumerate(batch.sampled) if not sequence.group.request.sampling.is_greedy]
        in_order = rows[:count] == list(range(count))
        if not drawn and in_order:
            return result.best[:count]
        device = result.best.device
        tokens = result.best[:count] if in_order else result.best[upload(torch.tensor(rows[:count]), device)]
        if drawn:
            tokens = tokens.clone()
            chosen = result.logits[upload(torch.tensor([rows[i] for i in drawn]), device)]
            tokens[upload(torch.tensor(drawn), device)] = sample(chosen, [batch.sampled[i] for i in drawn])
        states = upload(torch.tensor([sequence.state for sequence in batch.sampled], dtype=torch.int64), device)
        self.runner.last_tokens[states] = tokens
        return tokens

    def _send_back(self, batch: Batch, result: Result, rows: list[int], tokens: torch.Tensor) -> Flight:
        host = self._ring[self.num_steps % 2][: len(tokens)]
        host.copy_(tokens, non_blocking=True)
        searches, begin = [], len(batch.sampled)
        for group, places in batch.searched:
            logits = result.logits[upload(torch.tensor(rows[begin : begin + len(places)]), tokens.device)]
            scores = upload(torch.tensor(group.scores), tokens.device)
            best = best_continuations(logits, scores, group.width)
            searches.append((best[0].to("cpu", non_blocking=True), best[1].to("cpu", non_blocking=True)))
            begin += len(places)
        event = None
        if tokens.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return Flight(batch=batch, tokens=host, searches=searches, event=event)

    def _land(self, flight: Flight) -> list[Event]:
        """Wait for a step's samples and take them in."""
        if flight.event is not None:
            flight.event.synchronize()
        vocabulary, found = self.model.vocab_size, []
        for scores, places in flight.searches:
            at = np.asarray(places)
            found.append(Found(
                parents=(at // vocabulary).tolist(), tokens=(at % vocabulary).tolist(), scores=scores.tolist()
            ))  # fmt: skip
        return self._tell(self.scheduler.collect(flight.batch, flight.tokens.tolist(), found))
