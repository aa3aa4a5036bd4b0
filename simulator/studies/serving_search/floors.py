"""Bounds that no play of a layout can beat: percentiles of its times on a machine without losses, alone with each request.

A step's price is a sum of kernels and collectives, each at least its operations over the device's peak and at least its
bytes over the bandwidth. These bounds grow with the tokens of a step, and two pieces of a prompt cost no less than the
whole: weights are read twice. So a request's first token takes at least its prompt (what of it is not cached) alone in one step, each further token
a step of one sequence behind that prompt, and whatever else runs only adds. Every request has its bound; a percentile of
times is at least that percentile of their bounds. The host's time before each step is the stack's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import inf
from typing import Final

from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves
from simulator.studies.serving import Batch, Chunk, InferencePlan, Request, StepCosts
from simulator.studies.serving.decoding import batch_of
from simulator.studies.serving.slo import Figure
from simulator.studies.serving_search.study import ServingSearch

GRAIN: Final = 64  # tokens that prompts are rounded down to: a shorter prompt bounds a longer one
_ROUNDED: Final = 0.99  # numbers of experts that a step reaches are rounded to whole ones


class Floors:
    """Of one layout, each in seconds, by the tokens of a prompt."""

    def __init__(self, study: ServingSearch, layout: InferencePlan) -> None:
        calibration, curves = study.numbers
        stack = study.stack.on_host_of(study.cluster.device)
        given = (study.model, layout, study.seen, study.stack)
        self._overhead_s = StepCosts(*given, calibration, curves).idle_s(inf, 1)
        self._ideal = StepCosts(*given, Calibration.ideal(), LinkCurves.ideal())
        quicker = min(1.0, stack.elementwise_factor_on(study.cluster.device.architecture))
        self._share = quicker * (_ROUNDED if study.model.experts else 1.0)
        keys = (0,) * len(self._ideal.windows)
        self._first_s = cache(lambda n: self.step_s(Batch(decodes=0, keys=keys, chunks=(Chunk(new=n, cached=0),))))
        self._token_s = cache(lambda context: self.step_s(batch_of(self._ideal, 1, context)))

    def step_s(self, batch: Batch) -> float:
        """No step that holds this batch is shorter."""
        part = self._ideal.tokens_a_step if batch.decodes else 1.0
        return self._overhead_s / part + self._share * sum(self._ideal.stages_s(batch))

    def first_s(self, prompt: int) -> float:
        """From a request's arrival to its first token."""
        return self._first_s(max(1, prompt - prompt % GRAIN))

    def token_s(self, prompt: int) -> float:
        """Each further token."""
        return self._token_s(max(1, prompt - prompt % GRAIN))


def floors_of(
    first: Floors | None, rest: Floors | None, requests: Sequence[Request]
) -> Mapping[Figure, list[float | None]]:
    """Bounds of every request's figures. first, rest: of the layouts that compute its prompt and its further tokens."""
    found: dict[Figure, list[float | None]] = {"ttft": [], "tpot": [], "latency": []}
    for request in requests:
        first_s = first.first_s(request.prompt_tokens - request.cached_tokens) if first else 0.0
        each_s = rest.token_s(request.prompt_tokens) if rest else 0.0
        more = request.output_tokens - 1
        found["ttft"].append(first_s)
        found["tpot"].append(each_s if more else None)
        found["latency"].append(first_s + more * each_s)
    return found
