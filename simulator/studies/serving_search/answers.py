"""Answers of a search over serving plans: rows of the table, what was nearest, and the report as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from simulator.spec.prices import Price, cost
from simulator.studies.search.front import pareto
from simulator.studies.serving import InferencePlan, defaults_of, usual_values
from simulator.studies.serving.report import Attainment, percentile
from simulator.studies.serving.slo import FIGURES, Figure
from simulator.studies.serving.token_costs import MILLION
from simulator.studies.serving_search.plays import Values
from simulator.studies.serving_search.space import key_of
from simulator.studies.serving_search.study import ServingSearch

SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A plan at the rate that was asked for, one engine of each pool played.

    median_s: of each figure; none where no request has it. capacity_per_s: of all engines. near: caches are handed over
    inside nodes; None: one pool. sequences, kv_peak, preemptions: of an engine that decodes.
    """

    plan: InferencePlan
    attainments: tuple[Attainment, ...]
    median_s: Mapping[Figure, float]
    capacity_per_s: float
    near: bool | None
    sequences: float
    kv_peak: float
    preemptions: int

    @property
    def num_devices(self) -> int:
        return self.plan.num_devices

    @property
    def excess(self) -> float:
        """The worst limit's percentile over it."""
        return max((row.excess for row in self.attainments), default=0.0)

    @property
    def order(self) -> tuple[int, float, float, str]:
        """Fewest GPUs first, then the quickest."""
        slowest = float("inf")
        median = self.median_s
        return self.num_devices, median.get("tpot", slowest), median.get("ttft", slowest), key_of(self.plan)

    @property
    def tokens_per_s_user(self) -> float | None:
        """What a reader sees behind the first token, in the median."""
        return 1 / self.median_s["tpot"] if self.median_s.get("tpot") else None


def medians(values: Values) -> dict[Figure, float]:
    """Of the figures that any request has."""
    known = {name: sorted(value for value in values[name] if value is not None) for name in FIGURES}
    return {name: percentile(each, 50) for name, each in known.items() if each}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An answer in the table. whole: its limits when all its engines were played together; None: they were not.

    tokens_per_s_gpu: of answers. million_output_tokens: money, at the rate that was asked for. pareto: no other row has
    both more tokens a second for a user and more for a GPU.
    """

    rank: int
    answer: Answer
    tokens_per_s_gpu: float
    million_output_tokens: float | None
    pareto: bool
    whole: tuple[Attainment, ...] | None = None

    @property
    def confirmed(self) -> bool | None:
        return None if self.whole is None else all(each.held for each in self.whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What became of the layouts of one engine, each counted once in each role that it may have, and of pairs of pools.

    refused: illegal. too_large: do not fit in memory. too_slow: a bound exceeds a limit. short: the rate takes more GPUs
    than there are. pruned: by the table's worst number of GPUs. missed: no number of engines that was tried meets the limits.
    """

    refused: int = 0
    layouts: int = 0
    too_large: int = 0
    too_slow: int = 0
    short: int = 0
    pruned: int = 0
    missed: int = 0
    met: int = 0
    pairs: int = 0
    plays: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSearchReport:
    """The answer. rows: the best first. nearest: where none meets the limits, the plan that misses them least.

    least_devices: fewer take the rate on no layout that fits; None: no layout fits. sure: the fewest GPUs of the best
    layout that meet the limits when all times are at the upper end of their 90 % interval, whose factor is `spread`.
    """

    study: ServingSearch
    rows: tuple[Row, ...]
    counts: Counts
    nearest: Answer | None = None
    least_devices: int | None = None
    missing_bytes: int | None = None
    spread: float | None = None
    sure: InferencePlan | None = None
    price: Price | None = None
    currency: str | None = None
    interrupted: bool = False

    @property
    def best(self) -> Row | None:
        """The first row that holds whole; the first of all where none was played whole."""
        rows = [row for row in self.rows if row.confirmed is not False]
        return rows[0] if rows else None

    def as_json(self) -> dict[str, Any]:
        """Plain data; docs/reference/json-output.md describes every key."""
        best = self.best
        return {
            "schema_version": SCHEMA_VERSION,
            "inputs": self.study.inputs(),
            "interrupted": self.interrupted,
            "counts": asdict(self.counts),
            "least_gpus": self.least_devices,
            "gpus": best.answer.num_devices if best else None,
            "surely_gpus": self.sure.num_devices if self.sure else None,
            "spread": self.spread,
            "currency": self.currency,
            "price": self.price and {key: getattr(self.price, key) for key in ("kind", "gpu_hour", "date", "source")},
            "plans": [_row(row, self.study) for row in self.rows],
            "nearest": None if self.nearest is None else _answer(self.nearest, self.study),
        }


def rows_of(study: ServingSearch, answers: Sequence[Answer], price: Price | None) -> tuple[Row, ...]:
    """The table, in order."""
    chosen = sorted(answers, key=lambda one: one.order)
    chosen = chosen if study.every else chosen[: study.top]
    lengths = study.workload.model_copy(update={"rate": study.rate}).requests()
    tokens_per_s = study.rate * sum(request.output_tokens for request in lengths) / len(lengths)
    per_gpu = [tokens_per_s / one.num_devices for one in chosen]
    speeds = [one.tokens_per_s_user or 1 / one.median_s["latency"] for one in chosen]
    front = pareto([(1 / speed, 1 / density) for speed, density in zip(speeds, per_gpu, strict=True)])
    rows = []
    for rank, (one, density, on_front) in enumerate(zip(chosen, per_gpu, front, strict=True), start=1):
        money = None if price is None else cost(price, one.num_devices, 1.0) / tokens_per_s * MILLION
        rows.append(Row(rank=rank, answer=one, tokens_per_s_gpu=density, million_output_tokens=money, pareto=on_front))
    return tuple(rows)


def degrees_of(plan: InferencePlan, study: ServingSearch) -> dict[str, Any]:
    """The plan's fields that are not at their defaults, its engine's or else the plan's own."""
    usual, own = usual_values(plan.stack), defaults_of(plan, study.stack, study.cluster.device, study.model)
    return {
        name: value
        for name, value in plan.model_dump(mode="json").items()
        if not any(value == one for one in (*usual[name], own.get(name, usual[name])))
    }


def _answer(one: Answer, study: ServingSearch) -> dict[str, Any]:
    return {
        "gpus": one.num_devices,
        "plan": degrees_of(one.plan, study),
        "attainments": [asdict(each) for each in one.attainments],
        "median_s": dict(one.median_s),
        "capacity_per_s": one.capacity_per_s,
        "handed_over_near": one.near,
        "sequences": one.sequences,
        "kv_peak": one.kv_peak,
        "preemptions": one.preemptions,
        "tokens_per_s_user": one.tokens_per_s_user,
    }


def _row(row: Row, study: ServingSearch) -> dict[str, Any]:
    complete = None if row.whole is None else [asdict(each) for each in row.whole]
    return {"rank": row.rank, **_answer(row.answer, study)} | {
        "tokens_per_s_gpu": row.tokens_per_s_gpu,
        "million_output_tokens": row.million_output_tokens,
        "pareto": row.pareto,
        "whole": complete,
    }
