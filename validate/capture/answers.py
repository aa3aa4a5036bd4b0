"""What a machine with GPUs, a launcher and other ranks would answer: devices, NCCL, seeds, attention kernels."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import wraps
from typing import Any, Self

import torch
from torch import distributed as dist
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from simulator.work.captured.capture import Kind
from validate.capture import builds, data_parallel, graphs, kernels, tensors
from validate.capture.collectives import Collectives
from validate.capture.log import Log
from validate.capture.mode import CaptureMode
from validate.capture.refusals import Properties, without_sensors
from validate.capture.storages import Storages
from validate.capture.streams import Event, Recorder, Stream, entered


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the program is told about where it runs."""

    rank: int
    world_size: int
    gpus_per_node: int
    device_name: str
    capability: tuple[int, int]
    memory_bytes: int
    num_sms: int

    def environment(self) -> dict[str, str]:
        """The variables of torchrun."""
        local = min(self.gpus_per_node, self.world_size)
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.rank % local),
            "LOCAL_WORLD_SIZE": str(local),
            "GROUP_RANK": str(self.rank // local),
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": "none",
        }


def install(machine: Machine, log: Log, storages: Storages, mode: CaptureMode, collectives: Collectives) -> None:
    """Everything below, for this process."""
    os.environ.update(machine.environment())
    graphs.Graph.log, graphs.Graph.storages, graphs.Graph.numbered = log, storages, collectives.numbered
    _cuda(machine, log)
    _groups(machine, log, collectives)
    _meshes(mode)
    tensors.install(storages, mode)
    kernels.install()
    _spawned(log)
    _checkpoints()
    _exports()
    _scripts(log)
    builds.install(stream=Stream, event=Event, device=_Device)


