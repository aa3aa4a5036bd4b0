"""Ranks that tests start by the dozen, without loading torch for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import warm
from validate.machine import KEEP_FREED_MEMORY
from validate.players import guard


@pytest.fixture(scope="session")
def torch_server() -> Iterator[warm.Server]:
    """One process that has loaded what ranks on a CPU load."""
    with warm.server("validate.players.real", "validate.players.fake", **KEEP_FREED_MEMORY) as made:
        yield made


@pytest.fixture
def warm_ranks(torch_server: warm.Server) -> Iterator[warm.Server]:
    """Supervised ranks are forked, in this test."""
    with warm.forked_ranks(torch_server) as made:
        yield made


@pytest.fixture(scope="session")
def kept_guard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the device guard: compiled by the first that needs it, found by the others of this worker."""
    if guard.needs_guard() and guard.compiler() is None:
        pytest.skip("needs a CUDA build of torch, or a C++ compiler for the device guard")
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("SHARDWISE_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def guarded_server(kept_guard: Path) -> Iterator[warm.Server]:
    """One process that has loaded the guard and what captures load."""
    with warm.server("tests.validate.guarded", SHARDWISE_CACHE=str(kept_guard)) as made:
        yield made


@pytest.fixture(scope="module")
def warm_captures(guarded_server: warm.Server) -> Iterator[warm.Server]:
    """Captures, and other ranks on fake CUDA tensors, are forked in this file."""
    with warm.forked_ranks(guarded_server) as made:
        yield made
