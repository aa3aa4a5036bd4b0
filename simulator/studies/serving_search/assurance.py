"""How sure the best answer is: all its engines played together, and all times at the upper end of their interval."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from simulator.base.sums import summed
from simulator.studies.serving import InferencePlan
from simulator.studies.serving.decoding import Z90, batch_of, sigma_of
from simulator.studies.serving.deployment import Deployment
from simulator.studies.serving.report import Attainment, attained
from simulator.studies.serving_search.answers import Answer, Row
from simulator.studies.serving_search.plays import Player
from simulator.studies.serving_search.pools import Side, pair_answer, ratios, single_answer
from simulator.studies.serving_search.tasks import counts_of

MOST_REQUESTS: Final = 4000  # that are played through all engines together
_MOST_TRIED: Final = 12  # plans with more GPUs, until one holds surely


def wholly(player: Player, rows: Sequence[Row]) -> tuple[tuple[Row, ...], Row | None]:
    """The rows, the first of them played whole until one holds; and that one."""
    found = list(rows)
    for index, row in enumerate(rows):
        found[index] = replace(row, whole=_whole(player, row.answer.plan))
        if found[index].confirmed:
            return tuple(found), found[index]
    return tuple(found), None


def _whole(player: Player, plan: InferencePlan) -> tuple[Attainment, ...]:
    """Its limits under one stream of requests, each sent to the engine with the fewest."""
    study = player.study
    count = study.workload.num_requests
    count = min(count * plan.num_engines, max(count, MOST_REQUESTS))
    requests = study.workload.model_copy(update={"num_requests": count}).requests(study.model.image_tokens)
    begun = math.floor(study.workload.warmup * count)
    window = requests[begun].arrival_s, requests[-1].arrival_s
    deployed = Deployment.of(study.model, plan, study.seen, study.stack, *study.numbers)
    return attained(deployed.play(requests, window).jobs[begun:], study.slo)[0]


def surely(player: Player, row: Row) -> dict[str, Any]:
    """How the row fares where all is slower: `spread` and `sure`, as `ServingSearchReport` has them.

    spread: the factor to the upper end of a mean step's 90 % interval; sure: the row's layout on the fewest GPUs on
    which the limits hold at that end; None: none that was tried.
    """
    answer, study = row.answer, player.study
    calibration, curves = study.numbers
    costs = player.deployed(answer.plan.decode_pool.model_copy(update={"dp": 1}), answer.plan.dp).costs
    mean = summed(request.prompt_tokens + request.output_tokens / 2 for request in player.counted) / len(player.counted)
    size = min(max(1, round(answer.sequences)), answer.plan.max_sequences)
    spread = math.exp(Z90 * sigma_of(costs, batch_of(costs, size, max(1, round(mean))), calibration, curves))
    for tried, other in enumerate(_slower(player, answer, spread)):
        if tried >= _MOST_TRIED:
            break
        if other.excess <= 1 and study.rate * spread < other.capacity_per_s:
            return {"spread": spread, "sure": other.plan}
    return {"spread": spread, "sure": None}


def _slower(player: Player, answer: Answer, pace: float) -> Iterator[Answer]:
    """The answer's layout at another pace, with as many engines or more."""
    study, plan = player.study, answer.plan
    layout, pool = plan.decode_pool.model_copy(update={"dp": 1}), plan.prefill_pool
    answers = Side(layout=layout, counts=counts_of(study, layout, plan.dp, study.fixed.get("dp")))
    if pool is None:
        for engines in answers.counts:
            yield single_answer(player, layout, engines, pace)
        return
    alone = pool.model_copy(update={"dp": 1})
    prompts = Side(layout=alone, counts=counts_of(study, alone, pool.dp, study.fixed.get("prefill_dp")))
    for ratio in ratios(prompts, answers, study.most_devices):
        found = pair_answer(player, alone, layout, ratio, pace)
        if found is not None:
            yield found
