from __future__ import annotations

from fractions import Fraction

import pytest
from simpy import Environment, Event

from simulator.base.errors import EngineError
from simulator.play.links import Network, fair_rates
from simulator.work.program import Number


def _watched(env: Environment, log: list[tuple[str, Number]], name: str) -> Event:
    done = Event(env)
    assert done.callbacks is not None
    done.callbacks.append(lambda _: log.append((name, env.now)))
    return done


def test_flows_on_one_link_get_equal_bytes_whatever_their_sizes() -> None:
    rates = fair_rates([{"l": 3}, {"l": 12}], {"l": Fraction(6)})
    assert [rate * size for rate, size in zip(rates, (3, 12), strict=True)] == [3, 3]


def test_share_bytes_weigh_flows_that_stand_for_several_ranks() -> None:
    # Two ranks with 5 bytes each, folded into one flow of 10, beside one rank with 5: a third of the link a rank.
    folded = fair_rates([{"l": 10}, {"l": 5}], {"l": Fraction(6)}, [5, 5])
    unfolded = fair_rates([{"l": 5}, {"l": 5}, {"l": 5}], {"l": Fraction(6)})
    assert folded == [unfolded[0], unfolded[2]]


def test_integers_divide_exactly() -> None:
    assert fair_rates([{"l": 3}, {"l": 3}, {"l": 3}], {"l": 1}) == [Fraction(1, 9)] * 3


def test_floats_stay_floats() -> None:
    assert isinstance(fair_rates([{"l": 3}], {"l": 2.0})[0], float)


def test_flows_that_end_together_end_in_the_order_of_their_starts() -> None:
    env = Environment()
    network, log = Network(env, {"l": 4}), list[tuple[str, Number]]()
    for name in ("b", "a", "c"):
        network.start({"l": 4}, 4, _watched(env, log, name))
    env.run()
    assert log == [("b", 3), ("a", 3), ("c", 3)]


def test_a_flow_without_bytes_ends_at_once() -> None:
    env = Environment()
    network, log = Network(env, {"l": 4}), list[tuple[str, Number]]()
    assert network.start({"l": 0}, 0, _watched(env, log, "nothing")) == 0
    assert network.start({"l": 8}, 8, _watched(env, log, "something")) == 2
    env.run()
    assert log == [("nothing", 0), ("something", 2)]


def test_rates_rise_when_another_flow_ends() -> None:
    env = Environment()
    network, log = Network(env, {"x": 2, "y": 2}), list[tuple[str, Number]]()
    network.start({"x": 2}, 2, _watched(env, log, "short"))
    network.start({"x": 4, "y": 1}, 4, _watched(env, log, "long"))
    env.run()
    assert log == [("short", 2), ("long", 3)]


def test_a_link_without_capacity_is_named() -> None:
    env = Environment()
    with pytest.raises(EngineError, match="link nic; known: intra"):
        Network(env, {"intra": 1}).start({"nic": 1}, 1, Event(env))
