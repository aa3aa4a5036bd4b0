"""Parents of ranks that a launcher started: they refuse together, hear of each other's troubles, and end with one verdict."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from simulator.base.errors import Fault, InputError
from validate import joined
from validate.benches.collectives import _groups
from validate.benches.pairs import between_nodes, within_nodes
from validate.supervise import Peers, PlaceInJob, Verdict

PORTS = iter(range(100, 20_000, 13))
OK = Verdict(kind="ok")


def meet(size: int, play: Callable[[Peers], Any], patience_s: float = 20.0) -> list[Any]:
    """`play` in a thread a rank, on two hosts; what each returned, or raised."""
    port, found = next(PORTS), [None] * size

    def run(rank: int) -> None:
        place = PlaceInJob(rank=rank, size=size, host=f"node{rank // 2}", address="127.0.0.1", port=port)
        peers = Peers(place, patience_s)
        peers.begin()
        try:
            found[rank] = play(peers)
        except InputError as exc:
            found[rank] = exc  # type: ignore[call-overload]
        peers.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_what_each_says_all_hear() -> None:
    assert (
        meet(4, lambda peers: peers.gather("x", {"mine": peers.place.rank}))
        == [{rank: {"mine": rank} for rank in range(4)}] * 4
    )


def test_the_cause_is_told_to_all_and_not_its_echoes() -> None:
    def play(peers: Peers) -> Verdict:
        mine = {3: Verdict(kind="killed", detail="by SIGKILL", phase="step 2"), 1: OK}
        verdict = mine.get(peers.place.rank, Verdict(kind="peer_lost", detail="connection closed", phase="step 2"))
        return peers.settle("end", verdict if verdict.ok else peers.own(verdict))

    told = meet(4, play)
    assert told == [Verdict(kind="killed", detail="by SIGKILL", rank=3, host="node1", phase="step 2")] * 4
    assert "rank 3 on node1" in str(told[0])


def test_of_ranks_that_hang_together_the_one_that_does_not_wait_is_the_cause() -> None:
    def play(peers: Peers) -> Verdict:
        return peers.settle("end", peers.own(Verdict(kind="hung", waits=peers.place.rank != 2)))

    assert {verdict.rank for verdict in meet(4, play)} == {2}


def test_a_parent_that_is_gone_is_a_trouble_of_its_rank() -> None:
    def play(peers: Peers) -> Verdict:
        peers.gather("all are here", {})
        if peers.place.rank == 2:
            assert peers._socket is not None
            peers._socket.shutdown(socket.SHUT_RDWR)  # as the system does for a process that it has killed
            return OK
        while not peers.elsewhere():
            pass
        return peers.settle("end", peers.elsewhere()[0], 5.0)

    told = meet(4, play)
    for rank in (0, 1, 3):
        assert (told[rank].kind, told[rank].rank, told[rank].host) == ("killed", 2, "node1")


def test_a_job_of_another_key_is_not_joined() -> None:
    def play(peers: Peers) -> list[Verdict]:
        peers.gather("all are here", {})
        if peers.place.rank == 1:
            place = PlaceInJob(rank=1, size=2, host="x", address="127.0.0.1", port=peers.place.port, key="other")
            stranger = Peers(place, 0.5)
            stranger.begin()
            return stranger.troubles
        return []

    (trouble,) = meet(2, play)[1]
    assert "not reached" in trouble.detail


@pytest.mark.parametrize("refusing", [0, 1, None])
def test_if_one_refuses_none_starts_and_all_say_why(refusing: int | None) -> None:
    fault = Fault(place="GPU 1", problem="is in use", remedy="wait")

    def play(peers: Peers) -> None:
        rank = peers.place.rank
        refusal = InputError(fault) if refusing in (rank, None) else None
        joined._agree(peers, refusal, {"torch": "2.9" if rank == 3 else "2.11"})

    raised = meet(4, play)
    who = "" if refusing is None else f"rank {refusing} on node0: "
    for one in raised:
        assert f"{who}GPU 1: is in use (wait)" in str(one)
        assert "rank 3 on node1: has torch 2.9, and 3 of 4 ranks have 2.11" in str(one)
        assert len(one.faults) == 2


def test_a_rank_that_never_comes_is_named() -> None:
    def play(peers: Peers) -> None:
        if peers.place.rank != 1:
            joined._agree(peers, None, {})

    raised = meet(3, play, patience_s=0.5)
    assert "rank 1: " in str(raised[0])


def test_groups_of_two_nodes_have_pairs_across_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """World, prefixes by powers of two, and one rank a node: 0 and 4 of two nodes of four."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)

    groups = SimpleNamespace(new_group=lambda *_, **__: object())
    session: Any = SimpleNamespace(num_ranks=8, torch=SimpleNamespace(distributed=groups))
    assert [(group.ranks, group.num_nodes) for group in _groups(session)] == [
        (tuple(range(8)), 2), ((0, 1), 1), ((0, 1, 2, 3), 1), ((0, 4), 2)
    ]  # fmt: skip


def test_every_link_of_a_node_and_every_card_is_alone() -> None:
    """Two nodes of three ranks: each ordered pair of a node once, beside the same pair of the other node."""
    pairs = list(within_nodes(6, 3))
    assert sorted(one for sends in pairs for one in sends) == sorted(
        (first + a, first + b) for first in (0, 3) for a in range(3) for b in range(3) if a != b
    )
    assert all(len(sends) == 2 for sends in pairs)
    assert list(between_nodes(6, 3)) == [[(0, 3), (3, 0)], [(1, 4), (4, 1)], [(2, 5), (5, 2)]]
    assert next(iter(between_nodes(6, 2))) == [(0, 2), (2, 4), (4, 0)]
    assert not list(between_nodes(6, 6))
