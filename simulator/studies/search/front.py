"""Time against cost: the best plan of each size of a cluster, and which of them no other beats in both.

On one size the quickest plan is also the cheapest, as its devices cost the same by the hour whatever they run. So the front
over all plans is one over sizes, each with its own search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from simulator.base.errors import InputError
from simulator.predict.difference import Difference, Timed, difference, timed
from simulator.spec.cluster import Cluster
from simulator.spec.prices import Price, Prices, cost
from simulator.studies.search.driver import Progress
from simulator.studies.search.engines import Engine
from simulator.studies.search.journal import Journal
from simulator.studies.search.outcome import fields_of
from simulator.studies.search.report import Row
from simulator.studies.search.software import search_stacks
from simulator.studies.search.study import SearchStudy

SCHEMA_VERSION: Final = 1
SECONDS_PER_DAY: Final = 86_400
DEVICE_HOURS: Final = "device-hours"  # the currency where there are no prices

EngineOf = Callable[[SearchStudy], Engine]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontRow:
    """One size. best: its best plan, or None with the reason. price: the cheapest; None without prices.

    billion_tokens, run: money, or device-hours without prices. on_front: no other size is both quicker and cheaper.
    over_cheapest: its money a token over the cheapest size's, in which errors that both share cancel; None for that one.
    """

    nodes: int
    best: Row | None
    reason: str = ""
    price: Price | None = None
    billion_tokens: float | None = None
    run: float | None = None
    run_days: float | None = None
    on_front: bool = False
    over_cheapest: Difference | None = None

    @property
    def high_days(self) -> float | None:
        """Days of the run at the upper end of the step's interval."""
        o = self.best.outcome if self.best is not None else None
        if o is None or self.run_days is None or o.step_s is None or o.high_s is None:
            return None
        return self.run_days * o.high_s / o.step_s

    @property
    def within_noise(self) -> bool:
        """At 90 % its cost cannot be distinguished from the cheapest."""
        return self.over_cheapest is not None and not self.over_cheapest.distinguishable


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """Sizes, the smallest first."""

    study: SearchStudy
    currency: str
    run_tokens: int | None
    rows: tuple[FrontRow, ...]

    def enough(self, days: float) -> tuple[FrontRow | None, FrontRow | None]:
        """The smallest size that ends the run in so many days, and the smallest that surely does (upper end of the step)."""
        in_time = [row for row in self.rows if row.run_days is not None and row.run_days <= days]
        certain = [row for row in in_time if (row.high_days or 0.0) <= days]
        return next(iter(in_time), None), next(iter(certain), None)

    def as_json(self) -> dict[str, Any]:
        """Plain data; docs/reference/json-output.md describes every key."""
        inputs = self.study.inputs() | {"run_tokens": self.run_tokens}
        return {
            "schema_version": SCHEMA_VERSION,
            "inputs": inputs,
            "currency": self.currency,
            "sizes": [_data(row) for row in self.rows],
        }


def pareto(points: list[tuple[float, float]]) -> list[bool]:
    """Which (time, money) pairs no other one beats in one without being worse in the other."""
    return [not any(a <= time and b <= money and (a, b) != (time, money) for a, b in points) for time, money in points]


