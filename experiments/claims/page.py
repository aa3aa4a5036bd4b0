"""`docs/claims.md`: what became of each claim, and why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from .arithmetic import evaluate
from .bars import picture
from .claim import ABOUT, DOCUMENTS, FROM_FILE, Figure, shown, with_interval
from .verdicts import Settled, Verdict, met

HEAD: Final = """# Fifty claims, settled

Four documents stood at the beginning of this project: {documents}. They make some fifty claims with a figure. This page says which of them hold, by simulation: `python -m experiments.claims` runs every command below and writes it; nobody edits it. Each claim is a file of `experiments/claims/studies`.

A verdict follows from the figures by one rule. A claim says what its figures would be: a range, a least or a most; a single number counts as met within {about:.0%} of it, "none" as at most 1 %. A figure is *met* if its whole 90 % interval lies there, *missed* if none of it does. All met: **holds**. All those of a stated condition met: **holds if** it is so. One missed: **does not hold**. Otherwise, or where nothing that can be computed decides it: **not decidable**. Figures without an interval are counted, not estimated: bytes and calls of a plan. An interval of a figure made of several numbers takes the ends of each in every combination; ratios of two steps come from `compare`, which knows what both share. Where a figure can be worked out by hand, it was, and must agree.

Predictions are of the model in this repository; [accuracy](accuracy.md) says how far off it has been where it was measured. Commands are run in `experiments/claims`.

"""


def page(settled: Sequence[Settled]) -> str:
    """The whole page."""
    counts = Counter(one.verdict for one in settled)
    counts_text = ", ".join(f"{counts[verdict]} {_plural(verdict, counts[verdict])}" for verdict in Verdict)
    names = list(DOCUMENTS.values())
    lines = [HEAD.format(documents=", ".join(names[:-1]) + f" and {names[-1]}", about=ABOUT)]
    lines += [f"Of {len(settled)} claims, {counts_text}.\n\n"]
    lines += ["| claim | said | found | verdict |\n| --- | --- | --- | --- |\n", *map(_line, settled), "\n"]
    for document, name in DOCUMENTS.items():
        lines.append(f"## {name[0].upper()}{name[1:]}\n\n")
        lines += [section(one) for one in settled if one.claim.document == document]
    return "".join(lines).rstrip("\n") + "\n"


def _plural(verdict: Verdict, count: int) -> str:
    if count == 1:
        return {Verdict.HOLDS_IF: "holds under a condition", Verdict.OPEN: "is not decidable"}.get(
            verdict, str(verdict)
        )
    return {
        Verdict.HOLDS: "hold",
        Verdict.HOLDS_IF: "hold under a condition",
        Verdict.FAILS: "do not hold",
        Verdict.OPEN: "are not decidable",
    }[verdict]


def _line(one: Settled) -> str:
    first = next(iter(_decisive(one)), None)
    found = with_interval(one.numbers[first.name], first.unit) if first else "-"
    cells = (f"[{one.claim.title}](#{anchor(one.claim.title)})", one.claim.figure, found, one.words)
    return f"| {' | '.join(cells)} |\n"


def _decisive(one: Settled) -> Iterator[Figure]:
    """The figures that the verdict hangs on, then all others."""
    if one.verdict is Verdict.HOLDS_IF:
        yield from (figure for figure in one.claim.figures if figure.condition == one.why)
    own = [figure for figure in one.claim.figures if figure.decides and figure.condition is None]
    yield from sorted(own, key=lambda figure: bool(met(figure, one.numbers[figure.name])))
    yield from one.claim.figures


def anchor(title: str) -> str:
    """Of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def section(one: Settled) -> str:
    """What stands below the table on one claim."""
    claim = one.claim
    lines = [f"### {claim.title}\n\n"]
    why = f": {one.why}" if one.verdict in {Verdict.FAILS, Verdict.OPEN} else ""
    lines += [
        f"{claim.claim.strip()} Said: {claim.figure}.\n\n",
        f"**{one.words[0].upper()}{one.words[1:]}**{why}.\n\n",
    ]
    lines += [f"{claim.reading.strip()}\n\n"]
    if claim.figures:
        lines += ["| figure | found | claimed | by hand | |\n| --- | --- | --- | --- | --- |\n"]
        lines += [_row(one, figure) for figure in claim.figures] + ["\n"]
    if claim.plot:
        lines += [f"![{claim.title}](claims/{claim.id}.svg)\n\n"]
    lines += [f"By hand: {_sentence(claim.by_hand)}\n\n", f"What it takes: {_sentence(claim.holds_where)}\n\n"]
    lines += _code(f"shardwise {command}" for command in claim.commands.values())
    files = {name: text.partition(": ") for name, text in claim.values.items() if FROM_FILE.fullmatch(text)}
    lines += [
        f"- `{name}` {one.numbers[name].value:.4g}: `{file}`, `{key}`\n" for name, (file, _, key) in files.items()
    ]
    lines += [f"- `{name}` {number.value:.4g}: {number.source}\n" for name, number in claim.constants.items()]
    return "".join(lines).rstrip("\n") + "\n\n"


def _sentence(text: str) -> str:
    sentence = text.strip()
    return sentence[0].upper() + sentence[1:]


def _code(commands: Iterable[str]) -> list[str]:
    found = list(commands)
    return ["<!-- run by experiments/claims/commands.py -->\n```sh\n" + "\n".join(found) + "\n```\n\n"] if found else []


def _row(one: Settled, figure: Figure) -> str:
    number = one.numbers[figure.name]
    outcome = {True: "met", False: "missed", None: "open"}[met(figure, number)] if figure.decides else ""
    statement = f"{figure.says}, if {figure.condition}" if figure.condition else figure.says
    hand = shown(evaluate(figure.hand, one.numbers).value, figure.unit) if figure.hand else ""
    return f"| {statement} | {with_interval(number, figure.unit)} | {_claimed(figure)} | {hand} | {outcome} |\n"


def _claimed(figure: Figure) -> str:
    if not figure.decides:
        return ""
    low, high = (shown(limit, figure.unit) if abs(limit) != float("inf") else "" for limit in figure.limits)
    if low == high or figure.unit == "yes":
        return low or high
    return f"{low} to {high}" if low and high else f"at least {low}" if low else f"at most {high}"


def pictures(settled: Iterable[Settled]) -> dict[str, str]:
    """The pictures' files by name."""
    drawn = {}
    for one in settled:
        figures = [figure for figure in one.claim.figures if figure.name in one.claim.plot]
        if figures:
            numbers = [one.numbers[figure.name] for figure in figures]
            drawn[f"{one.claim.id}.svg"] = picture(one.claim.title, figures, numbers)
    return drawn
