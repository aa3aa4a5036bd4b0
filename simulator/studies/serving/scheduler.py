"""Scheduler: which sequences the next step computes, and which cache blocks they hold. It knows no clock.

Iteration-level scheduling (Orca, OSDI '22) with vLLM's rules: requests wait in order of arrival and run in order of
admission; where decoding needs a block and none is free, the sequence admitted last gives up its own, goes back to the head
of the queue and computes everything anew (preemption by recomputation). With chunked prefill decoding comes first and
pieces of prompts fill the step (Sarathi-Serve, OSDI '24); without it whole prompts come first, in steps of their own.
A prompt is admitted when all its blocks are free, and WATERMARK of all blocks besides; or, where blocks are reserved, when
those of its whole answer are, beside a part of what running sequences still need.

All decoding sequences advance together, so a step costs time in proportion to what changes, not to what runs: sequences
that need a block, finish or fill a window are found in counters by the number of the decoding step.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import islice
from math import ceil
from sys import maxsize

from simulator.studies.serving.batch import Batch, Chunk
from simulator.studies.serving.limits import Limits, RequestState

WATERMARK = 0.01  # vLLM, core/block_manager.py: against admitting a prompt and preempting it at once


class _Keys:
    """Keys that all decoding sequences see in the next step, through one window."""

    def __init__(self, window: int | None) -> None:
        self._window = window
        self._full: Counter[int] = Counter()  # decoding step -> sequences that then fill the window
        self._growing = 0
        self.total = 0

    def change(self, cached: int, step: int, sign: int) -> None:
        """A sequence with so many cached tokens comes (+1) or goes (-1) before decoding step `step`."""
        keys = cached + 1
        if self._window is not None and keys >= self._window:
            self.total += sign * self._window
            return
        self.total += sign * keys
        self._growing += sign
        if self._window is not None:
            self._full[step + self._window - keys] += sign

    def advance(self, step: int) -> None:
        """To decoding step `step`, the next one."""
        self.total += self._growing
        self._growing -= self._full.pop(step, 0)


class Scheduler:
    """One queue and one pool of blocks. `next_batch` and `complete` take turns.

    Figures: preemptions; prefilled, decoded: tokens computed; recomputed: of those prefilled, the ones that had been cached.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting: deque[RequestState] = deque()
        self.running: dict[int, RequestState] = {}  # in order of admission
        self.free = limits.num_blocks
        self.preemptions = self.prefilled = self.decoded = self.recomputed = 0
        self.hosted_blocks = self._out = self._back = 0  # blocks in the host's memory, and on their way there and back
        self._shared = 0  # blocks of a beginning that prompts share
        self._final = 0  # blocks of all running sequences at their end
        self._keys = tuple(_Keys(window) for window in limits.windows)
        self._need: Counter[int] = Counter()  # decoding step mod block_size -> sequences that then need a block
        self._finish: dict[int, dict[int, RequestState]] = {}  # decoding step -> sequences whose last token it makes
        self._step = 0
        self._decoding = 0
        self._partial: RequestState | None = None
        self._decodes = 0
        self._since = 0  # steps that decoded since requests were last admitted
        self._pieces: list[tuple[RequestState, Chunk]] = []
        self._begun: list[RequestState] = []  # whose first token the step makes by decoding
        self._refused = False  # the first that waits finds too few blocks, until a request leaves

    @property
    def used_blocks(self) -> int:
        return self.limits.num_blocks - self.free

    @property
    def unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def undisturbed(self) -> bool:
        """The current step only decodes, no request that waits could join it, and none finishes with it."""
        joins = self.waiting and not self._refused and len(self.running) < self.limits.max_sequences
        return not (self._pieces or self._begun or joins or self._finish.get(self._step))

    def alike(self, most: int) -> int:
        """Number of equal steps from the current one on: no request finishes and blocks are free; at most `most`."""
        ends = min(step for step, jobs in self._finish.items() if jobs)
        count, free, size = min(most, ends - self._step), self.free, self.limits.block_size
        for ahead in range(1, count):
            free -= self._need[(self._step + ahead) % size]
            if free < 0:
                return ahead
        return count

    def pass_over(self, count: int) -> float:
        """Finish that many equal steps, including the current one; returns the mean blocks in use."""
        size, used, total = self.limits.block_size, self.used_blocks, self.used_blocks
        for ahead in range(1, count):
            used += self._need[(self._step + ahead) % size]
            total += used
        self.free = self.limits.num_blocks - used
        self.decoded += count * self._decodes
        self._since += count
        for each in self._keys:
            each.total += count * self._decodes
        self._step += count
        return total / count

    def next_batch(self) -> Batch | None:
        """What the next step computes; None if there is nothing to do."""
        self._pieces, self._begun, self._decodes, self._refused = [], [], 0, False
        self._take_over()
        if self.limits.apart:
            had_room = self._make_room()
            self._fill(maxsize, admit=had_room)
            self._decodes = self._decoding
        elif self.limits.chunked if self.limits.mixed is None else self.limits.mixed:
            had_room = self._make_room()
            self._decodes = self._decoding
            self._fill(self.limits.max_tokens - self._decodes, admit=had_room)
        else:
            self._fill(self.limits.max_tokens, admit=True)
            if not self._pieces:
                self._make_room()
                self._decodes = self._decoding
        if not self._decodes and not self._pieces:
            return None
        keys = tuple(each.total if self._decodes else 0 for each in self._keys)
        chunks, (out, back) = tuple(chunk for _, chunk in self._pieces), (self._out, self._back)
        self._out = self._back = 0
        return Batch(decodes=self._decodes, keys=keys, chunks=chunks, out=out, back=back)

    def release(self, job: RequestState) -> None:
        """The blocks of a finished prompt have been read."""
        self.free += self._own_blocks(job, job.cached)

    def complete(self, now_s: float) -> list[RequestState]:
        """The step is over: every sequence in it has its tokens. Returns those that are finished."""
        finished: list[RequestState] = []
        if self._decodes:
            self.decoded += self._decodes
            self._since += 1
            for job in self._finish.pop(self._step, {}).values():
                self._leave(job)
                job.cached, job.done = job.cached + 1, job.done + 1
                finished.append(job)
            self._step += 1
            for each in self._keys:
                each.advance(self._step)
            for job in finished if not self.limits.hands_over else ():
                self.free += self._own_blocks(job, job.cached)
        for job in self._begun:
            job.first_s = now_s if job.first_s is None else job.first_s
        for job, chunk in self._pieces:
            self.prefilled += chunk.new
            if self.limits.apart:
                continue
            job.cached += chunk.new
            if chunk.last:
                self._prefill_ends(job, now_s, finished)
        for job in finished:
            job.end_s = now_s
            del self.running[job.index]
            self._final -= self._blocks_at_end(job)
        return finished

    def _prefill_ends(self, job: RequestState, now_s: float, finished: list[RequestState]) -> None:
        job.done += 1
        job.first_s = now_s if job.first_s is None else job.first_s
        if job.done == job.request.output_tokens:
            if not self.limits.hands_over:
                self.free += self._own_blocks(job, job.cached)
            finished.append(job)
        else:
            self._join(job)

    def _join(self, job: RequestState) -> None:
        """It decodes from the next decoding step on."""
        job.since = self._step
        self._decoding += 1
        self._need[(self._step - job.cached) % self.limits.block_size] += 1
        last = self._step + job.request.output_tokens - job.done - 1
        self._finish.setdefault(last, {})[job.index] = job
        for each in self._keys:
            each.change(job.cached, self._step, +1)

    def _leave(self, job: RequestState) -> None:
        """It decodes no more. Its tokens are brought up to what they were before the decoding step that is next or now."""
        past = self._step - job.since
        job.cached, job.done = job.cached + past, job.done + past
        for each in self._keys:
            each.change(job.cached, self._step, -1)
        self._decoding -= 1
        self._need[(self._step - job.cached) % self.limits.block_size] -= 1

    def _make_room(self) -> bool:
        """Preempt until every decoding sequence has its next block, and take these. False if anything was preempted."""
        before = self.preemptions
        while self._short_of(self._need[self._step % self.limits.block_size]):
            self._preempt()
        self.free -= self._need[self._step % self.limits.block_size]
        return self.preemptions == before

    def _short_of(self, blocks: int, *coming: RequestState) -> bool:
        """Fewer are free, even where a beginning that nobody shares any more gives way."""
        if blocks > self.free and not any(map(self._shared_blocks, (*coming, *self.running.values()))):
            self.free, self._shared = self.free + self._shared, 0
        return blocks > self.free

    def _own_blocks(self, job: RequestState, tokens: int) -> int:
        """Of so many tokens, without those that the job shares with others."""
        limits = self.limits
        fixed = self._fixed_blocks(job) if limits.window_tokens else limits.state_blocks
        return -(-tokens // limits.block_size) - (self._shared_blocks(job) if limits.reuses else 0) + fixed

    def _fixed_blocks(self, job: RequestState) -> int:
        """Of states, and of layers that cache a window: as many from the beginning as the sequence ends with."""
        limits = self.limits
        tokens = job.request.prompt_tokens + job.request.output_tokens - 1
        inside = min(limits.window_tokens, tokens)
        more = limits.window_share * inside + max(0.0, inside / limits.window_part - tokens)
        return limits.state_blocks + ceil(more / limits.block_size)

    def _shared_blocks(self, job: RequestState) -> int:
        """Whole blocks alone are shared."""
        return job.request.shared_tokens // self.limits.block_size if self.limits.reuses else 0

    def _reused(self, job: RequestState) -> int:
        """Tokens of its prompt that are not computed: of whole blocks, and not the last, whose logits are needed."""
        size, request = self.limits.block_size, job.request
        return min(request.cached_tokens, request.prompt_tokens - 1) // size * size if self.limits.reuses else 0

    def _preempt(self) -> None:
        """The sequence admitted last loses its blocks and waits at the head of the queue."""
        _, job = self.running.popitem()
        self._refused = False
        self._final -= self._blocks_at_end(job)
        if job is self._partial:
            self._partial = None
            self.free += self._own_blocks(job, job.known)
        else:
            last = job.since + job.request.output_tokens - job.done - 1
            del self._finish[last][job.index]
            self._leave(job)
            self.free += self._own_blocks(job, job.cached)
        if not self._goes_to_host(job):
            self.recomputed += job.cached
            job.cached = 0
        job.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(job)

    def _goes_to_host(self, job: RequestState) -> bool:
        """What a preempted sequence had cached is kept there, if it has room and all of it was made."""
        blocks = self._own_blocks(job, job.cached)
        if not job.done or job.cached < job.known - 1 or self.hosted_blocks + blocks > self.limits.host_blocks:
            return False
        job.hosted = blocks
        self.hosted_blocks += blocks
        self._out += blocks
        return True

    def _take_over(self) -> None:
        """Requests whose caches come from elsewhere, another engine or the host, decode as soon as their blocks are free."""
        while self.waiting and self.waiting[0].cached and len(self.running) < self.limits.max_sequences:
            job = self.waiting[0]
            if not self._admitted(job, job.cached):
                return
            self.hosted_blocks -= job.hosted
            self._back += job.hosted
            job.hosted = 0
            self._join(job)

    def _admitted(self, job: RequestState, tokens: int) -> bool:
        """Take the first that waits, if blocks for so many tokens are free."""
        blocks, at_end = self._own_blocks(job, tokens), self._blocks_at_end(job)
        begins = max(0, self._shared_blocks(job) - self._shared)  # of the shared beginning, which come once
        if self.limits.reserved:
            needed, spare = at_end, int(self.limits.reserved * max(0, self._final - self.used_blocks))
        else:
            # what comes back decodes at once, beside those that do already
            coming = self._need[self._step % self.limits.block_size] if job.cached else 0
            needed, spare = self._own_blocks(job, job.known) + coming, int(WATERMARK * self.limits.num_blocks)
        self._refused = self._short_of(needed + begins + (spare if self.running else 0), job)
        if self._refused:
            return False
        self._shared += begins
        self.waiting.popleft()
        self.running[job.index] = job
        self.free -= blocks + begins
        self._final += at_end
        return True

    def _blocks_at_end(self, job: RequestState) -> int:
        """The last token of an answer is sent, never cached."""
        tokens = job.request.prompt_tokens + job.request.output_tokens - 1
        return self._own_blocks(job, tokens)

    def _fill(self, tokens: int, *, admit: bool) -> None:
        """Pieces of prompts for at most so many tokens: the one begun, then those that wait."""
        if self._partial is not None:
            tokens -= self._compute(self._partial, tokens)
        if not self._ready(tokens):
            return
        while admit and self.waiting and tokens > 0 and len(self.running) < self.limits.max_sequences:
            job = self.waiting[0]
            reused = self._reused(job)
            if job.cached or (not self.limits.chunked and job.known - reused > tokens):
                return
            if not self._admitted(job, job.known):
                return
            job.cached = reused
            self._since = 0
            tokens -= self._compute(job, tokens, first=True)

    def _ready(self, tokens: int) -> bool:
        """Those that wait may join those that run now: enough of them fit a step, or they have waited long enough."""
        limits = self.limits
        if not self._decoding or not (limits.alternates or limits.waiting_ratio > 0):
            return True
        if limits.alternates and not self._since:
            return False
        least = int(limits.waiting_ratio * len(self.running))
        if self._since >= limits.waiting_steps or least <= 1:
            return True
        free, count = self.free, 0
        for job in islice(self.waiting, least):
            tokens -= job.known - self._reused(job)
            free -= self._blocks_at_end(job)
            count += tokens >= 0 and free >= 0
        return count >= least

    def _compute(self, job: RequestState, tokens: int, *, first: bool = False) -> int:
        """A piece of the job's prompt, as long as may be; returns its length."""
        if self.limits.apart:
            return self._compute_apart(job, first=first)
        new = min(job.known - job.cached, tokens)
        if new:
            last = job.cached + new == job.known
            self._pieces.append((job, Chunk(new=new, cached=job.cached, last=last, first=first)))
            self._partial = None if last else job
        return new

    def _compute_apart(self, job: RequestState, *, first: bool) -> int:
        """All of it but the last token, with which the job decodes at once."""
        new = job.known - 1 - job.cached
        if new:
            self._pieces.append((job, Chunk(new=new, cached=job.cached, last=False, first=first)))
            job.cached += new
        self._begun.append(job)
        self._join(job)
        return new
