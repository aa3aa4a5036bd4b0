"""Capture files: gzip of one JSON object; `simulator.work.captured.capture` says what each key means."""

from __future__ import annotations

import ast
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Final, Literal

from simulator.base.errors import Fault, InputError
from simulator.base.files import ordinary
from simulator.base.schema import more_than_once, parse_toml
from simulator.memory.tape import CATEGORIES
from simulator.work.captured.capture import ARITY, HOST, Capture, Kind, Phase
from simulator.work.captured.cost import KernelCost
from simulator.work.captured.folding import TOKEN_VALUES, unfolded

VERSION: Final = 2  # version 1 had one rank, beside the tables
_KEYS: Final = {
    "target": str, "torch": str, "world_size": int, "gpus_per_node": int, "device": str,
    "signatures": list, "names": list, "groups": list, "ranks": list,
}  # fmt: skip
_RANK: Final = {"rank": int, "steady": int, "categories": dict, "answers": dict, "events": list}
_OF_SIGNATURE: Final = 3  # name, arguments, results
_OF_TENSOR: Final = 4  # "T", dtype, shape, strides
_MOST_SIZE: Final = 2**48  # of a dim
_DIGITS: Final = 20  # of a storage's number
_GZIP: Final = b"\x1f\x8b"
_WHOLE: Final = {int}
_MOST_BYTES: Final = 2**29  # unpacked
_LONGEST_SCRIPT: Final = 2**20  # that is not called .py
_ALLOCATE: Final = int(Kind.ALLOCATE)
_FREE: Final = int(Kind.FREE)
_AGAIN: Final = "capture the program again"


def kind_of(path: Path) -> Literal["packed", "script", "other"]:
    """The kind of a file: gzipped (a capture), Python source, or other (a study).

    A study with a mistake must never run as Python, of which `name = word` is: so that a file is a script without being
    called one, it has to import or define something. What cannot be read is what its name says.
    """
    try:
        data = ordinary(path).read_bytes()
    except OSError:
        return {".gz": "packed", ".py": "script"}.get(path.suffix, "other")  # type: ignore[return-value]
    if data.startswith(_GZIP):
        return "packed"
    try:
        parse_toml(data.decode())
    except UnicodeDecodeError:
        return "other"
    except (ValueError, RecursionError):
        return "script" if path.suffix == ".py" or (path.suffix != ".toml" and _is_python(data.decode())) else "other"
    return "other"


def _is_python(text: str) -> bool:
    if len(text) > _LONGEST_SCRIPT:  # Python's tree of a text takes some 400 times its bytes
        return False
    try:
        found = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(one, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef) for one in found)


def read_capture(path: Path) -> Capture:
    """A capture file. Raises InputError where it is none, ends early, or contradicts itself."""
    try:
        with gzip.open(ordinary(path), "rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES:,} bytes unpacked")  # noqa: TRY301
        data = json.loads(text)
    except FileNotFoundError:
        raise InputError.at(str(path), "no such file", "shardwise capture writes one") from None
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as exc:
        raise InputError.at(str(path), f"no capture: {exc}", "shardwise capture writes one") from None
    return capture_of(data, str(path))


def capture_of(data: Any, place: str) -> Capture:  # noqa: ANN401  whatever JSON holds
    """Build a Capture from the file's JSON. Raises InputError with every fault."""
    if not isinstance(data, dict) or data.get("format") != "shardwise capture":
        raise InputError.at(place, "no capture", "shardwise capture writes one")
    if data.get("version") not in (1, VERSION):
        raise InputError.at(place, f"version {data.get('version')} of captures; this release reads {VERSION}", _AGAIN)
    if data["version"] == 1:
        data = {**data, "ranks": [{name: data[name] for name in (*_RANK, "host") if name in data}]}
    _check_keys(data, _KEYS, place)
    if is_folded := "tokens" in data:
        data = _unfolded(data, place)
    _check_signatures(data["signatures"], f"{place}: signatures")
    if wrong := [number for number, name in enumerate(data["names"]) if not isinstance(name, str)]:
        raise InputError.at(f"{place}: names.{wrong[0]}", "is no text", _AGAIN)
    if wrong := [number for number, group in enumerate(data["groups"]) if not _is_group(group)]:
        raise InputError.at(f"{place}: groups.{wrong[0]}", "is no list of ranks", _AGAIN)
    for one in data["ranks"]:
        _check_keys(one, _RANK, f"{place}: ranks")
        _check_host(one, f"{place}: rank {one['rank']}: host")
        if not is_folded:
            _check_categories(one["categories"], f"{place}: rank {one['rank']}: categories")
            _check_events(data, one["events"], f"{place}: rank {one['rank']}")
    if not data["ranks"]:
        raise InputError.at(f"{place}: ranks", "there are none", _AGAIN)
    head = {key: data[key] for key in ("target", "torch", "world_size", "gpus_per_node", "device", "names")}
    head |= {name: [tuple(one) for one in data[name]] for name in ("signatures", "groups")}
    head |= {"costs": _costs(data, place), "tokens_per_step": _tokens(data, place)}
    first, *others = (_of_rank(head, one) for one in data["ranks"])
    return replace(first, others=tuple(others))


