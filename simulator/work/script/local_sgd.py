"""Local steps: replicas that agree on their parameters every so many steps instead of summing gradients in each.

Averaging: torch 2.13 `distributed/algorithms/model_averaging/utils.py` (one flat copy of the parameters, divided, reduced, copied
back). Outer step: DiLoCo, arXiv 2311.08105, algorithm 1: the mean of how far replicas moved from where they last agreed is
the gradient of an SGD with Nesterov momentum.
"""

from __future__ import annotations

from simulator.base.kernels import Stream
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.work.script.one_bit import compressed_sum
from simulator.work.script.queries import resident_tensors
from simulator.work.script.unit_comm import Hop


def agreement(model: Model, plan: Plan) -> tuple[Hop, ...]:
    """What replicas do when they agree, on one rank; nothing where they sum gradients in every step.

    Average: the flat copy (read and write once), the division, the sum, and back. Nesterov: instead of the plain copy the
    difference to where replicas last agreed (one more read); at the end momentum and parameters are updated and remembered
    (reads of change, momentum and old parameters, writes of momentum, old and new parameters).
    """
    if plan.deepspeed.one_bit.any:
        return compressed_sum(model, plan)
    if plan.sync_every_steps == 1:
        return ()
    size = sum(resident_tensors(model, plan)["parameters"])
    outer = plan.outer_optimizer == "nesterov"
    flat = Stream(op="copy" if not outer else "elementwise", read_bytes=(2 if outer else 1) * size, write_bytes=size)
    divide = Stream(op="elementwise", read_bytes=size, write_bytes=size)
    back = Stream(
        op="elementwise" if outer else "copy",
        read_bytes=(3 if outer else 1) * size,
        write_bytes=(3 if outer else 1) * size,
    )
    return (
        Hop(kernels=(flat, divide), kind="all_reduce", role="replicate", size_bytes=size, blocking=True),
        Hop(kernels=(back,), blocking=True),
    )
