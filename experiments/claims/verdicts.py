"""How a verdict follows from figures. Nobody types one.

A figure with limits is met where its whole 90 % interval lies within them, missed where none of it does, open otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from .arithmetic import Number, evaluate, exact
from .claim import Claim, Figure, shown, with_interval


class Verdict(StrEnum):
    """What became of a claim."""

    HOLDS = "holds"
    HOLDS_IF = "holds if"
    FAILS = "does not hold"
    OPEN = "not decidable"


@dataclass(frozen=True)
class Settled:
    """A claim with its figures and what follows from them. why: the condition of `holds if`, the reason of others."""

    claim: Claim
    numbers: Mapping[str, Number]
    verdict: Verdict
    why: str

    @property
    def words(self) -> str:
        """The verdict as a table says it."""
        return f"{self.verdict} {self.why}" if self.verdict is Verdict.HOLDS_IF else str(self.verdict)


def met(figure: Figure, number: Number) -> bool | None:
    """Whether the figure is what the claim says; None: the interval crosses a limit."""
    low, high = figure.limits
    if low <= number.low and number.high <= high:
        return True
    return False if number.high < low or high < number.low else None


def settle(claim: Claim, answers: Mapping[str, Number]) -> Settled:
    """The verdict on a claim whose values are `answers`.

    All figures met: holds. Else, all figures of one condition met: holds if. Else one missed: does not hold. Else not
    decidable, for the interval or for the reason that the claim's file gives. Raises ValueError where a figure is not what the arithmetic by hand says.
    """
    known = dict(answers) | {name: exact(one.value) for name, one in claim.constants.items()}
    for figure in claim.figures:
        known[figure.name] = evaluate(figure.formula, known)
        check_by_hand(claim, figure, known)
    verdict, why = _verdict(claim, {figure.name: met(figure, known[figure.name]) for figure in claim.figures}, known)
    return Settled(claim=claim, numbers=known, verdict=verdict, why=why)


def check_by_hand(claim: Claim, figure: Figure, known: Mapping[str, Number]) -> None:
    """Raises ValueError where the figure is farther from its arithmetic by hand than its file allows."""
    if figure.hand is None:
        return
    expected, found = evaluate(figure.hand, known).value, known[figure.name].value
    if abs(found - expected) > figure.hand_within * abs(expected):
        ours, hand = shown(found, figure.unit), shown(expected, figure.unit)
        raise ValueError(
            f"{claim.id}: {figure.name} is {ours}, by hand {hand}: more than {figure.hand_within:.0%} apart"
        )


def _verdict(claim: Claim, found: Mapping[str, bool | None], known: Mapping[str, Number]) -> tuple[Verdict, str]:
    deciding = [figure for figure in claim.figures if figure.decides]
    own = [figure for figure in deciding if figure.condition is None]
    if own and all(found[figure.name] for figure in own):
        return Verdict.HOLDS, "every figure is within what is claimed"
    for condition in dict.fromkeys(figure.condition for figure in deciding if figure.condition):
        if all(found[figure.name] for figure in deciding if figure.condition == condition):
            return Verdict.HOLDS_IF, condition
    if claim.undecidable:
        return Verdict.OPEN, claim.undecidable
    missed = [figure for figure in own if found[figure.name] is False]
    if missed:
        statements = (f"{figure.says}: {with_interval(known[figure.name], figure.unit)}" for figure in missed)
        return Verdict.FAILS, "; ".join(statements)
    crossed = ", ".join(figure.says for figure in own if found[figure.name] is None)
    return Verdict.OPEN, f"the interval reaches across what is claimed: {crossed}"