def front(
    study: SearchStudy,
    engine_of: EngineOf,
    journal: Path | None = None,
    *,
    prices: Prices | None = None,
    run_tokens: int | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Front:
    """Search each size of the study for its quickest plan. journal: its name gets the number of nodes put in.

    Raises InputError where no size has a legal plan, or the cluster has no price; Interrupted on Ctrl-C.
    """
    if prices is not None:
        prices.of(study.space.clusters[0])
    rows: list[FrontRow] = []
    refusals: list[InputError] = []
    for cluster in study.space.clusters:
        space = replace(study.space, clusters=(cluster,))
        alone = replace(study, space=space, objective="step", top=1)
        try:
            rows.append(_searched(alone, engine_of, journal, prices, run_tokens, on_progress))
        except InputError as exc:
            refusals.append(exc)
            rows.append(FrontRow(nodes=cluster.num_nodes, best=None, reason="; ".join(map(str, exc.faults))))
    if len(refusals) == len(rows):
        raise refusals[0]
    known = [row for row in rows if row.best is not None]
    best = dict(zip((row.nodes for row in known), pareto([_point(row) for row in known]), strict=True))
    currency = prices.currency if prices is not None else DEVICE_HOURS
    cheapest = min(known, key=lambda row: _point(row)[1], default=None)
    marked = tuple(
        replace(row, on_front=best.get(row.nodes, False), over_cheapest=_over(row, cheapest)) for row in rows
    )
    return Front(study=study, currency=currency, run_tokens=run_tokens, rows=marked)


def _searched(
    study: SearchStudy,
    engine_of: EngineOf,
    journal: Path | None,
    prices: Prices | None,
    run_tokens: int | None,
    on_progress: Callable[[Progress], None],
) -> FrontRow:
    (cluster,) = study.space.clusters
    with engine_of(study) as engine:
        if journal is None:
            report = search_stacks(study, engine, None, on_progress)
        else:
            name = journal.with_name(f"{journal.stem}.{cluster.num_nodes}nodes{journal.suffix}")
            with Journal(name, study.identity) as store:
                report = search_stacks(study, engine, store, on_progress)
    if not report.rows:
        return FrontRow(nodes=cluster.num_nodes, best=None, reason="no plan fits in memory")
    return _priced(report.rows[0], cluster, prices, run_tokens)


def _priced(row: Row, cluster: Cluster, prices: Prices | None, run_tokens: int | None) -> FrontRow:
    outcome = row.outcome
    assert outcome.step_s is not None
    price = prices.cheapest(cluster) if prices is not None else None
    hours = outcome.num_devices * outcome.step_s / 3600
    step = cost(price, outcome.num_devices, outcome.step_s) if price is not None else hours
    steps = run_tokens / outcome.tokens_per_step if run_tokens is not None else None
    return FrontRow(
        nodes=row.nodes,
        best=row,
        price=price,
        billion_tokens=step / outcome.tokens_per_step * 1e9,
        run=step * steps if steps is not None else None,
        run_days=outcome.step_s * steps / SECONDS_PER_DAY if steps is not None else None,
    )


def _over(row: FrontRow, cheapest: FrontRow | None) -> Difference | None:
    if row.best is None or cheapest is None or row is cheapest:
        return None
    return difference(_timed(row), _timed(cheapest))


def _timed(row: FrontRow) -> Timed:
    """The money, which errs as the step does."""
    assert row.best is not None
    o = row.best.outcome
    return timed(_point(row)[1], o.spread, o.stack_sigma, row.best.plan)


def _point(row: FrontRow) -> tuple[float, float]:
    assert row.best is not None
    assert row.best.outcome.step_s is not None
    assert row.billion_tokens is not None
    return row.best.outcome.step_s, row.billion_tokens


def _data(row: FrontRow) -> dict[str, Any]:
    best, price = row.best, row.price
    found: dict[str, Any] = {"nodes": row.nodes, "reason": row.reason}
    of_step = ("num_devices", "step_s", "low_s", "high_s")
    found |= {name: getattr(best.outcome, name) if best else None for name in of_step}
    found["tokens_per_s"], found["plan"] = (best.tokens_per_s, fields_of(best.plan)) if best else (None, None)
    names = ("kind", "gpu_hour", "date", "source")
    found["price"] = {name: getattr(price, name) for name in names} if price is not None else None
    figures = ("billion_tokens", "run", "run_days", "on_front")
    over = asdict(row.over_cheapest) if row.over_cheapest is not None else None
    return found | {name: getattr(row, name) for name in figures} | {"over_cheapest": over}
