"""Collectives and messages of a fake process group: which, among whom, of how many bytes, and who waits for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from weakref import ref

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch._subclasses.fake_tensor import FakeTensor

from simulator.work.captured.capture import Kind
from validate.capture import trees, values
from validate.capture.channel import Channel
from validate.capture.log import Log
from validate.capture.ranks import OTHERS_MEMORY, RefusedError
from validate.capture.storages import Storages
from validate.capture.streams import Pending, Recorder

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
    "barrier": ("barrier", -1, -1),
}
_SEND, _RECEIVE = 0, 1  # directions of a message
_FULL_OF_INPUT = ("reduce_scatter", "scatter")  # whose full tensor is what a rank sends
_FUNCTIONAL = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
}
_FROM_CPP = {"broadcast_": "broadcast", "allreduce_": "all_reduce"}  # DDP's buffers; Python's calls never come so far
_OF_OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
_NAMED = ("all_gather", "reduce_scatter")  # whose buffers memory calls by them


class Collectives:
    """Wraps torch's process groups so that each call is written down."""

    def __init__(self, log: Log, storages: Storages, channel: Channel) -> None:
        self._log, self._storages, self._channel = log, storages, channel
        self._count = 0
        self._batches = 0
        self._batch: _Batch | None = None  # that is being put together
        self.of_hosts = set[str]()  # groups over gloo
        self._objects = 0  # calls with objects, which NCCL's groups send through the GPU
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._values: dict[int, int] = {}  # functional collectives that nobody waited for yet, by the result's storage

    def numbered(self) -> int:
        """The number of a further collective."""
        self._count += 1
        return self._count - 1

    def install(self) -> None:
        """Every collective that Python calls, and every wait for one."""
        for name, (kind, out, sent) in _METHODS.items():
            if not hasattr(dist.ProcessGroup, name):
                continue  # of another release of torch
            setattr(dist.ProcessGroup, name, self._wrapped(getattr(dist.ProcessGroup, name), kind, out, sent))
        group = dist.ProcessGroup
        group.send = self._message(group.send, _SEND)
        group.recv = self._message(group.recv, _RECEIVE)
        group.recv_anysource = _from_anyone
        FakeProcessGroup.supports_coalescing = True  # type: ignore[method-assign, assignment]  # as NCCL
        group._start_coalescing = lambda *_: self._begin_batch()
        group._end_coalescing = lambda *_: self._end_batch()
        for name in _OF_OBJECTS:
            call = self._with_objects(getattr(dist, name))
            for module in (dist, dist.distributed_c10d):
                setattr(module, name, call)
        original = dist.Work.wait

        @wraps(original)
        def wait(work: Any, *args: object) -> object:
            self.waited(work)
            return original(work, *args)

        dist.Work.wait = wait

    def waited(self, work: object) -> None:
        """The current stream waits for a collective or a message."""
        work_record = Recorder.works.pop(id(work), None)
        if work_record is not None:
            for number in work_record.numbers:
                Recorder.write(Kind.WAIT_WORK, Recorder.stack[-1].number, number)
            for arrive in work_record.arrive:
                arrive()

    def _with_objects(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Objects become tensors: their lengths, then their bytes, each of which the host waits for."""

        @wraps(original)
        def call(*args: object, **kwargs: object) -> Any:
            self._objects += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._objects -= 1

        return call

    def _message(self, original: Callable[..., Any], direction: int) -> Callable[..., Any]:
        """ProcessGroup.send or .recv, whose peer is a rank in the group."""

        @wraps(original)
        def call(group: Any, tensors: Sequence[torch.Tensor], peer: int, *_: object) -> Any:
            ranks = self._ranks_of(group)
            other = ranks[peer]
            if other == self._channel.rank:
                return original(group, tensors, peer, *_)
            self._channel.want(other)
            numbers, arrive = [], []
            for tensor in tensors:
                if direction == _SEND:
                    self._channel.publish(other, ranks, values.content(tensor))
                else:
                    arrive += self._received(tensor, other, ranks)
                if tensor.device.type == "cuda":
                    numbers.append(self._written(direction, ranks, other, tensor.numel() * tensor.element_size()))
            work = _over()
            pending = Pending(work, tuple(numbers), tuple(tensors), tuple(arrive))
            if self._batch is not None:
                self._batch.members.append(pending)
            Recorder.works[id(work)] = pending
            return work

        return call

    def _written(self, direction: int, ranks: tuple[int, ...], other: int, size: int) -> int:
        """A message on the current stream: its number."""
        number = self.numbered()
        batch = -1 if self._batch is None else self._batch.number
        stream = Recorder.stack[-1].number
        Recorder.write(Kind.MESSAGE, number, direction, self._log.group(ranks), other, size, stream, batch)
        return number

    def _received(self, tensor: torch.Tensor, other: int, ranks: tuple[int, ...]) -> list[Callable[[], None]]:
        """Give a tensor what it will receive; what is to be done when the program waits for it."""
        number = self._channel.expect(other, ranks)

        def content() -> bytes:
            return self._channel.receive(other, ranks, number)

        if tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor):
            return [lambda: _fill(tensor, content())]
        if values.may_have(tensor):
            values.promise(tensor, content)
        else:
            values.forget(tensor)
        return []

    def _begin_batch(self) -> None:
        self._batch, self._batches = _Batch(self._batches), self._batches + 1

    def _end_batch(self) -> Any:
        """One handle for everything since the batch began."""
        batch, self._batch = self._batch, None
        members = batch.members if batch is not None else []
        for one in members:
            Recorder.works.pop(id(one.work), None)
        work = _over()
        Recorder.works[id(work)] = Pending(
            work,
            tuple(number for one in members for number in one.numbers),
            tuple(tensor for one in members for tensor in one.tensors),
            tuple(arrive for one in members for arrive in one.arrive),
        )
        return work

    def _ranks_of(self, group: Any) -> tuple[int, ...]:
        """The ranks of the whole job that are in a group, in its order."""
        name = group.group_name
        if name not in self._ranks:
            self._ranks[name] = tuple(dist.get_process_group_ranks(group))
        return self._ranks[name]

    def bucket(self, buffer: torch.Tensor) -> None:
        """Gradients that DDP reduces together."""
        self._storages.name(self._storages.see(buffer), "buckets")

    def write(
        self, kind: str, group: Any, full: int, others: Sequence[torch.Tensor] = (), *, waits: bool = True
    ) -> int:
        """A collective begins on the current stream; waits: which then waits for it. Its number."""
        number = self.numbered()
        ranks = self._ranks_of(group)
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
        """Write down an operator of torch's functional collectives, the wait for one, or what C++ called by itself."""
        name = func._schema.name.split("::")[-1]
        if func.namespace == "c10d" and name in _FROM_CPP:
            self._from_cpp(_FROM_CPP[name], args)
        if func.namespace == "symm_mem":
            raise RefusedError(f"{func}: {OTHERS_MEMORY}")
        if func.namespace != "_c10d_functional":
            return
        if name == "wait_tensor":
            self._functional_wait(found)
        elif name in _FUNCTIONAL:
            self._functional(_FUNCTIONAL[name], args, found)
        else:
            raise RefusedError(f"{func} is not captured: torch.distributed's isend, irecv or batch_isend_irecv instead")

    def _from_cpp(self, kind: str, args: Sequence[Any]) -> None:
        """A collective (tensors, group, …) that C++ waits for."""
        size = sum(one.numel() * one.element_size() for one in args[0])
        self.write(kind, dist.ProcessGroup.unbox(args[1]), size)

    def compiled(self, func: Any, args: Sequence[Any], found: Any) -> int:
        """A functional collective in a compiled region: its number."""
        return self._begun(_FUNCTIONAL[func._schema.name.split("::")[-1]], args, found)

    def _functional(self, kind: str, args: Sequence[Any], found: Any) -> None:
        """A collective whose result is waited for later."""
        number, results = self._begun(kind, args, found), trees.tensors(found)
        for one in results:
            self._values[self._storages.see(one)] = number
        group = dist.distributed_c10d._resolve_process_group(args[-1])
        values.exchanged(kind, trees.tensors(args), results, group.size(), group.rank())

    def _begun(self, kind: str, args: Sequence[Any], found: Any) -> int:
        group = dist.distributed_c10d._resolve_process_group(args[-1])
        if kind == "all_to_all" and all(_to_one(sizes) for sizes in args[1:3]):
            kind = "send_recv"  # a rotation: each rank sends to one other (`permute_tensor`)
        results, inputs = trees.tensors(found), trees.tensors(args)
        full = inputs if kind in _FULL_OF_INPUT else results
        size = sum(one.numel() * one.element_size() for one in full)
        return self.write(kind, group, size, waits=False)

    def _functional_wait(self, found: Any) -> None:
        """The current stream waits for the collective that made a tensor."""
        for one in trees.tensors(found):
            number = self._values.pop(self._storages.see(one), None)
            if number is not None:
                Recorder.write(Kind.WAIT_WORK, Recorder.stack[-1].number, number)

    def _wrapped(self, original: Callable[..., Any], kind: str, out: int, sent: int) -> Callable[..., Any]:
        @wraps(original)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            results = trees.tensors(args[out]) if out >= 0 else []
            inputs = trees.tensors(args[sent]) if sent >= 0 else []
            full = inputs if kind in _FULL_OF_INPUT else results
            if not any(one.device.type == "cuda" for one in (*results, *inputs)):
                if self._objects and group.group_name not in self.of_hosts:
                    self.write(kind, group, sum(one.numel() * one.element_size() for one in full))
                    Recorder.write(Kind.SYNCHRONIZE, Recorder.stack[-1].number)
                return original(group, *args, **kwargs)  # agreed upon by hosts
            sends = kind == "broadcast" and any(getattr(one, "rootRank", -1) == group.rank() for one in args)
            if not sends:  # who broadcasts keeps what it has
                values.exchanged(kind, inputs, results, group.size(), group.rank())
            number = self.write(
                kind,
                group,
                sum(one.numel() * one.element_size() for one in full),
                inputs if kind == "reduce_scatter" else results,
                waits=not _is_async(args),
            )
            work = _over()
            pending = Pending(work, (number,), results=tuple(map(ref, results)))
            if self._batch is not None:
                self._batch.members.append(pending)
            Recorder.works[id(work)] = pending
            return work

        return call


@dataclass(slots=True)
class _Batch:
    """Calls that torch issues together (`batch_isend_irecv`)."""

    number: int
    members: list[Pending] = field(default_factory=list)


class AnyoneError(RefusedError):
    """A receive that does not say from whom."""


def _from_anyone(*_: object) -> None:
    raise AnyoneError("recv() without src: NCCL has none, and a capture needs to know the sender")


def _to_one(sizes: object) -> bool:
    """Of the parts of an all-to-all, one has everything."""
    return isinstance(sizes, list | tuple) and len(sizes) > 1 and sum(bool(one) for one in sizes) == 1


def _fill(tensor: torch.Tensor, content: bytes) -> None:
    tensor.copy_(torch.frombuffer(bytearray(content), dtype=tensor.dtype).view(tensor.shape))


def _over() -> Any:
    """A handle of something that is over: the fake group itself would copy this rank's part once for each other rank."""
    future = torch.futures.Future()
    future.set_result(None)
    return torch._C._distributed_c10d._create_work_from_future(future)


def _is_async(args: Sequence[Any]) -> bool:
    """The caller waits itself: options of a call say asyncOp where Python was asked for a handle."""
    return any(bool(getattr(one, "asyncOp", False)) for one in args)
