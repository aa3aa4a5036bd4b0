"""The optimizer's kernels on one rank's parameters. Bytes a parameter: fused AdamW 28 in fp32, foreach 80."""

from __future__ import annotations

from simulator.base.kernels import DTYPE_BYTES, Kernel
from simulator.spec.plan import Plan
from simulator.work.ops.graph import conversion, stream

_TENSORS_PER_LAUNCH = 32  # multi-tensor kernels take their pointers by value: some tens of tensors a launch
_Pass = tuple[str, str]  # what one pass reads and what it writes: p parameter, g gradient, m and v state, t temporary

_FOREACH: dict[str, tuple[_Pass, ...]] = {
    # decay, lerp of m, decay of v, addcmul of v, root, divide, add epsilon, addcdiv of p
    "adamw": (("p", "p"), ("gm", "m"), ("v", "v"), ("gv", "v"), ("v", "t"), ("t", "t"), ("t", "t"), ("mtp", "p")),
    "adam": (("gm", "m"), ("v", "v"), ("gv", "v"), ("v", "t"), ("t", "t"), ("t", "t"), ("mtp", "p")),
    "sgd": (("gp", "p"),),
    "sgd_momentum": (("m", "m"), ("gm", "m"), ("mp", "p")),
}
_FUSED: dict[str, tuple[_Pass, ...]] = {
    "adamw": (("pgmv", "pmv"),),
    "adam": (("pgmv", "pmv"),),
    "sgd": (("pg", "p"),),
    "sgd_momentum": (("pgm", "pm"),),
    "adam8bit": (("pg88", "p88"),),
}


def optimizer_kernels(numel: int, num_tensors: int, plan: Plan) -> tuple[Kernel, ...]:
    """Kernels of one optimizer step over `numel` parameters in `num_tensors` tensors on one rank.

    foreach and loop make the same passes; fused makes one. 8-bit Adam is always fused and keeps two states of a byte
    (plus an fp32 scale each 2048). With 16-bit working copies beside the master weights (DeepSpeed, Megatron) the
    gradients are widened before and the copies written after.
    """
    size = _sizes(plan)
    fused = plan.optimizer.impl == "fused" or plan.optimizer.kind == "adam8bit"
    passes = (_FUSED if fused else _FOREACH)[plan.optimizer.kind]
    launches = num_tensors if plan.optimizer.impl == "loop" else -(-num_tensors // _TENSORS_PER_LAUNCH)
    kernels: list[Kernel] = []
    copies = plan.traits.master_copy and plan.compute_dtype != plan.precision.master
    if copies and plan.gradient_dtype != plan.precision.master:
        kernels.append(conversion(numel, plan.gradient_dtype, plan.precision.master, launches))
    kernels += [
        stream("optimizer", numel * sum(size[x] for x in read), numel * sum(size[x] for x in write), launches)
        for read, write in passes
    ]
    if copies:
        kernels.append(conversion(numel, plan.precision.master, plan.compute_dtype, launches))
    return tuple(kernels)


def _sizes(plan: Plan) -> dict[str, int]:
    master, state = DTYPE_BYTES[plan.precision.master], DTYPE_BYTES[plan.optimizer.dtype]
    return {"p": master, "g": master, "m": state, "v": state, "t": state, "8": 1}
