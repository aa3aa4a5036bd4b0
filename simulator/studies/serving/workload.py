"""Workload: when requests arrive, and how long their prompts and answers are. Drawn from a seed, or read from a trace."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, repeat
from typing import Annotated, Literal, Self, TypeAlias, overload

import numpy as np
import numpy.typing as npt
from pydantic import Discriminator, Field, Tag, model_validator
from typing_extensions import override

from simulator.base.schema import Strict
from simulator.base.sums import summed
from simulator.base.units import Seconds

MAX_TOKENS = 2**31
MOST_PLAYED = 10**6  # requests: half a gigabyte, and minutes
DEFAULT_SEED = 0
_SLOWEST = 1e-9  # requests a second

Bools: TypeAlias = npt.NDArray[np.bool_]
Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Request:
    """One request. output_tokens: of its answer, all of which it gets. line: of the trace that it stands on; 0: drawn.

    cached_tokens: of the prompt's beginning, whose keys and values are in the cache. shared_tokens: of these, in blocks that
    other requests use too.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    line: int = 0
    cached_tokens: int = 0
    shared_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Users:
    """Of a closed loop. count: with one request at a time each; 0: requests come when they say.

    turns: of a conversation. With more than one the requests are those of all users turn by turn, so that of `count` requests
    apart the later one is the same user's next. gaps_s: of each request behind the answer before it; (): none.
    """

    count: int = 0
    turns: int = 1
    gaps_s: Sequence[float] = ()


NO_USERS = Users()


class Requests(Sequence[Request]):
    """Requests in columns of 8 bytes each, made one by one when they are asked for; by `of` from any others."""

    def __init__(self, arrivals_s: Iterable[float], *counts: Iterable[int]) -> None:
        """counts: prompt_tokens, output_tokens, and from there the other fields of a request in their order."""
        self._arrivals_s = array("d", arrivals_s)
        self._counts = tuple(array("q", each) for each in counts)

    @classmethod
    def of(cls, requests: Iterable[Request]) -> Self:
        """The same in columns."""
        if isinstance(requests, cls):
            return requests
        rows = (
            (r.arrival_s, r.prompt_tokens, r.output_tokens, r.line, r.cached_tokens, r.shared_tokens) for r in requests
        )
        times, *counts = tuple(zip(*rows, strict=True)) or ((),)
        return cls(times, *counts)

    @property
    def tokens(self) -> int:
        """Of all prompts and answers."""
        return sum(int(np.frombuffer(each, np.int64).sum()) for each in self._counts[:2])

    @property
    def longest_prompt(self) -> int:
        return max(self._counts[0])

    def keep_to(self, longest: int) -> bool:
        """They come at finite times from 0 on, in order, and each has a prompt, an answer, and no more tokens than that."""
        times = np.frombuffer(self._arrivals_s)
        prompts, answers = (np.frombuffer(each, np.int64) for each in self._counts[:2])
        in_order = np.isfinite(times).all() and times[0] >= 0 and (times[1:] >= times[:-1]).all()
        return bool(in_order and min(prompts.min(), answers.min()) >= 1 and (prompts + answers).max() <= longest)

    @override
    def __len__(self) -> int:
        return len(self._arrivals_s)

    @override
    def __iter__(self) -> Iterator[Request]:
        return map(Request, self._arrivals_s, *self._counts)

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Request]: ...
    @override
    def __getitem__(self, index: int | slice) -> Request | Sequence[Request]:
        if isinstance(index, slice):
            return Requests(self._arrivals_s[index], *(each[index] for each in self._counts))
        return Request(self._arrivals_s[index], *(each[index] for each in self._counts))


class Uniform(Strict):
    """Whole numbers from low to high, both among them, equally likely."""

    distribution: Literal["uniform"]
    low: int = Field(ge=1, le=MAX_TOKENS)
    high: int = Field(ge=1, le=MAX_TOKENS)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        return [int(n) for n in rng.integers(self.low, self.high, size=count, endpoint=True)]


class Lognormal(Strict):
    """exp of a normal with this median and sigma, rounded, from 1 to high: longer draws are cut there."""

    distribution: Literal["lognormal"]
    median: float = Field(ge=1, le=MAX_TOKENS)
    sigma: float = Field(ge=0, le=10)
    high: int = Field(ge=1, le=MAX_TOKENS)

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        drawn = self.median * np.exp(self.sigma * rng.standard_normal(count))
        return [int(n) for n in np.clip(np.rint(drawn), 1, self.high)]


class Choice(Strict):
    """One of the values; equally likely, or by weights."""

    distribution: Literal["choice"]
    values: Annotated[tuple[Annotated[int, Field(ge=1, le=MAX_TOKENS)], ...], Field(strict=False, min_length=1)]
    weights: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(strict=False)] | None = None

    @model_validator(mode="after")
    def _one_weight_each(self) -> Self:
        if self.weights is not None and len(self.weights) != len(self.values):
            raise ValueError(f"{len(self.weights)} weights for {len(self.values)} values")
        return self

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        weights = None if self.weights is None else np.asarray(self.weights) / summed(self.weights)
        return [int(n) for n in rng.choice(self.values, size=count, p=weights)]