def _cuda(machine: Machine, log: Log) -> None:
    """torch.cuda."""
    answers = {**_streams(), **_device(machine), **_random(), **graphs.answers()}
    numbers: dict[str, Any] = {"memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0}
    numbers |= {"max_memory_reserved": 0, "memory_cached": 0, "utilization": 0}
    numbers["mem_get_info"] = (machine.memory_bytes, machine.memory_bytes)
    answers |= {name: _stated(log, name, value) for name, value in numbers.items()}
    answers["empty_cache"] = lambda: (
        log.detailed and log.answer("torch.cuda.empty_cache: nothing goes back to the driver")
    )
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.cuda.memory.__dict__.update({name: one for name, one in answers.items() if hasattr(torch.cuda.memory, name)})
    torch.cuda.memory.__dict__.update({name: lambda *_, **__: None for name in _OF_SNAPSHOTS})
    torch.cuda.random.__dict__.update(_random())
    torch.Generator = _OfProgram
    torch.cuda.graphs.__dict__.update(graphs.answers())
    for name, answer in answers.items():
        if hasattr(torch.accelerator, name):
            setattr(torch.accelerator, name, answer)
    without_sensors()
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        setattr(torch.cuda.nvtx, name, lambda *_, **__: 0)
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
    torch.accelerator.current_device_index = torch.accelerator.current_device_idx = lambda: 0
    torch.accelerator.set_device_index = torch.accelerator.set_device_idx = lambda *_: None
    torch.cuda.nccl.version = _stated(log, "nccl.version", (2, 27, 3))


_OF_SNAPSHOTS = ("_record_memory_history", "_dump_snapshot", "_snapshot", "memory_snapshot")


def _streams() -> dict[str, Any]:
    """Streams and events, and waiting for them."""
    return {
        "Stream": Stream,
        "Event": Event,
        "ExternalStream": Stream,
        "stream": entered,
        "StreamContext": entered,
        "set_stream": Recorder.set,
        "current_stream": lambda *_: Recorder.stack[-1],
        "default_stream": lambda *_: Recorder.stack[0],
        "synchronize": lambda *_: Recorder.write(Kind.SYNCHRONIZE, -1),
        "is_current_stream_capturing": lambda: False,
    }


def _device(machine: Machine) -> dict[str, Any]:
    """The devices of a node, all alike; what their allocator says."""
    major, minor = machine.capability
    properties = Properties(
        name=machine.device_name,
        major=major,
        minor=minor,
        total_memory=machine.memory_bytes,
        multi_processor_count=machine.num_sms,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        is_integrated=0,
        is_multi_gpu_board=0,
    )
    return {
        "current_device": lambda: 0,
        "device": _Device,
        "device_count": lambda: min(machine.gpus_per_node, machine.world_size),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: machine.capability >= (8, 0),
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "set_device": lambda *_: None,
        "ipc_collect": lambda: None,
        "reset_peak_memory_stats": lambda *_: None,
        "reset_max_memory_allocated": lambda *_: None,
        "memory_stats": lambda *_: _Zeros(),
        "memory_summary": lambda *_, **__: "",
        "reset_accumulated_memory_stats": lambda *_: None,
        "set_sync_debug_mode": lambda *_: None,
        "get_sync_debug_mode": lambda: 0,
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: machine.device_name,
        "get_device_capability": lambda *_: machine.capability,
        "get_arch_list": lambda: [f"sm_{major}{minor}"],
        "set_per_process_memory_fraction": lambda *_: None,
    }


def _random() -> dict[str, Any]:
    """Seeds and states of random numbers, which nobody draws."""
    state = torch.empty(16, dtype=torch.uint8)
    return {
        "manual_seed": lambda *_, **__: None,
        "manual_seed_all": lambda *_: None,
        "seed": lambda: None,
        "seed_all": lambda: None,
        "initial_seed": lambda: 0,
        "get_rng_state": lambda *_, **__: state.clone(),
        "get_rng_state_all": lambda: [state.clone()],
        "set_rng_state": lambda *_, **__: None,
        "set_rng_state_all": lambda *_: None,
        "default_generators": (_Generator(),) * 64,
    }


class _OfProgram(torch.Generator):  # type: ignore[misc]
    """torch.Generator: one on the GPU is one that nobody draws from."""

    def __new__(cls, device: Any = "cpu") -> Self:
        found: Self = super().__new__(cls, "cpu")
        found.on = torch.device(device)
        return found

    device = property(lambda self: self.on)


class _Generator:
    """A GPU's random numbers, as frameworks keep and exchange their states."""

    def get_state(self) -> torch.Tensor:
        return torch.empty(16, dtype=torch.uint8)

    def clone_state(self) -> _Generator:
        return self

    def initial_seed(self, *_: object) -> int:
        return 0

    graphsafe_get_state, seed = clone_state, initial_seed
    set_state = graphsafe_set_state = manual_seed = initial_seed


def _stated(log: Log, name: str, value: object) -> Callable[..., object]:
    def answer(*_: object, **__: object) -> object:
        log.answer(f"torch.cuda.{name}: {value}")
        return value

    return answer


class _Zeros(dict[str, int]):
    """Statistics of an allocator that nobody has."""

    def __missing__(self, _: str) -> int:
        return 0


class _Device:
    """torch.cuda.device: there is one."""

    def __init__(self, *_: object) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def _groups(machine: Machine, log: Log, collectives: Collectives) -> None:
    """Process groups of any size, in this process."""
    original = dist.init_process_group

    @wraps(original)
    def init_process_group(backend: str | None = None, *_: object, **kwargs: Any) -> None:
        sizes = (("world_size", machine.world_size), ("rank", machine.rank))
        for name, own in sizes:
            if kwargs.get(name, -1) not in (-1, own):
                log.answer(f"init_process_group({name}={kwargs[name]}): {own}")
        original("fake", store=FakeStore(), rank=machine.rank, world_size=machine.world_size)
        _noted(dist.group.WORLD, backend, collectives)

    new_group = dist.new_group

    @wraps(new_group)
    def new_fake_group(*args: Any, **kwargs: Any) -> Any:
        backend = args[2] if len(args) > 2 else kwargs.pop("backend", None)
        kwargs.pop("pg_options", None)
        return _noted(new_group(*args[:2], backend="fake", **kwargs), backend, collectives)

    both = (dist, dist.distributed_c10d)
    for module in both:
        module.init_process_group = init_process_group
        module.new_group = new_fake_group
        module.is_nccl_available = lambda: True
        module.get_backend = lambda *_, **__: "nccl"
        if not hasattr(module, "ProcessGroupNCCL"):  # of a torch without CUDA
            module.ProcessGroupNCCL = _NCCL
    dist.distributed_c10d._set_pg_timeout = lambda *_: None  # nothing here waits for NCCL
    dist.device_mesh.init_process_group = init_process_group  # a mesh starts the group where the program has not
    collectives.install()
    data_parallel.install(collectives)


def _noted(group: Any, backend: str | None, collectives: Collectives) -> Any:
    """A group, which sends objects by the CPU where gloo is a part of it."""
    if backend is not None and "gloo" in backend and hasattr(group, "group_name"):
        collectives.of_hosts.add(group.group_name)
    return group


class _NCCL:
    """torch's own group over NCCL: what programs say about one is accepted."""

    class Options(types.SimpleNamespace):
        """Priorities of streams, channels, timeouts."""

        def __init__(self, **given: object) -> None:
            super().__init__(config=types.SimpleNamespace(), **given)


def _meshes(mode: CaptureMode) -> None:
    """DeviceMesh keeps its ranks in small CPU tensors, which stay real; DTensor's own fake runs are nobody's operators."""
    for name in ("_propagate_tensor_meta_non_cached",):
        setattr(ShardingPropagator, name, _paused(getattr(ShardingPropagator, name), mode))
    DeviceMesh.__init__ = _paused(DeviceMesh.__init__, mode)
    _fsdp_param._chunk_with_empty = _Chunks


class _Chunks:
    """A tensor's pieces, cut when they are asked for: FSDP2 looks at its own and at the first of hundreds."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._step = -(-tensor.size(dim) // num_chunks)
        if tensor.size(dim) % num_chunks:
            Recorder.log.answer("shards of unequal size: the first rank of a group has the largest")

    def __getitem__(self, index: int) -> torch.Tensor:
        start, size = index * self._step, self._tensor.size(self._dim)
        if start >= size:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._step, size - start))


def _paused(function: Callable[..., Any], mode: CaptureMode) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: object, **kwargs: object) -> Any:
        mode.paused += 1
        try:
            return function(*args, **kwargs)
        finally:
            mode.paused -= 1

    return call


def _spawned(log: Log) -> None:
    """torch.multiprocessing.spawn runs what the captured rank would run, here."""

    def spawn(
        fn: Callable[..., object], args: tuple[object, ...] = (), nprocs: int = 1, *_: object, **__: object
    ) -> None:
        log.answer(f"torch.multiprocessing.spawn(nprocs={nprocs}): the captured rank's process alone")
        fn(int(os.environ["LOCAL_RANK"]) % nprocs, *args)

    torch.multiprocessing.spawn = torch.multiprocessing.start_processes = spawn


def _checkpoints() -> None:
    """Nothing is written: a state of shapes would be no checkpoint."""
    torch.save = lambda *_, **__: None
    for module in (checkpoint, checkpoint.state_dict_saver):
        module.save = module.save_state_dict = lambda *_, **__: None
        module.async_save = _saved_beside


def _exports() -> None:
    """torch.export, by which `torch.distributed.pipelining.pipeline` cuts models, looks at a program without running it."""
    export = torch.export.export

    @wraps(export)
    def call(*args: Any, **kwargs: Any) -> Any:
        if stage := sys.modules.get("torch.distributed.pipelining.stage"):
            stage.FakeTensor = ()  # type: ignore[attr-defined]  # whose parameters it would leave on the CPU
        with _disable_current_modes():
            return export(*args, **kwargs)

    torch.export.export = call


def _scripts(log: Log) -> None:
    """TorchScript's modules hold parameters where they cannot be given shapes for values: they run as they are written."""

    def as_written(original: Callable[..., Any], *, functions: bool) -> Callable[..., Any]:
        @wraps(original)
        def call(one: Any, *args: Any, **kwargs: Any) -> Any:
            if not (functions or isinstance(one, torch.nn.Module)):  # names are those of who calls
                return original(one, *args, **{**kwargs, "_frames_up": kwargs.get("_frames_up", 0) + 1})
            log.answer(f"torch.jit.{original.__name__}: as it is written, its operators one by one")
            return one

        return call

    torch.jit.script = as_written(torch.jit.script, functions=False)
    for name in ("trace", "freeze", "optimize_for_inference"):
        setattr(torch.jit, name, as_written(getattr(torch.jit, name), functions=True))


def _saved_beside(*_: object, **__: object) -> Future[None]:
    future = Future[None]()
    future.set_result(None)
    return future
