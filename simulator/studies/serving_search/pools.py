"""Pairs of pools: engines that only compute prompts, in the ratio to engines that only decode that takes the fewest GPUs.

What a prompt's engines do depends on their layout and number alone, and so does what the others do (plays.py). So every
play serves all pairs, and a pair's figures are sums of those of its two plays and of its caches' time on the links.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from simulator.studies.serving import InferencePlan
from simulator.studies.serving.report import judged
from simulator.studies.serving.transfer import placing
from simulator.studies.serving_search.answers import Answer, medians
from simulator.studies.serving_search.plays import Player, pooled

_MOST_RATIOS = 48  # of one pair that are tried: more engines than either pool needs alone only help a limit of both


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One pool of a pair: its engine, and the numbers of them that may meet the limits, the fewest first."""

    layout: InferencePlan
    counts: tuple[int, ...]

    @property
    def least_devices(self) -> int:
        return self.counts[0] * self.layout.engine_devices


def ratios(prompts: Side, answers: Side, most_devices: int) -> Iterator[tuple[int, int]]:
    """(engines for prompts, engines that decode) on so many GPUs at most, those with fewer GPUs first."""
    one, other = prompts.layout.engine_devices, answers.layout.engine_devices
    every = ((p * one + d * other, p, d) for p in prompts.counts for d in answers.counts)
    for devices, p, d in sorted(every):
        if devices > most_devices:
            return
        yield p, d


def pair_answer(
    player: Player, prompts: InferencePlan, layout: InferencePlan, ratio: tuple[int, int], pace: float = 1.0
) -> Answer | None:
    """Two pools at the study's rate; None where the links between them cannot take it. pace: a factor on all times."""
    study = player.study
    plan = pooled(prompts, layout, *ratio)
    place = placing(plan, study.seen)
    moved, links = player.transfers(prompts, layout, near=place.near)
    if study.rate * pace >= min(ratio) * links:
        return None
    first, rest = player.play("prefill", prompts, ratio[0], pace), player.play("decode", layout, ratio[1], pace)
    values = player.values(first, rest, [pace * one for one in moved])
    pools_per_s = ratio[0] * first.capacity_per_s, ratio[1] * rest.capacity_per_s
    return Answer(
        plan=plan,
        attainments=judged(values, study.slo)[0],
        median_s=medians(values),
        capacity_per_s=min(*pools_per_s, min(ratio) * links),
        near=place.near,
        sequences=rest.sequences,
        kv_peak=rest.kv_peak,
        preemptions=first.preemptions + rest.preemptions,
    )


def best_ratio(player: Player, prompts: Side, answers: Side, most_devices: int) -> tuple[Answer | None, Answer | None]:
    """The first ratio that meets the limits, and the one among those tried that misses them least."""
    nearest: Answer | None = None
    for tried, ratio in enumerate(ratios(prompts, answers, most_devices)):
        if tried >= _MOST_RATIOS and not player.study.exhaustive:
            break
        found = pair_answer(player, prompts.layout, answers.layout, ratio)
        if found is None:
            continue
        if found.excess <= 1:
            return found, nearest
        if nearest is None or found.excess < nearest.excess:
            nearest = found
    return None, nearest


def single_answer(player: Player, layout: InferencePlan, engines: int, pace: float = 1.0) -> Answer:
    """Engines that do both, at the study's rate."""
    play = player.play("both", layout, engines, pace)
    values = player.values(play, play)
    return Answer(
        plan=layout.model_copy(update={"dp": engines}),
        attainments=judged(values, player.study.slo)[0],
        median_s=medians(values),
        capacity_per_s=engines * play.capacity_per_s,
        near=None,
        sequences=play.sequences,
        kv_peak=play.kv_peak,
        preemptions=play.preemptions,
    )
