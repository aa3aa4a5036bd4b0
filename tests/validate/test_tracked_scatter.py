"""A counted reduce-scatter waits for gloo's copy: when its thread is scheduled is nobody's memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from torch import distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

from validate.players import hooks


class Unit:
    """A sharded module as far as its communication goes."""

    scatter: Any = None

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        self.scatter = comm


def test_a_copy_that_is_dropped_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    live = [100]
    work = SimpleNamespace(wait=lambda: live.__setitem__(0, live[0] - 10))

    def late(*_: object, **__: object) -> object:
        live[0] += 60  # what travels, and gloo's copy
        return work

    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(hooks, "wait_for_threads", lambda: live.__setitem__(0, live[0] - 50))  # gloo's thread lets go
    monkeypatch.setattr(collectives.DefaultReduceScatter, "__call__", late)
    layer = Unit()
    built: Any = SimpleNamespace(units=[layer])
    with hooks.scattered_to_the_end(built):
        assert layer.scatter() is work
        assert live == [100]
    assert type(layer.scatter) is collectives.DefaultReduceScatter


@pytest.mark.parametrize("backend", ["nccl", "fake"])
def test_other_groups_keep_their_own_scatter(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    layer = Unit()
    built: Any = SimpleNamespace(units=[layer])
    with hooks.scattered_to_the_end(built):
        assert layer.scatter is None
