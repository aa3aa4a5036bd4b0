"""Ranks that tests start by the dozen, without loading torch for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import warm
from validate.machine import KEEP_FREED_MEMORY


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
