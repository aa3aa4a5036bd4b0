"""The cost of compared plans, and which of them no other beats in both time and money."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.predict import Prediction
from simulator.spec.cluster import Cluster
from simulator.spec.prices import Kind, Prices, cost

SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Money of one price. run, run_days: of so many tokens, where asked for."""

    kind: Kind
    currency: str
    date: str
    source: str
    gpu_hour: float
    step: float
    billion_tokens: float
    run: float | None = None
    run_days: float | None = None


def costs_of(
    prediction: Prediction, cluster: Cluster, prices: Prices, run_tokens: int | None = None
) -> tuple[Cost, ...]:
    """The cost of a plan at each price of its cluster. Raises InputError where there is none."""
    step_s, tokens = float(prediction.step_s), prediction.tokens_per_step
    found = []
    for price in prices.of(cluster):
        step = cost(price, prediction.num_devices, step_s)
        steps = run_tokens / tokens if run_tokens else None
        found.append(
            Cost(
                kind=price.kind,
                currency=prices.currency,
                date=price.date,
                source=price.source,
                gpu_hour=price.gpu_hour,
                step=step,
                billion_tokens=step / tokens * 1e9,
                run=step * steps if steps else None,
                run_days=step_s * steps / SECONDS_PER_DAY if steps else None,
            )
        )
    return tuple(found)
