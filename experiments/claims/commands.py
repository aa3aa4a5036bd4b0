"""The commands of claims: run inside this process or on several, and what is kept of their JSON."""

from __future__ import annotations

import io
import json
import shlex
import sys
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout
from fnmatch import fnmatchcase
from typing import Any, Final

from simulator.base.exit_codes import ExitCode
from simulator.base.processes import mapped
from simulator.base.units import parse_bytes, parse_bytes_per_s, parse_seconds
from simulator.cli import main as shardwise

from .arithmetic import Number, exact
from .claim import FROM_FILE, HERE, READING, ROOT, Claim

Answers = dict[str, dict[str, float]]  # command -> path -> what its JSON holds there
EXIT_CODE: Final = "exit_code"  # read instead of JSON: whether a command is refused
NAMES: Final = ("policy", "name", "kind", "axis", "cause")  # what an entry of a list goes by
DIGITS: Final = 9  # that answers are kept with


def asked(claims: Iterable[Claim]) -> dict[str, list[str]]:
    """Every command once, with the paths that claims read of its answer."""
    wanted: dict[str, set[str]] = {}
    for claim in claims:
        for reading in filter(None, map(READING.fullmatch, claim.values.values())):
            paths = (reading[key] for key in ("path", "low", "high"))
            wanted.setdefault(claim.commands[reading["run"]], set()).update(filter(None, paths))
    return {command: sorted(wanted[command]) for command in sorted(wanted)}


def answer(command: str) -> Any:  # noqa: ANN401  whatever the command's JSON is
    """The JSON of a command, run in this process with relative paths in this folder. Raises ValueError if it failed."""
    code, out, err = _run(command)
    if code not in {ExitCode.OK, ExitCode.DOES_NOT_FIT}:
        raise ValueError(f"shardwise {command}: exit code {code}\n{err}")
    return json.loads(out)


def _run(command: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with chdir(HERE), redirect_stdout(out), redirect_stderr(err):
        code = shardwise([*shlex.split(command), "--json"])
    return code, out.getvalue(), err.getvalue()


def read(found: Any, path: str) -> float | None:  # noqa: ANN401  any JSON
    """The number at `path` (`memory.used_bytes`, `rows[0].time_s`, `policies[native].calls_s`; `*` sums). None: not there."""
    if not path:
        return float(found) if isinstance(found, bool | int | float) else None
    head, _, rest = path.partition(".")
    name, bracket, index = head.partition("[")
    if "*" in name:
        parts = [read(found[key], rest) for key in found if fnmatchcase(key, name)]
        return sum(filter(None, parts))
    inner = found.get(name) if isinstance(found, dict) else None
    if inner is not None and bracket:
        inner = _entry(inner, index.removesuffix("]"))
    return None if inner is None else read(inner, rest)


def _entry(entries: list[Any], index: str) -> Any:  # noqa: ANN401  any JSON
    if index.lstrip("-").isdigit():
        return entries[int(index)]
    return next((one for one in entries if index in {str(one.get(key)).replace(" ", "_") for key in NAMES}), None)


def kept(command: str, paths: Iterable[str]) -> dict[str, float]:
    """What the paths hold now, to nine digits; those that are absent are left out."""
    if EXIT_CODE in paths:
        return {EXIT_CODE: float(_run(command)[0])}
    found = answer(command)
    numbers = {path: read(found, path) for path in paths}
    return {path: float(f"{number:.{DIGITS}g}") for path, number in numbers.items() if number is not None}


def run_all(wanted: Mapping[str, list[str]], jobs: int) -> Answers:
    """Answers of all commands, on so many processes; progress on stderr."""
    done: Answers = {}
    for found in mapped(_named, list(wanted.items()), jobs, chunk=1):
        done |= found
        print(f"claims: {len(done)} of {len(wanted)}  shardwise {next(iter(found))}"[:150], file=sys.stderr, flush=True)
    return done


def _named(asks: tuple[str, list[str]]) -> Answers:
    command, paths = asks
    return {command: kept(command, paths)}


def values(claim: Claim, answers: Mapping[str, Mapping[str, float]]) -> dict[str, Number]:
    """The claim's values. Raises ValueError for a command without an answer, or a path that the answer lacks."""
    found: dict[str, Number] = {}
    for name, text in claim.values.items():
        if in_file := FROM_FILE.fullmatch(text):
            found[name] = exact(_in_file(in_file["file"], in_file["path"]))
            continue
        reading = READING.fullmatch(text)
        assert reading is not None
        of = answers.get(claim.commands[reading["run"]])
        if of is None:
            raise ValueError(f"{claim.id}: no answer yet of: shardwise {claim.commands[reading['run']]}")
        middle = of.get(reading["path"], 0.0 if reading["absent"] else None)
        low, high = (of.get(reading[key]) if reading[key] else middle for key in ("low", "high"))
        if middle is None or low is None or high is None:
            raise ValueError(f"{claim.id}: values.{name}: the answer has no {text}")
        found[name] = Number(middle, low, high)
    return found


def _in_file(file: str, path: str) -> float:
    """A quantity of a data file, in SI units."""
    found: Any = tomllib.loads((ROOT / file).read_text(encoding="utf-8"))
    for key in path.split("."):
        found = found[key]
    parse = {"_bytes": parse_bytes, "_per_s": parse_bytes_per_s, "_latency_s": parse_seconds}
    return float(next((parse[end](found) for end in parse if path.endswith(end) and isinstance(found, str)), found))
