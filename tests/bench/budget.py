"""How large the project is and how quick its engine, beside what it may be. Run: python tests/bench/budget.py

A budget that is seen holds. Lines are lines of files, comments and blank ones included; a function's are those from `def`
to its end. The engine's speed depends on the machine, so it is shown and fails nothing.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final

from bench_engine import seconds, sharded_step
from simpy import Environment

from simulator.play.engine import run

ROOT: Final = Path(__file__).resolve().parents[2]
BUDGET: Final[Mapping[str, int]] = {  # lines of each room
    "cli": 2500,
    "formats": 10_000,
    "studies": 12_000,
    "predict": 1900,
    "play": 3000,
    "memory": 3500,
    "work": 7500,
    "parallel": 1600,
    "spec": 7000,
    "base": 1000,
}
TOTAL: Final = 50_000  # lines of simulator/
FAILS_OVER: Final[int | None] = 96_200  # lines of simulator/ from which on this is an error; None: they are only shown
SHORT: Final = 20  # lines of a short function: nine in ten are meant to be
EVENTS_PER_S: Final = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Files of one folder. largest: lines and name of its largest file. functions: lines of each function."""

    name: str
    lines: int
    largest: tuple[int, str]
    functions: tuple[int, ...]

    @property
    def short(self) -> float:
        """Share of functions that are short."""
        return sum(length <= SHORT for length in self.functions) / max(len(self.functions), 1)


def room(name: str, files: Iterable[Path], under: Path) -> Room:
    """A folder, counted."""
    texts = {path: path.read_text() for path in files}
    sizes = {path: len(text.splitlines()) for path, text in texts.items()}
    largest = max(sizes, key=lambda path: (sizes[path], str(path)))
    return Room(
        name=name,
        lines=sum(sizes.values()),
        largest=(sizes[largest], str(largest.relative_to(under))),
        functions=tuple(length for text in texts.values() for length in _functions(text)),
    )


@cache
def _functions(text: str) -> tuple[int, ...]:
    return tuple(
        node.end_lineno - node.lineno + 1
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    )


def rooms() -> list[Room]:
    """Those of simulator/, in the order of its layers."""
    folder = ROOT / "simulator"
    return [room(name, sorted((folder / name).rglob("*.py")), folder) for name in BUDGET]


def table(found: Iterable[Room], total: Room) -> str:
    """A row a room."""
    lines = [f"{'':<10}{'lines':>8}{'budget':>8}{'':>8}  {'short functions':>15}  largest file"]
    for one in (*found, total):
        budget = BUDGET.get(one.name, TOTAL)
        over = f"{one.lines - budget:+,}" if one.lines > budget else ""
        size, name = one.largest
        lines.append(
            f"{one.name:<10}{one.lines:>8,}{budget:>8,}{over:>8}  {one.short:>15.1%}  {size:>4} {name}".rstrip()
        )
    return "\n".join(lines)


def events_per_s() -> float:
    """SimPy's events that the engine handles in a second of a step of 80 layers and 14 micro-batches."""
    program = sharded_step(80, 14, interference=0.05)
    return _num_events(partial(run, [program])) / seconds(partial(run, [program]))


def _num_events(work: partial[object]) -> int:
    count, step = 0, Environment.step

    def counted(env: Environment) -> None:
        nonlocal count
        count += 1
        step(env)

    Environment.step = counted  # type: ignore[method-assign]
    try:
        work()
    finally:
        Environment.step = step  # type: ignore[method-assign]
    return count


def main() -> int:
    """Show all of it; 1 where a limit that is in force is exceeded."""
    total = room("simulator", sorted((ROOT / "simulator").rglob("*.py")), ROOT / "simulator")
    shown = [
        table(rooms(), total),
        f"short: at most {SHORT} lines, meant to be nine in ten",
        f"engine: {events_per_s():,.0f} events/s, budget {EVENTS_PER_S:,} (shown only: it depends on the machine)",
    ]
    exceeded = FAILS_OVER is not None and total.lines > FAILS_OVER
    if exceeded:
        shown.append(f"simulator/ has {total.lines:,} lines; at most {FAILS_OVER:,} pass")
    sys.stdout.write("\n".join(shown) + "\n")
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main())
