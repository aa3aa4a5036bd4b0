"""Inference as a plan of its own: the time of a serving step, the memory of a GPU, and the queue of requests.

An `InferencePlan` places a `Model` on a `Cluster`; `StepCosts` prices prefill and decode steps from the same ops, kernels
and collectives as training; `serve` plays requests through continuous batching with a paged cache.
"""

from simulator.studies.serving.batch import Batch, Chunk
from simulator.studies.serving.costs import StepCosts
from simulator.studies.serving.decoding import decode_step
from simulator.studies.serving.deployment import Deployment
from simulator.studies.serving.engines import defaults_of, engine_of, stack_named, stack_of, usual_values, with_defaults
from simulator.studies.serving.highest_rate import highest_rate
from simulator.studies.serving.legal import check
from simulator.studies.serving.memory import serving_memory
from simulator.studies.serving.plan import InferencePlan
from simulator.studies.serving.report import Latencies, Load, Serving, Spread
from simulator.studies.serving.serving import serve
from simulator.studies.serving.slo import Limit, Slo
from simulator.studies.serving.token_costs import token_costs
from simulator.studies.serving.workload import Choice, Lognormal, Request, Uniform, Workload

__all__ = [
    "Batch", "Choice", "Chunk", "Deployment", "InferencePlan", "Latencies", "Limit", "Load", "Lognormal", "Request",
    "Serving", "Slo", "Spread", "StepCosts", "Uniform", "Workload", "check", "decode_step", "defaults_of", "engine_of",
    "highest_rate", "serve", "serving_memory", "stack_named", "stack_of", "token_costs", "usual_values", "with_defaults",
]  # fmt: skip
