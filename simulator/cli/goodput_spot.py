"""`shardwise goodput --spot`: the same run on machines that come and go, at prices that change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path

import click

from simulator.base.errors import InputError
from simulator.cli.finite import FiniteRange
from simulator.cli.options import all_of
from simulator.formats.readers.spot_table import read_offers
from simulator.formats.study import Study
from simulator.predict.changes import degrees_on
from simulator.studies.goodput import Goodput
from simulator.studies.goodput.elastic import Elastic, Offer, Size, follow

_MOST_SIZES = 64  # each is a prediction, and runs played


spot_options = all_of(  # of spot machines
    click.option("--spot", type=click.Path(path_type=Path), metavar="OFFERS.csv", help="Also on spot machines: hour,price_per_gpu_hour,nodes, a line a change."),
    click.option("--max-price", type=FiniteRange(0, min_open=True), metavar="DOLLARS", help="With --spot: above it the job pauses."),
)  # fmt: skip


def checked_offers(spot: Path | None, study: Study | None, most_price: float | None) -> tuple[Offer, ...]:
    """The offers; none without --spot. Raises InputError with every fault."""
    if spot is None:
        if most_price is not None:
            raise click.UsageError("--max-price needs --spot")
        return ()
    offers = read_offers(spot)
    if study is not None and (study.cluster.exceptions or study.cluster.num_nodes == 1):
        problem = "a job of one node, or of nodes that differ, has no other sizes"
        raise InputError.at("--spot", problem, "--nodes, several of one kind")
    return offers


def _sizes_offered(offers: tuple[Offer, ...], most: int) -> list[int]:
    """The numbers of nodes, each of which is played. Raises InputError where they are too many."""
    wanted = sorted({min(offer.nodes, most) for offer in offers} - {0})
    if len(wanted) > _MOST_SIZES:
        problem = f"{len(wanted)} different numbers of nodes, each a run of its own"
        raise InputError.at("--spot", problem, f"at most {_MOST_SIZES}: round them down")
    return wanted


def on_spot(
    offers: tuple[Offer, ...],
    study: Study,
    answer: Goodput,
    most_price: float | None,
    notice_s: float,
    at_size: Callable[[Study], Goodput | None],
) -> Elastic:
    """at_size: the run on other nodes; None where it does not fit there. Raises InputError where no size can run."""
    most = study.cluster.num_nodes
    played = {nodes: answer if nodes == most else _at(study, nodes, at_size) for nodes in _sizes_offered(offers, most)}
    sizes = {nodes: Size.of(nodes, found) for nodes, found in played.items() if found is not None}
    if not sizes:
        raise InputError.at("--spot", "no number of nodes that is offered runs the plan", f"{most}")
    return follow(offers, sizes, answer.tokens, most_price=most_price or inf, notice_s=notice_s)


def _at(study: Study, nodes: int, at_size: Callable[[Study], Goodput | None]) -> Goodput | None:
    """The run with the data-parallel ranks that so many nodes hold, the same batch a rank; None where there are none."""
    cluster = study.cluster.with_nodes(nodes)
    degrees = degrees_on(study.plan, cluster.num_devices)
    try:
        return at_size(replace(study, cluster=cluster, plan=study.plan.copy_with(**degrees)))
    except (InputError, ValueError):
        return None
