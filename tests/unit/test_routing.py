import itertools

import pytest

from simulator.spec.cluster.routing import Link, components, shortest_route


def link(src: str, dst: str, bytes_per_s: float = 1.0, kind: str = "nvlink2") -> Link:
    return Link(kind=kind, src=src, dst=dst, bytes_per_s=bytes_per_s)


def hops(route: tuple[Link, ...] | None) -> list[str] | None:
    return None if route is None else [one.dst for one in route]


def test_a_link_is_one_way() -> None:
    assert hops(shortest_route([link("a", "b")], "a", "b")) == ["b"]
    assert shortest_route([link("a", "b")], "b", "a") is None


def test_nothing_lies_between_a_place_and_itself() -> None:
    assert shortest_route([link("a", "b")], "a", "a") == ()


def test_fewest_hops_then_the_fastest_bottleneck_then_the_name() -> None:
    links = [link("a", "x", 5), link("x", "b", 1), link("a", "y", 2), link("y", "b", 2), link("a", "p", 9)]
    long = [link("p", "q", 9), link("q", "b", 9)]
    assert hops(shortest_route([*links, *long], "a", "b")) == ["y", "b"]
    equal = [link("a", "y"), link("y", "b"), link("a", "x"), link("x", "b")]
    assert hops(shortest_route(equal, "a", "b")) == ["x", "b"]


@pytest.mark.parametrize(("relays", "through_host"), [(1, False), (2, True)])
def test_one_relay_beats_the_host_and_two_do_not(relays: int, *, through_host: bool) -> None:
    stops = ["a", *(f"relay{i}" for i in range(relays)), "b"]
    chain = [link(src, dst) for src, dst in itertools.pairwise(stops)]
    host = [link("a", "host", 100, "pcie5"), link("host", "b", 100, "pcie5")]
    found = hops(shortest_route([*chain, *host], "a", "b"))
    assert found == (["host", "b"] if through_host else stops[1:])


def test_components_are_sorted_sets() -> None:
    assert components(6, [(4, 1), (5, 4), (0, 3)]) == ((0, 3), (1, 4, 5), (2,))
