"""What stands for collectives where a fake process group pretends that the other ranks exist."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed as dist

from simulator.spec.plan import Plan
from validate.every_thread import wait_for_threads
from validate.parallel import DTYPES, Built
from validate.torch_private import collectives_called_by, default_all_gather


def reduced_in_place(plan: Plan) -> Callable[..., Any]:
    """A communication hook that hands the bucket back as if it had been reduced.

    The fake group's all-reduce returns no future. A narrower dtype to travel in costs a copy, as torch's hooks do.
    """
    narrow = DTYPES[plan.gradient_dtype]

    def hook(_state: object, bucket: dist.GradBucket) -> Any:  # noqa: ANN401  torch's future
        buffer = bucket.buffer()
        if buffer.dtype != narrow:
            buffer.copy_(buffer.to(narrow))
        future = torch.futures.Future()
        future.set_result(buffer)
        return future

    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}  # DDP checks them
    return hook


@contextlib.contextmanager
def settled_collectives() -> Iterator[None]:
    """Each collective returns when it is done and gloo has let go of its tensors. For a counted step only.

    gloo's threads tell whoever waits first, and drop what was gathered, reduced or copied later, whenever they get a core:
    whether that is before or after the next tensor is made is the scheduler's, and a unit's bytes count or do not count in
    a peak. (Messages between two ranks stay as they are: a pipeline would wait for itself.)
    """
    if dist.get_backend() != "gloo":
        yield
        return
    with collectives_called_by(_to_the_end):
        yield


def _to_the_end(collective: Callable[..., Any], *args: object) -> Any:  # noqa: ANN401  what the collective returns
    made = collective(*args)
    work = made[-1] if isinstance(made, tuple) else made
    work.wait()
    wait_for_threads()
    return made


@contextlib.contextmanager
def gathered_at_once(built: Built) -> Iterator[None]:
    """FSDP2's all-gathers become one kernel that writes the whole output, as a network would have by then.

    The fake group copies this rank's part once for each rank: at 512 ranks that is more host time than the model's.
    Without FSDP2, or in a torch that cannot be told how to gather, nothing changes. (Not for a tracked step: a tracker
    knows gathered buffers by the collective that fills them.)
    """
    units = [unit for unit in built.units if hasattr(unit, "set_custom_all_gather")]
    if not units:
        yield
        return
    default = default_all_gather()

    class AtOnce(default):  # type: ignore[misc, valid-type]
        def __call__(
            self,
            output_tensor: torch.Tensor,
            input_tensor: torch.Tensor,
            group: dist.ProcessGroup,
            async_op: object = None,
        ) -> None:
            del async_op  # nothing is left to wait for
            output_tensor.view(group.size(), -1).copy_(input_tensor.view(1, -1).expand(group.size(), -1))

    for unit in units:
        unit.set_custom_all_gather(AtOnce())
    try:
        yield
    finally:
        for unit in units:
            unit.set_custom_all_gather(default())
