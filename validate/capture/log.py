"""Log: what a program does, in the order in which its host does it, as the capture file keeps it.

Events are lists of whole numbers; `simulator.work.captured.capture` says what each means. Equal operators are written once.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import asdict
from typing import Any

from simulator.work.captured.capture import HOST, Kind, Phase
from simulator.work.captured.cost import COSTS, KernelCost

Signature = tuple[Hashable, ...]
PRODUCTS = {f"aten.{name}" for name in ("mm.default", "addmm.default", "bmm.default", "baddbmm.default", "linear.default", "mm.out")}  # fmt: skip
_ALIKE = 8  # answers that differ in numbers alone, from which on they are told as one
_WHOLE = re.compile(r"(?<![\w.])\d[\d,]*(?![\w.])")


class Log:
    """Events of all steps; operators, collectives and streams only while `detailed`. Storages are followed throughout.

    Of the operators before that, the first product of a forward and of a backward are kept: a thread's first one takes
    cuBLAS's workspace.
    """

    def __init__(self) -> None:
        self.events: list[list[int]] = []
        self.signatures: dict[Signature, int] = {}
        self.names: dict[str, int] = {}
        self.groups: dict[tuple[int, ...], int] = {}
        self.categories: dict[int, str] = {}
        self.answers: dict[str, int] = {}
        self.costs: dict[int, KernelCost] = {}
        self.detailed = False
        self.counts_host = True
        self.closed = False  # the recorded step is over: what dies with the program is no part of it
        self.phase = Phase.FORWARD
        self._multiply = {Phase.FORWARD, Phase.BACKWARD}  # which no product was seen of
        self.host: dict[Phase, list[int]] = {phase: [0] * len(HOST) for phase in Phase}

    def add(self, kind: Kind, *values: int) -> None:
        """An event as it stands."""
        if self.closed:
            return
        self.events.append([kind, *values])

    def writes(self, *, product: bool) -> bool:
        """Whether the operator that runs is kept."""
        if product and self.phase in self._multiply:
            self._multiply.remove(self.phase)
            return True
        return self.detailed

    def handled(self, handle: int, phase: Phase, count: int = 1) -> None:
        """The host did something of `HOST` that launches nothing."""
        if self.detailed and self.counts_host and not self.closed:
            self.host[phase][handle] += count

    def signature(self, one: Signature) -> int:
        """The number of an operator's signature."""
        return self.signatures.setdefault(one, len(self.signatures))

    def name(self, text: str) -> int:
        """The number of a module's path or of a collective's kind."""
        return self.names.setdefault(text, len(self.names))

    def group(self, ranks: tuple[int, ...]) -> int:
        """The number of a process group."""
        return self.groups.setdefault(ranks, len(self.groups))

    def answer(self, question: str) -> int:
        """Something that only a real run knows was answered: what; how often by now."""
        count = self.answers[question] = self.answers.get(question, 0) + 1
        return count

    def as_json(self) -> dict[str, Any]:
        """What the file keeps of it."""
        return {
            "signatures": [list(one) for one in self.signatures],
            "names": list(self.names),
            "groups": [list(one) for one in self.groups],
            "categories": {str(storage): name for storage, name in sorted(self.categories.items())},
            "answers": dict(sorted(_together(self.answers).items())),
            **({"costs": {str(number): asdict(one) for number, one in self.costs.items()}} if self.costs else {}),
            "host": {phase.name.lower(): counts for phase, counts in self.host.items() if any(counts)},
            "events": self.events,
        }


def _together(answers: Mapping[str, int]) -> dict[str, int]:
    """With one answer, from the least number to the most, in place of many that differ in numbers alone."""
    alike = defaultdict[str, list[str]](list)
    for text in answers:
        alike[_WHOLE.sub("#", text)].append(text)
    found: dict[str, int] = {}
    for texts in alike.values():
        if len(texts) < _ALIKE:
            found |= {text: answers[text] for text in texts}
            continue
        numbers = zip(*([int(one.replace(",", "")) for one in _WHOLE.findall(text)] for text in texts), strict=True)
        ends = [f"{min(each):,} to {max(each):,}" if min(each) < max(each) else f"{each[0]:,}" for each in numbers]
        told = "".join(map("".join, zip(_WHOLE.split(texts[0]), [*ends, ""], strict=True)))
        found[told] = sum(answers[text] for text in texts)
    return found


def cost_of(operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> KernelCost | None:
    """The annotated cost of a call; None if there is none. operator: as torch prints it, `mylib.swiglu.default`.

    Raises ValueError, in one line, where the user's function fails.
    """
    space, _, rest = operator.partition(".")
    name, _, overload = rest.partition(".")
    cost = COSTS.get(f"{space}::{name}.{overload}") or COSTS.get(f"{space}::{name}")
    if cost is None:
        return None
    try:
        found: object = cost(*args, **kwargs)
    except Exception as exc:
        msg = f"kernel_cost of {space}::{name} raised {type(exc).__name__}: {exc}"
        raise ValueError(msg) from exc
    if isinstance(found, KernelCost):
        return found
    msg = f"kernel_cost of {space}::{name} returned {type(found).__name__}, and must return a KernelCost"
    raise ValueError(msg)
