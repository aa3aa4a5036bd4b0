"""DDP's reductions: its reducer in C++ waits for futures that a fake group does not give, so a hook stands for them.

A program's own hook (`register_comm_hook`) runs in its place: what it does `then` runs on a stream of its own behind the
collective, and the default stream waits for it behind the backward (torch 2.13: reducer.cpp, finalize_backward; ivalue::Future).
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import parallel

from simulator.work.captured.capture import Kind
from validate.capture.collectives import Collectives
from validate.capture.ranks import RefusedError
from validate.capture.streams import Recorder, Stream

_Hook = Callable[[Any, Any], Any]


class Later(torch.futures.Future):  # type: ignore[misc]
    """The result of something that a stream still works on. behind: makes the current stream wait for that."""

    def __init__(self, value: object, behind: Callable[[], None]) -> None:
        super().__init__()
        self._behind = behind
        self.set_result(value)

    def then(self, callback: Callable[[Any], Any]) -> Later:
        """What it gives, on a stream of its own."""
        with Stream() as stream:
            self._behind()
            value = callback(self)
        return Later(value, lambda: Recorder.stack[-1].wait_stream(stream))

    def wait(self) -> Any:
        """The result, for which the current stream waits."""
        self._behind()
        return super().wait()


def install(collectives: Collectives) -> None:
    """In this process."""
    ddp = nn.parallel.DistributedDataParallel
    register, forward = ddp.register_comm_hook, ddp._pre_forward

    @wraps(register)
    def register_comm_hook(self: Any, state: object, hook: _Hook) -> None:
        register(self, state, _announced(hook, collectives))

    @wraps(forward)
    def pre_forward(self: Any, *args: object, **kwargs: object) -> Any:
        if any(hasattr(one, "_in_backward_optimizers") for one in self.module.parameters()):
            raise RefusedError("an optimizer inside DDP's backward is not captured: optimizer.step() behind backward()")
        if not self._comm_hooks:
            register(self, self.process_group, _announced(_summed(collectives), collectives))
        self.logger = types.SimpleNamespace(set_runtime_stats_and_log=lambda: None)
        return forward(self, *args, **kwargs)

    def get_future(work: Any) -> Later:
        pending = Recorder.works.get(id(work))
        results = [] if pending is None else [one() for one in pending.results]
        return Later(results, lambda: collectives.waited(work))

    dist.Work.get_future = get_future
    ddp.register_comm_hook, ddp._pre_forward = register_comm_hook, pre_forward
    parallel.distributed._verify_param_shape_across_processes = lambda *_: True  # of ranks that are not there
    parallel.distributed._sync_module_states = lambda *_, **__: None


def _announced(reduce: _Hook, collectives: Collectives) -> _Hook:
    """A hook whose bucket is known as one, and whose end the default stream waits for behind the backward."""

    def hook(state: object, bucket: Any) -> Any:
        collectives.bucket(bucket.buffer())
        future = reduce(state, bucket)
        if isinstance(future, Later):
            torch.autograd.Variable._execution_engine.queue_callback(future.wait)
        return future

    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    return hook


def _summed(collectives: Collectives) -> _Hook:
    """DDP's own: one all-reduce a bucket."""

    def hook(group: Any, bucket: Any) -> Later:
        buffer = bucket.buffer()
        number = collectives.write("all_reduce", group, buffer.numel() * buffer.element_size(), waits=False)
        return Later(buffer, lambda: Recorder.write(Kind.WAIT_WORK, Recorder.stack[-1].number, number))

    return hook