class Histogram(Strict):
    """Whole numbers in bins, as data sets are published: bin i from edges[i] up to below edges[i + 1] (the last one included)."""

    distribution: Literal["histogram"]
    edges: Annotated[tuple[Annotated[int, Field(ge=1, le=MAX_TOKENS)], ...], Field(strict=False, min_length=2)]
    weights: Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(strict=False)]

    @model_validator(mode="after")
    def _bins(self) -> Self:
        if len(self.weights) != len(self.edges) - 1:
            raise ValueError(
                f"{len(self.edges)} edges make {len(self.edges) - 1} bins, with {len(self.weights)} weights"
            )
        if any(low >= high for low, high in pairwise(self.edges)):
            raise ValueError("edges do not grow from one to the next")
        if not summed(self.weights) > 0:
            raise ValueError("all weights are 0")
        return self

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        bins = rng.choice(len(self.weights), size=count, p=np.asarray(self.weights) / summed(self.weights))
        low, high = np.asarray(self.edges[:-1]), np.asarray(self.edges[1:])
        high[-1] += 1
        return [int(n) for n in rng.integers(low[bins], high[bins])]


Distribution = Annotated[Uniform | Lognormal | Choice | Histogram, Field(discriminator="distribution")]


def _kind(value: object) -> str:
    return "table" if isinstance(value, dict | Strict) else "count"


Lengths = Annotated[
    Annotated[int, Field(ge=1, le=MAX_TOKENS), Tag("count")] | Annotated[Distribution, Tag("table")],
    Discriminator(_kind),
]


