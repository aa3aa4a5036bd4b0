"""`calibrate run --queue`: measure what waits for a GPU, most valuable first, on whatever GPU there is; and its page."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from pydantic import Field

from simulator.base.errors import Fault, InputError
from simulator.base.exit_codes import ExitCode
from simulator.base.schema import Strict, read_toml
from validate.gpus import ask, own_gpus
from validate.machine import count_gpus

FILE: Final = Path(__file__).with_name("queue.toml")
PARTIAL: Final = 5
_ARCHITECTURES: Final = {"7": "volta", "8": "ampere", "9": "hopper", "10": "blackwell", "12": "blackwell"}
_LEAST_MINUTES: Final = 2.0  # less measures next to nothing
_SPARE_MINUTES: Final = 1.0  # a command's own start and end, above its minutes


class Item(Strict):
    """One line of the queue. value: 1 comes first. commands: of the command line, with {minutes}, {folder} and {gpus}.

    libraries: what it needs beside torch, by the names that Python imports.
    """

    number: int = Field(ge=1)
    what: str
    why: str
    state: str
    gpus: int = Field(ge=1, default=1)
    architectures: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    value: int = Field(ge=1, default=9)
    minutes: float = Field(gt=0, default=8.0)
    commands: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """What there is to measure on."""

    count: int
    architecture: str
    name: str

    @classmethod
    def here(cls) -> Gpus:
        """Raises InputError where torch sees no GPU."""
        count = count_gpus()
        if not count:
            raise InputError(Fault(place="--queue", problem="torch sees no GPU here", remedy="a machine with one"))
        own = own_gpus()
        rows = ask("name,compute_cap", gpu=own[0] if own else None)
        name, capability = rows[0] if rows and len(rows[0]) == 2 else ("gpu", "")
        return cls(count=count, architecture=_ARCHITECTURES.get(capability.partition(".")[0], ""), name=name)


def items(path: Path = FILE) -> list[Item]:
    """The queue. Raises InputError with every fault of the file."""
    rows = read_toml(path, InputError).get("item", [])
    return [Item.parse(_tupled(row), f"{path.name}: item {index}", InputError) for index, row in enumerate(rows, 1)]


def _tupled(row: dict[str, object]) -> dict[str, object]:
    """TOML has lists where the record has tuples."""
    values = dict(row)
    for name in ("architectures", "commands", "libraries"):
        if isinstance(value := values.get(name), list):
            values[name] = tuple(tuple(one) if isinstance(one, list) else one for one in value)
    return values


def runnable(queue: Sequence[Item], there: Gpus) -> list[Item]:
    """What this machine can measure, most valuable first; items that one run covers stand once, by the first of them."""
    fit = [
        item
        for item in sorted(queue, key=lambda item: (item.value, item.number))
        if item.commands
        and item.gpus <= there.count
        and (not item.architectures or there.architecture in item.architectures)
    ]
    return list({item.commands: item for item in reversed(fit)}.values())[::-1]


def run_queue(
    folder: Path,
    minutes: float,
    there: Gpus,
    play: Callable[[Sequence[str]], int] | None = None,
    print_line: Callable[[str], None] = print,
) -> int:
    """Measure until everything is done or the minutes are over; what has been done before in `folder` is not done again.

    play: runs a command line and returns its exit code. Returns 0 where nothing is left, 5 where something is.
    """
    play, until = play or _play, time.monotonic() + 60 * minutes
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise InputError(
            Fault(f"--out {folder}", f"is no folder: {exc.strerror}", "a new one, or that of before")
        ) from None
    left: list[int] = []
    for item in runnable(items(), there):
        if missing := [name for name in item.libraries if find_spec(name) is None]:
            print_line(f"item {item.number} needs {', '.join(missing)}: install it, and the same command measures it")
            continue
        for index, command in enumerate(item.commands):
            done = folder / f"{item.number}-{index + 1}.done"
            allowed = min(item.minutes, (until - time.monotonic()) / 60 - _SPARE_MINUTES)
            if done.exists():
                continue
            if allowed < min(_LEAST_MINUTES, item.minutes):
                left.append(item.number)
                break
            print_line(f"item {item.number}: {item.what}")
            placeholders = {"minutes": f"{allowed:.3g}", "folder": str(folder), "gpus": str(there.count)}
            status = play([part.format(**placeholders) for part in command])
            if status == ExitCode.INTERRUPTED:
                return status
            if status != ExitCode.OK:
                print_line(f"item {item.number}: exit code {status}")
                left.append(item.number)
            else:
                done.write_text(json.dumps({"gpu": there.name, "command": list(command)}) + "\n", encoding="utf-8")
    if left:
        print_line(f"left: items {', '.join(map(str, dict.fromkeys(left)))}; the same command goes on")
    return PARTIAL if left else ExitCode.OK


def _play(command: Sequence[str]) -> int:
    return subprocess.run([sys.executable, "-P", "-m", "simulator.cli", *command], check=False).returncode  # noqa: S603  our own


# --- the page


def page(measured: Sequence[str]) -> str:
    """docs/gpu-queue.md. measured: folders of experiments/measured that describe themselves."""
    links = ", ".join(f"[{name}](../experiments/measured/{name}/README.md)" for name in measured)
    return "\n".join([*_lines(items()), "", f"Measured so far: {links}."]) + "\n"


def _lines(queue: Sequence[Item]) -> Iterator[str]:
    yield "# Measurements that need a GPU"
    yield ""
    yield "Made by `python experiments/gpu_queue.py` of `validate/queue.toml`. On a node with a GPU and nothing else running on it,"
    yield ""
    yield "<!-- not run: needs a GPU -->"
    yield "```sh"
    yield "shardwise calibrate run --queue --minutes 30 --out queue"
    yield "shardwise calibrate fit queue/samples.jsonl --cluster NAME -o mine.calibration.json    # no GPU needed"
    yield "```"
    yield ""
    yield (
        "works off every item that has commands, the most valuable first, on whatever GPU it finds, and ends within its minutes;"
        " started again with the same folder it goes on. Items that one run measures are done together. It needs only PyTorch and"
        " this package, refuses a GPU that is in use, and leaves no process behind."
    )
    yield ""
    yield "| # | what | why it matters | state | by `--queue` |"
    yield "| --- | --- | --- | --- | --- |"
    for item in queue:
        how = f"{item.value}., {item.minutes:g} min" if item.commands else "no command yet"
        how += f"; needs {', '.join(item.libraries)}" if item.libraries else ""
        yield f"| {item.number} | {item.what} | {item.why} | {item.state} | {how} |"
