"""Workload: when requests arrive, and how long their prompts and answers are. Drawn from a seed, or read from a trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Discriminator, Field, Tag, model_validator

from simulator.base.schema import Strict

MAX_TOKENS = 2**31
DEFAULT_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request. output_tokens: of its answer, all of which it gets. line: of the trace that it stands on; 0: drawn."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    line: int = 0


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
        weights = None if self.weights is None else np.asarray(self.weights) / sum(self.weights)
        return [int(n) for n in rng.choice(self.values, size=count, p=weights)]


Distribution = Annotated[Uniform | Lognormal | Choice, Field(discriminator="distribution")]


def _kind(value: object) -> str:
    return "table" if isinstance(value, dict | Strict) else "count"


Lengths = Annotated[
    Annotated[int, Field(ge=1, le=MAX_TOKENS), Tag("count")] | Annotated[Distribution, Tag("table")],
    Discriminator(_kind),
]


class Workload(Strict):
    """Requests that arrive at `rate` a second by a Poisson process, all at once (rate = 0), or as a trace says.

    concurrency: of a closed loop instead of a rate: so many users, each with one request at a time, and the next one when it
    is answered; 0: none.
    trace: a CSV of arrival_s, prompt_tokens, output_tokens, instead of everything else. warmup: the part of the requests,
    the first to arrive, that no figure counts. seed: of arrivals and lengths, each with a stream of its own.
    """

    rate: float = Field(ge=0, le=1e9, default=1.0)
    concurrency: int = Field(ge=0, le=10**6, default=0)
    num_requests: int = Field(ge=1, le=10**7, default=1000)
    prompt_tokens: Lengths = 512
    output_tokens: Lengths = 128
    seed: int = Field(ge=0, le=2**63, default=DEFAULT_SEED)
    warmup: float = Field(ge=0, lt=1, default=0.1)
    trace: str | None = None

    @model_validator(mode="after")
    def _rate_or_users(self) -> Self:
        if self.concurrency and self.model_fields_set & {"rate", "trace"}:
            raise ValueError(
                "concurrency is a closed loop, whose users send when they are answered: leave rate and trace out"
            )
        return self

    def requests(self) -> tuple[Request, ...]:
        """The requests in order of arrival. A trace is read by readers.arrivals_table instead."""
        arrivals, prompts, outputs = (np.random.default_rng(s) for s in np.random.SeedSequence(self.seed).spawn(3))
        n = self.num_requests
        times = (
            np.cumsum(arrivals.exponential(size=n)) / self.rate if self.rate and not self.concurrency else np.zeros(n)
        )
        lengths = zip(_drawn(self.prompt_tokens, prompts, n), _drawn(self.output_tokens, outputs, n), strict=True)
        return tuple(
            Request(arrival_s=float(time), prompt_tokens=prompt, output_tokens=output)
            for time, (prompt, output) in zip(times, lengths, strict=True)
        )


def _drawn(lengths: Lengths, rng: np.random.Generator, count: int) -> list[int]:
    return [lengths] * count if isinstance(lengths, int) else lengths.draw(rng, count)
