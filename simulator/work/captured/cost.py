"""`kernel_cost`: the cost of a user's own operator, annotated in the program and stored in the capture.

A custom operator (`torch.library.custom_op`, a Triton kernel behind one, an extension in C++) has a name that no rule
knows. Its author knows what it computes and moves, as a function of its arguments' shapes:

    @shardwise.kernel_cost("mylib::swiglu")
    def swiglu_cost(gate, up):
        return shardwise.KernelCost(bytes=3 * gate.numel() * gate.element_size())

The function is called while the program is captured, with the operator's own arguments: tensors have shapes, dtypes and no
values. Reading a capture needs neither it nor torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar, get_args

from simulator.base.kernels import Dtype, Stated

_Cost = TypeVar("_Cost", bound=Callable[..., "KernelCost"])
COSTS: Final[dict[str, Callable[..., KernelCost]]] = {}  # by the operator's name, as `mylib::swiglu`
_NAME: Final = re.compile(r"\w+::\w+(\.\w+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCost:
    """One call of an operator. seconds, where known, count alone and on any device; else flop and bytes do.

    flop: at the dense peak of `dtype`, as far as large products reach it; bytes: read and written in the device's memory;
    what takes longer counts. launches: kernels that it starts, for the host's time. category: where a report counts it.
    Raises ValueError where it says nothing, or nothing that can be.
    """

    flop: int = 0
    bytes: int = 0
    seconds: float = 0.0
    dtype: Dtype = "bf16"
    launches: int = 1
    category: str = "custom kernels"

    def __post_init__(self) -> None:
        numbers: tuple[object, ...] = (self.flop, self.bytes, self.seconds, self.launches)  # of somebody's own code
        if not all(isinstance(one, (int, float)) and 0 <= one < math.inf for one in numbers) or self.launches < 1:
            raise ValueError(f"{self}: flop, bytes and seconds must be numbers from 0 on, and launches from 1 on")
        if not (self.flop or self.bytes or self.seconds):
            raise ValueError("a cost needs flop, bytes or seconds")
        if self.dtype not in get_args(Dtype):
            raise ValueError(f"dtype is {self.dtype!r}, and must be one of {', '.join(get_args(Dtype))}")

    @property
    def kernel(self) -> Stated:
        """The kernel that the road prices."""
        size, flop = round(self.bytes), round(self.flop)
        return Stated(flop=flop, num_bytes=size, seconds=self.seconds, dtype=self.dtype, launches=int(self.launches))


def kernel_cost(operator: str) -> Callable[[_Cost], _Cost]:
    """Decorate a function of an operator's arguments that returns its `KernelCost`, for `shardwise capture`.

    operator: `namespace::name`, perhaps with `.overload`, as torch registers it; for a backward that is an operator of its
    own, decorate another. Outside of a capture nothing happens. Raises ValueError for a name that no operator can have.
    """
    if not _NAME.fullmatch(operator):
        raise ValueError(f"kernel_cost({operator!r}): must be an operator's name, as mylib::swiglu")

    def register(cost: _Cost) -> _Cost:
        COSTS[operator] = cost
        return cost

    return register
