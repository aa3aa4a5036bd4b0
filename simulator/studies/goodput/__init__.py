"""Goodput: from the prediction of a step to a run of days with interruptions.

    answer = goodput(prediction, LongRun(tokens=15 * 10**12), tokens_per_step=..., ...)
    answer.days.p50, answer.goodput, answer.interval_s

The closed forms of Young and Daly choose the interval between checkpoints; runs played with drawn failures say what
comes of it, and of half and twice the interval.
"""

from simulator.studies.goodput.answer import Goodput, expected_run_s, goodput
from simulator.studies.goodput.checkpoint_interval import daly_s, expected_s, young_s
from simulator.studies.goodput.failures import Cause, Failures
from simulator.studies.goodput.run import LongRun
from simulator.studies.goodput.timeline import Conditions, play

__all__ = [
    "Cause", "Conditions", "Failures", "Goodput", "LongRun", "daly_s", "expected_run_s", "expected_s", "goodput",
    "play", "young_s",
]  # fmt: skip
