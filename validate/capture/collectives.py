"""Collectives of a fake process group: which, among whom, of how many bytes, and who waits for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import distributed as dist

from simulator.work.captured.capture import Kind
from validate.capture.log import Log
from validate.capture.storages import Storages
from validate.capture.streams import Recorder

# method of torch's ProcessGroup -> (kind, place of the tensors of the result, place of those that are sent)
_METHODS: dict[str, tuple[str, int, int]] = {
    "_allgather_base": ("all_gather", 0, 1),
    "all_gather_single": ("all_gather", 0, 1),
    "all_gather_single_coalesced": ("all_gather", 0, 1),
    "allgather": ("all_gather", 0, 1),
    "allgather_into_tensor_coalesced": ("all_gather", 0, 1),
    "allgather_coalesced": ("all_gather", 0, 1),
    "_reduce_scatter_base": ("reduce_scatter", 0, 1),
    "reduce_scatter_single": ("reduce_scatter", 0, 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 0, 1),
    "reduce_scatter": ("reduce_scatter", 0, 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0, 1),
    "allreduce": ("all_reduce", 0, 0),
    "allreduce_coalesced": ("all_reduce", 0, 0),
    "broadcast": ("broadcast", 0, 0),
    "reduce": ("reduce", 0, 0),
    "all_to_all_single": ("all_to_all", 0, 1),
    "alltoall_base": ("all_to_all", 0, 1),
    "alltoall": ("all_to_all", 0, 1),
    "gather": ("gather", 0, 1),
    "scatter": ("scatter", 0, 1),
    "send": ("send", 0, 0),
    "recv": ("receive", 0, 0),
    "barrier": ("barrier", -1, -1),
}
_FULL_OF_INPUT = ("reduce_scatter", "scatter")  # whose full tensor is what a rank sends
_FUNCTIONAL = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
}
_NAMED = ("all_gather", "reduce_scatter")  # whose buffers memory calls by them


class Collectives:
    """Wraps torch's process groups so that each call is written down."""

    def __init__(self, log: Log, storages: Storages) -> None:
        self._log, self._storages = log, storages
        self._count = 0
        self._values: dict[int, int] = {}  # functional collectives that nobody waited for yet, by the result's storage

    def install(self) -> None:
        """Every collective that Python calls, and every wait for one."""
        for name, (kind, out, sent) in _METHODS.items():
            if not hasattr(dist.ProcessGroup, name):
                continue  # of another release of torch
            setattr(dist.ProcessGroup, name, self._wrapped(getattr(dist.ProcessGroup, name), kind, out, sent))
        original = dist.Work.wait

        @wraps(original)
        def wait(work: Any, *args: object) -> object:
            self.waited(work)
            return original(work, *args)

        dist.Work.wait = wait

    def waited(self, work: object) -> None:
        """The current stream waits for a collective."""
        held = Recorder.works.pop(id(work), None)
        if held is not None:
            Recorder.write(Kind.WAIT_WORK, Recorder.stack[-1].number, held[1])

    def bucket(self, buffer: torch.Tensor) -> None:
        """Gradients that DDP reduces together."""
        self._storages.name(self._storages.see(buffer), "buckets")

    def write(
        self, kind: str, group: Any, full: int, others: Sequence[torch.Tensor] = (), *, waits: bool = True
    ) -> int:
        """A collective begins on the current stream; waits: which then waits for it. Its number."""
        number = self._count
        self._count += 1
        ranks = tuple(dist.get_process_group_ranks(group))
        for tensor in others:
            if kind in _NAMED and tensor.device.type == "cuda":
                self._storages.name(self._storages.see(tensor), kind)
        Recorder.write(
            Kind.COLLECTIVE, number, self._log.name(kind), self._log.group(ranks), full, Recorder.stack[-1].number
        )
        if waits:
            Recorder.write(Kind.WAIT_WORK, Recorder.stack[-1].number, number)
        return number

    def operator(self, func: Any, args: Sequence[Any], found: Any) -> None:
        """Write down an operator of torch's functional collectives, or the wait for one; nothing where it is neither."""
        if func.namespace != "_c10d_functional":
            return
        name = func._schema.name.split("::")[-1]
        if name == "wait_tensor":
            self._functional_wait(found)
        elif name in _FUNCTIONAL:
            self._functional(_FUNCTIONAL[name], args, found)

    def _functional(self, kind: str, args: Sequence[Any], found: Any) -> None:
        """A collective whose result is waited for later."""
        group = dist.distributed_c10d._resolve_process_group(args[-1])
        results, inputs = _tensors(found), _tensors(args)
        full = inputs if kind in _FULL_OF_INPUT else results
        size = sum(one.numel() * one.element_size() for one in full)
        number = self.write(kind, group, size, inputs if kind == "reduce_scatter" else results, waits=False)
        for one in results:
            self._values[self._storages.see(one)] = number

    def _functional_wait(self, found: Any) -> None:
        """The current stream waits for the collective that made a tensor."""
        for one in _tensors(found):
            number = self._values.pop(self._storages.see(one), None)
            if number is not None:
                Recorder.write(Kind.WAIT_WORK, Recorder.stack[-1].number, number)

    def at_end(self, number: int) -> None:
        """A collective that the default stream waits for behind the backward (DDP)."""

        def wait() -> None:
            Recorder.write(Kind.WAIT_WORK, Recorder.stack[-1].number, number)

        torch.autograd.Variable._execution_engine.queue_callback(wait)

    def _wrapped(self, original: Callable[..., Any], kind: str, out: int, sent: int) -> Callable[..., Any]:
        @wraps(original)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            results = _tensors(args[out]) if out >= 0 else []
            inputs = _tensors(args[sent]) if sent >= 0 else []
            if not any(one.device.type == "cuda" for one in (*results, *inputs)):
                return original(group, *args, **kwargs)  # agreed upon by hosts
            full = inputs if kind in _FULL_OF_INPUT else results
            peer = next((one for one in args if isinstance(one, int)), 0) if kind in ("send", "receive") else None
            number = self.write(
                kind if peer is None else f"{kind} {peer}",
                group,
                sum(one.numel() * one.element_size() for one in full),
                inputs if kind == "reduce_scatter" else results,
                waits=not _is_async(args),
            )
            work = _over()
            Recorder.works[id(work)] = (work, number)
            return work

        return call


def _over() -> Any:
    """A handle of something that is over: the fake group itself would copy this rank's part once for each other rank."""
    future = torch.futures.Future()
    future.set_result(None)
    return torch._C._distributed_c10d._create_work_from_future(future)


def _is_async(args: Sequence[Any]) -> bool:
    """The caller waits itself: options of a call say asyncOp where Python was asked for a handle."""
    return any(bool(getattr(one, "asyncOp", False)) for one in args)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [one for one in torch.utils._pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]
