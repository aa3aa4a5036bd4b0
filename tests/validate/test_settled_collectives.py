"""Counted collectives wait until gloo has let go: when its threads are scheduled is nobody's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from torch import Tensor
from torch import distributed as dist

from validate.players import hooks
from validate.torch_private import FakeStore

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of which every version has others


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one whenever the threads are waited for."""
    found: list[str] = []
    monkeypatch.setattr(hooks, "wait_for_threads", lambda: found.append("waited"))
    return found


@pytest.fixture
def gloo() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _functional(x: Tensor) -> Tensor:
    made = torch.ops._c10d_functional.all_gather_into_tensor(x, 1, dist.group.WORLD.group_name)
    return torch.ops._c10d_functional.wait_tensor(made)


def _replicated(x: Tensor) -> Tensor:
    """By DDP's reducer, in C++: it reduces one bucket."""
    network = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4, bias=False), init_sync=False)
    network(x).sum().backward()
    return network.module.weight.grad


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize(
    "collective",
    [
        lambda x: dist.all_gather_into_tensor(torch.empty_like(x), x, async_op=True),
        lambda x: dist.reduce_scatter_tensor(torch.empty_like(x), x, async_op=True),
        lambda x: dist.all_to_all_single(torch.empty_like(x), x, async_op=True),
        lambda x: dist.broadcast(x, 0, async_op=True),
        lambda x: dist.all_reduce(x, async_op=True),
        _functional,
        _replicated,
    ],
    ids=["all_gather", "reduce_scatter", "all_to_all", "broadcast", "all_reduce", "functional", "ddp"],
)
def test_whoever_asks_for_a_collective_waits_for_its_end(
    waits: list[str], collective: Callable[[Tensor], object]
) -> None:
    x = torch.ones(4, 4)
    with hooks.settled_collectives():
        made = collective(x)
        assert waits == ["waited"]
        if isinstance(made, Tensor):
            assert float(made.sum()) == 16 * (4 if collective is _replicated else 1)
    collective(x)
    assert waits == ["waited"], "only while bytes are counted"


def test_other_groups_keep_their_own_collectives(waits: list[str]) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with hooks.settled_collectives():
            dist.all_reduce(torch.ones(4))
    finally:
        dist.destroy_process_group()
    assert not waits
