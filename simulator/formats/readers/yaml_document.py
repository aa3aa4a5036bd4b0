"""YAML as plain data: safe tags only, no aliases, duplicate keys refused, bounded in size and depth."""

from __future__ import annotations

from typing import Any, Final

from simulator.base.errors import Fault, InputError, PlanError
from simulator.base.schema import refuse_long_numbers

MAX_BYTES: Final = 2**20
MAX_DEPTH: Final = 30


def read_yaml(text: str, file: str) -> dict[str, Any]:
    """The one document of a plan's file, a table. Raises PlanError with every fault."""
    data = yaml_document(text, file, PlanError)
    if not isinstance(data, dict):
        raise PlanError.at(file, "holds no table", "key: value")
    named: dict[str, Any] = _named(data)
    return named


def yaml_document(text: str, file: str, error: type[InputError]) -> Any:  # noqa: ANN401  YAML is any of its types
    """The one document of a file. Raises the error with every fault."""
    import yaml

    def refused(problem: str, line: int | None = None, remedy: str = "") -> InputError:
        return error.at(file if line is None else f"{file}:{line + 1}", problem, remedy)

    if len(text) > MAX_BYTES:
        raise refused(f"is larger than {MAX_BYTES:,} characters", remedy="such files have some kilobytes")
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's takes a tenth of the time
    depth = 0
    try:
        for event in yaml.parse(text, Loader=loader):
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                raise refused("anchors and aliases are not read", _line(event), "write the value out")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise refused(f"is nested deeper than {MAX_DEPTH} levels", _line(event))
        node = yaml.compose(text, Loader=loader)
        doubles = _doubles(node, yaml.MappingNode, yaml.SequenceNode, file)
        data = yaml.load(text, Loader=loader)  # noqa: S506  a safe one
        refuse_long_numbers(data)
    except yaml.MarkedYAMLError as exc:
        line = exc.problem_mark.line if exc.problem_mark else None
        raise refused(f"not YAML: {exc.problem or exc.context}", line) from None
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise refused(f"not YAML: {exc}") from None
    error.raise_for(doubles)
    return data


def _named(data: Any) -> Any:  # noqa: ANN401  plain data
    """The same with keys that are text at each depth: YAML also takes numbers, dates and null for keys."""
    if isinstance(data, dict):
        return {str(key): _named(value) for key, value in data.items()}
    return [_named(one) for one in data] if isinstance(data, list) else data


def _line(event: Any) -> int | None:  # noqa: ANN401  yaml's event classes
    return event.start_mark.line if event.start_mark else None


def _doubles(node: Any, mapping: type, sequence: type, file: str) -> list[Fault]:  # noqa: ANN401  yaml's node classes
    """Keys that stand twice in one table."""
    faults: list[Fault] = []
    todo = [node]
    while todo:
        here = todo.pop()
        if isinstance(here, mapping):
            seen: set[str] = set()
            for key, value in here.value:  # type: ignore[attr-defined]
                if str(key.value) in seen:
                    place = f"{file}:{key.start_mark.line + 1}"
                    faults.append(Fault(place=place, problem=f"key {key.value!r} appears twice", remedy="keep one"))
                seen.add(str(key.value))
                todo.append(value)
        elif isinstance(here, sequence):
            todo += here.value  # type: ignore[attr-defined]
    return faults