class Workload(Strict):
    """Requests that arrive at `rate` a second by a Poisson process, all at once (rate = 0), or as a trace says.

    burstiness: other than 1, gaps between arrivals are gamma-distributed with this shape: below they come in bursts.
    concurrency: of a closed loop instead of a rate: so many users, each with one request at a time, and the next one when it
    is answered, in the mean `turn_gap_s` later where that or turns are given; 0: none. ramp_s: its users come evenly within so long; 0: all at once.
    prefix_tokens: the same before every prompt, a system prompt say, and not among prompt_tokens. turns: requests of a conversation; the prompt
    of each is all that was said before and prompt_tokens more, and it comes turn_gap_s behind the one before it in the
    mean (of a closed loop: behind its answer); of a stream, some conversations are under way at the beginning. cache_hits: the part of requests that find such beginnings in the cache.
    trace: a CSV of arrival_s, prompt_tokens, output_tokens, instead of everything else. warmup: the part of the requests,
    the first to arrive, that no figure counts. seed: of arrivals and lengths, each with a stream of its own.
    """

    rate: float = Field(ge=0, le=1e9, default=1.0)
    burstiness: float = Field(ge=0.01, le=1e6, default=1.0)
    concurrency: int = Field(ge=0, le=10**6, default=0)
    ramp_s: Seconds = Field(ge=0, le=1e6, default=0.0)
    num_requests: int = Field(ge=1, le=10**7, default=1000)
    prompt_tokens: Lengths = 512
    output_tokens: Lengths = 128
    prefix_tokens: int = Field(ge=0, le=MAX_TOKENS, default=0)
    turns: int = Field(ge=1, le=1000, default=1)
    turn_gap_s: Seconds = Field(ge=0, le=1e6, default=30.0)
    cache_hits: float = Field(ge=0, le=1, default=1.0)
    seed: int = Field(ge=0, le=2**63, default=DEFAULT_SEED)
    warmup: float = Field(ge=0, lt=1, default=0.1)
    trace: str | None = None

    @model_validator(mode="after")
    def _rate_or_users(self) -> Self:
        if 0 < self.rate < _SLOWEST:
            raise ValueError(
                f"rate = {self.rate}: a request in more than thirty years (at least {_SLOWEST:g}, or 0: all at once)"
            )
        if self.concurrency and self.model_fields_set & {"rate", "trace"}:
            raise ValueError(
                "concurrency is a closed loop, whose users send when they are answered: leave rate and trace out"
            )
        if self.burstiness != 1 and (self.concurrency or not self.rate):
            raise ValueError("burstiness is a stream's: give a rate above 0, and no concurrency")
        if self.ramp_s and not self.concurrency:
            raise ValueError("ramp_s is how long users of a closed loop take to come: give concurrency")
        return self

    @model_validator(mode="after")
    def _turns_of_a_stream(self) -> Self:
        if self.turns > 1 and not self.concurrency and not self.rate:
            raise ValueError("turns of conversations that begin all at once: give a rate above 0, or concurrency")
        if "turn_gap_s" in self.model_fields_set and self.turns == 1 and not self.concurrency:
            raise ValueError("turn_gap_s is between turns, and there is one: turns = 2 or more, or concurrency")
        if "cache_hits" in self.model_fields_set and self.turns == 1 and not self.prefix_tokens:
            raise ValueError("cache_hits is of shared beginnings, and there are none: give prefix_tokens or turns")
        return self

    def requests(self, image_tokens: int = 0) -> Requests:
        """The requests in order of arrival, the first million at most. A trace is read by readers.arrivals_table instead.

        image_tokens: of each, beside its prompt_tokens.
        """
        arrivals, prompts, outputs, hits, gaps = _streams(self.seed)
        n, turns = min(self.num_requests, MOST_PLAYED), self.turns
        num_conversations = -(-n // turns)
        streamed = self.rate and not self.concurrency
        times = (
            np.cumsum(self._gaps(arrivals, num_conversations)) * turns / self.rate
            if streamed
            else self._begin_s(num_conversations)
        )
        texts = _drawn(self.prompt_tokens, prompts, n)
        drawn = (text + image_tokens for text in texts), _drawn(self.output_tokens, outputs, n)
        if turns == 1 and not self.prefix_tokens:
            return Requests(times, *drawn)
        lengths = list(zip(*drawn, strict=True))
        found = hits.random(n) < self.cache_hits
        if self.concurrency:
            return Requests.of(self._turn_by_turn(lengths, found))
        apart = gaps.exponential(scale=self.turn_gap_s or 0.0, size=n)
        requests = [
            request
            for i, time in enumerate(times)
            for request in self._conversation(
                float(time), slice(i * turns, min(n, (i + 1) * turns)), lengths, found, apart
            )
        ]
        span_s = float(times[-1])  # turns beyond it come at its beginning, as of conversations that are under way there
        wrapped = (
            replace(one, arrival_s=one.arrival_s % span_s) if one.arrival_s > span_s > 0 else one for one in requests
        )
        return Requests.of(sorted(wrapped, key=lambda request: request.arrival_s))

    def users(self) -> Users:
        """Of the closed loop, with the time that each takes to think before a request, exponentially distributed."""
        thinks = self.turns > 1 or "turn_gap_s" in self.model_fields_set
        if not (self.concurrency and thinks and self.turn_gap_s):
            return Users(count=self.concurrency, turns=self.turns)
        gaps = _streams(self.seed)[-1].exponential(scale=self.turn_gap_s, size=min(self.num_requests, MOST_PLAYED))
        return Users(count=self.concurrency, turns=self.turns, gaps_s=gaps.tolist())

    def _turn_by_turn(self, lengths: list[tuple[int, int]], found: Bools) -> Iterator[Request]:
        """Of a closed loop's users: the first turn of each, the second, and so on; then the next conversation of each."""
        users, prefix, said = self.concurrency, self.prefix_tokens, [0] * self.concurrency
        for i, ((new, answer), at_s) in enumerate(zip(lengths, self._begin_s(len(lengths)), strict=True)):
            before = said[i % users] if i // users % self.turns else prefix
            prompt, cached = before + new, before if found[i] else 0
            yield Request(float(at_s), prompt, answer, 0, cached, min(cached, prefix))
            said[i % users] = prompt + answer

    def _gaps(self, arrivals: np.random.Generator, count: int) -> Floats:
        """Between arrivals, 1 in the mean."""
        if self.burstiness == 1:
            return arrivals.exponential(size=count)
        return arrivals.gamma(self.burstiness, 1 / self.burstiness, size=count)

    def _begin_s(self, count: int) -> Floats:
        """When users of a closed loop come; the requests behind their first ones come with answers, from there on."""
        each_s = (self.ramp_s or 0.0) / (self.concurrency or 1)
        return np.minimum(np.arange(count), self.concurrency) * each_s

    def _conversation(
        self, at_s: float, which: slice, lengths: list[tuple[int, int]], found: Bools, apart: Floats
    ) -> Iterator[Request]:
        """Its turns. What was said before is in blocks of its own; the prefix in blocks that all share."""
        context = prefix = self.prefix_tokens
        for i, (new, answer) in enumerate(lengths[which], which.start):
            at_s += float(apart[i]) if i > which.start else 0.0
            prompt = context + new
            cached = context if found[i] else 0
            yield Request(at_s, prompt, answer, 0, cached, min(cached, prefix))
            context = prompt + answer


def _streams(seed: int) -> list[np.random.Generator]:
    """Of arrivals, prompts, answers, hits and gaps between turns."""
    return [np.random.default_rng(each) for each in np.random.SeedSequence(seed).spawn(5)]


def _drawn(lengths: Lengths, rng: np.random.Generator, count: int) -> Iterable[int]:
    return repeat(lengths, count) if isinstance(lengths, int) else lengths.draw(rng, count)
