"""Calls from Python: unknown keyword arguments and values of the wrong type are one error that lists them all."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, wraps
from types import UnionType
from typing import Any, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from simulator.base.errors import ArgumentError, Fault
from simulator.base.schema import nearest
from simulator.base.value_errors import close_names, shown

P = ParamSpec("P")
R = TypeVar("R")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which raises ArgumentError before anything else if it is called with arguments that it cannot take.

    A value is judged where its annotation is a class of this project, or one of several; the function judges the rest.
    """
    signature = inspect.signature(function)
    required = [name for name, one in signature.parameters.items() if one.default is one.empty]

    @cache
    def kinds() -> Mapping[str, tuple[type, ...]]:
        hints = get_type_hints(function)
        return {name: found for name in signature.parameters if (found := _classes(hints.get(name)))}

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given = {**dict(zip(signature.parameters, args, strict=False)), **kwargs}
        unknown = [name for name in kwargs if name not in signature.parameters]
        faults = [*_unknown(function.__name__, unknown, signature), *_wrong(function.__name__, given, kinds())]
        if faults:
            absent = [name for name in required if name not in given and not close_names(name, unknown)]
            missing = (Fault(place=f"{function.__name__}({name}=)", problem="is missing") for name in absent)
            raise ArgumentError([*faults, *missing])
        return function(*args, **kwargs)

    return call


def _unknown(called: str, unknown: Iterable[str], signature: inspect.Signature) -> Iterator[Fault]:
    for name in unknown:
        yield Fault(place=f"{called}({name}=)", problem="unknown argument", remedy=nearest(name, signature.parameters))


def _wrong(called: str, given: Mapping[str, object], kinds: Mapping[str, tuple[type, ...]]) -> Iterator[Fault]:
    for name, classes in kinds.items():
        if name in given and not isinstance(given[name], classes):
            wanted = next(one for one in classes if one is not type(None))
            load = f"{wanted.__name__}.load(...)" if hasattr(wanted, "load") else f"a {wanted.__name__}"
            yield Fault(place=f"{called}({name}=)", problem=f"is {shown(given[name])}", remedy=load)


def _classes(hint: object) -> tuple[type, ...]:
    """The classes of an annotation `A` or `A | None` whose A is this project's; nothing of any other."""
    parts: tuple[Any, ...] = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    own = [one for one in parts if isinstance(one, type) and one.__module__.partition(".")[0] == "simulator"]
    return tuple(parts) if own and all(isinstance(one, type) for one in parts) else ()
