"""Numbers given on the command line are numbers, and plans are values."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from simulator.cli import main, shardwise
from simulator.cli.finite import FiniteRange
from simulator.spec.plan import Plan


def _commands(group: click.Command, context: click.Context) -> Iterator[click.Command]:
    if not isinstance(group, click.Group):
        yield group
        return
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        yield from _commands(found, context)


def test_no_option_takes_a_float_that_may_be_none() -> None:
    """click's FloatRange and FLOAT let `nan` through."""
    loose = [
        f"{command.name} {option.name}"
        for command in _commands(shardwise, click.Context(shardwise))
        for option in command.params
        if isinstance(option.type, click.FloatRange | type(click.FLOAT)) and not isinstance(option.type, FiniteRange)
    ]
    assert loose == []


@pytest.mark.parametrize("word", ["nan", "inf", "-inf"])
def test_what_is_no_number_is_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collective", "all_reduce", "--cluster", "hgx-h100-8", "--factor", word]) == 2
    assert "--factor" in capsys.readouterr().err


def test_plans_can_be_keys() -> None:
    one, other = Plan(), Plan().copy_with(compress={"activations": 2.0})
    assert len({one, Plan(), other, Plan().copy_with(compress={"activations": 2.0})}) == 2
