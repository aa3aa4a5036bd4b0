"""What serving costs a token: devices are paid for by the hour, whether they compute or wait for requests."""

from __future__ import annotations

from simulator.spec.cluster import Cluster
from simulator.spec.prices import Prices, cost
from simulator.studies.serving.report import Load, TokenCost

MILLION = 1e6


def token_costs(
    load: Load, answer_tokens: float, num_devices: int, cluster: Cluster, prices: Prices
) -> tuple[TokenCost, ...]:
    """At every price; none where no request ended in the measured time. answer_tokens: mean. Raises InputError without a price."""
    found = []
    if not load.requests_per_s or not load.output_tokens_per_s:
        return ()
    for price in prices.of(cluster):
        second = cost(price, num_devices, 1.0)
        output = second / load.output_tokens_per_s * MILLION
        full = second / answer_tokens * MILLION  # times the seconds between requests at capacity
        found.append(
            TokenCost(
                **prices.told(price),
                request=second / load.requests_per_s,
                million_output_tokens=output,
                million_tokens=second / (load.output_tokens_per_s + load.prompt_tokens_per_s) * MILLION,
                million_output_tokens_at_capacity=full / load.capacity_per_s,
                low_at_capacity=full / load.high_capacity_per_s,
                high_at_capacity=full / load.low_capacity_per_s,
            )
        )
    return tuple(found)