def _unfolded(data: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """With every event; what its few tokens mean is looked at, and not each event again."""
    try:
        _check_tokens(data, place)
        return unfolded(data)
    except (ValueError, TypeError, LookupError, AttributeError) as exc:
        raise InputError.at(f"{place}: tokens", f"no events: {exc}", _AGAIN) from None


def _of_rank(head: Mapping[str, Any], one: Mapping[str, Any]) -> Capture:
    categories = {int(storage): name for storage, name in one["categories"].items()}
    host = {Phase[phase.upper()]: tuple(counts) for phase, counts in one.get("host", {}).items()}
    return Capture(**head, **{**{name: one[name] for name in _RANK}, "categories": categories, "host": host})


def _is_group(found: object) -> bool:
    """Ranks, each once: one that stands twice lies no step from itself."""
    return (
        isinstance(found, list) and all(type(rank) is int and rank >= 0 for rank in found) and not more_than_once(found)
    )


def _check_signatures(found: list[Any], place: str) -> None:
    faults = [
        Fault(f"{place}.{number}", "no [namespace.operator, arguments, results]", _AGAIN)
        for number, one in enumerate(found)
        if not (isinstance(one, list) and len(one) == _OF_SIGNATURE and isinstance(one[0], str) and "." in one[0])
    ]
    faults = faults or [
        Fault(f"{place}.{number}", f"{str(one)[:60]}: no tensor of this dtype, shape, strides", _AGAIN)
        for number, signature in enumerate(found)
        for one in _tensors(signature[1:])
        if not (isinstance(one[1], str) and _sizes(one[2]) and (one[3] is None or _sizes(one[3], len(one[2]))))
    ]
    InputError.raise_for(faults)


def _tensors(value: list[Any]) -> Iterator[list[Any]]:
    """Decode the tensors in the arguments and results of an operator."""
    left = [value]
    while left:
        one = left.pop()
        if len(one) >= _OF_TENSOR and one[0] == "T":
            yield one
        else:
            left += [each for each in one if isinstance(each, list)]


def _sizes(found: object, count: int | None = None) -> bool:
    return (
        isinstance(found, list)
        and count in (None, len(found))
        and all(type(one) is int and 0 <= one <= _MOST_SIZE for one in found)
        and prod(found) <= _MOST_SIZE**2
    )


def _check_categories(found: object, place: str) -> None:
    names = found.items() if isinstance(found, dict) else [("", found)]
    for storage, name in names:
        if not (str(storage).isdecimal() and len(str(storage)) < _DIGITS and name in CATEGORIES):
            raise InputError.at(place, f"{storage!r}: {name!r} is no storage's number and what it holds", _AGAIN)


def _check_host(one: Mapping[str, Any], place: str) -> None:
    found = one.get("host", {})
    counts = found.items() if isinstance(found, dict) else [("", found)]
    faults = [
        Fault(f"{place}.{phase}", f"{numbers!r} is no {len(HOST)} counts of a phase", _AGAIN)
        for phase, numbers in counts
        if phase.upper() not in Phase.__members__
        or type(numbers) is not list
        or len(numbers) != len(HOST)
        or any(type(number) is not int or number < 0 for number in numbers)
    ]
    InputError.raise_for(faults)


def _costs(data: Mapping[str, Any], place: str) -> dict[int, KernelCost]:
    """Costs annotated by authors of operators; absent in files without any."""
    costs = data.get("costs", {})
    found: dict[int, KernelCost] = {}
    for number, one in costs.items() if isinstance(costs, dict) else [("", costs)]:
        try:
            found[range(len(data["signatures"]))[int(number)]] = KernelCost(**one)
        except (TypeError, ValueError, IndexError) as exc:
            raise InputError.at(f"{place}: costs.{number}", str(exc), _AGAIN) from None
    return found


def _tokens(data: Mapping[str, Any], place: str) -> int:
    tokens = data.get("tokens_per_step", 0)
    if type(tokens) is not int or tokens < 0:
        raise InputError.at(f"{place}: tokens_per_step", f"{tokens!r} is no number of tokens", _AGAIN)
    return tokens


def _check_keys(data: Any, keys: Mapping[str, type], place: str) -> None:  # noqa: ANN401  whatever JSON holds
    found = data if isinstance(data, dict) else {}
    faults = [
        Fault(f"{place}: {key}", f"is no {kind.__name__}", _AGAIN)
        for key, kind in keys.items()
        if type(found.get(key)) is not kind
    ]
    InputError.raise_for(faults)


def _check_events(data: Mapping[str, Any], events: list[Any], place: str) -> None:
    """Every event has its values, and every number in it means something."""
    alive = set[int]()
    sizes = {name: len(data[name]) for name in ("signatures", "names", "groups")}
    _check_rows(events, ARITY, lambda event: _known(event, sizes, alive), f"{place}: events")


def _check_tokens(data: Mapping[str, Any], place: str) -> None:
    """Every token is one, and what it names exists."""
    if wrong := [name for name in data["kinds"] if name not in CATEGORIES]:
        raise InputError.at(f"{place}: kinds", f"{wrong[0]!r} is nothing that a storage holds", _AGAIN)
    sizes = {name: len(data[name]) for name in ("signatures", "names", "groups", "kinds")}
    _check_rows(data["tokens"], TOKEN_VALUES, lambda token: _means(token, sizes), f"{place}: tokens")


def _check_rows(rows: list[Any], arity: Mapping[Any, int], means: Callable[[list[int]], bool], place: str) -> None:
    for index, row in enumerate(rows):
        whole = type(row) is list and set(map(type, row)) == _WHOLE
        if not whole or arity.get(row[0]) != len(row) - 1 or not means(row):
            raise InputError.at(f"{place}[{index}]", f"{row!r} is no event", _AGAIN)


def _means(token: list[int], sizes: Mapping[str, int]) -> bool:
    """What a token names exists; of storages, those that are alive are known when it is unfolded."""
    match token:
        case [Kind.OPERATOR, signature, _, path, _, phase]:
            return 0 <= signature < sizes["signatures"] and 0 <= path < sizes["names"] and phase in (0, 1, 2)
        case [Kind.COLLECTIVE, _, path, _, group, size, _]:
            return 0 <= path < sizes["names"] and 0 <= group < sizes["groups"] and size >= 0
        case [Kind.ALLOCATE, again, _, category, size, _]:
            return again in (0, 1) and 0 <= category < sizes["kinds"] and size > 0
        case [Kind.FREE | Kind.RECORD_STREAM, category, newer, *_]:
            return 0 <= category < sizes["kinds"] and newer >= 0
        case _:
            return _known(token, sizes, set())


def _known(event: list[int], sizes: Mapping[str, int], alive: set[int]) -> bool:
    """Check that what an event names exists. alive: storages that have begun and not ended."""
    kind = event[0]
    if kind == _ALLOCATE:
        begins = event[1] not in alive and event[2] > 0
        alive.add(event[1])
        return begins
    if kind == _FREE:
        ends = event[1] in alive
        alive.discard(event[1])
        return ends
    match event:
        case [Kind.OPERATOR, signature, _, module, phase]:
            return 0 <= signature < sizes["signatures"] and 0 <= module < sizes["names"] and phase in (0, 1, 2)
        case [Kind.COLLECTIVE, _, kind, group, size, _]:
            return 0 <= kind < sizes["names"] and 0 <= group < sizes["groups"] and size >= 0
        case [Kind.MESSAGE, _, way, group, peer, size, _, _]:
            return way in (0, 1) and 0 <= group < sizes["groups"] and peer >= 0 and size >= 0
        case _:
            return True
