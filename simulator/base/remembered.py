"""What a function has made of the same records is not made again while it is likely to be asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

KeyT = TypeVar("KeyT")
MadeT = TypeVar("MadeT")
GivenP = ParamSpec("GivenP")


class Same:
    """Equal to what holds the very same object, which stays alive as long as this does."""

    __slots__ = ("one",)

    def __init__(self, one: Any) -> None:  # noqa: ANN401  any record
        self.one = one

    def __hash__(self) -> int:
        return id(self.one)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.one is other.one


def made_once(
    known: dict[KeyT, MadeT], key: KeyT, make: Callable[GivenP, MadeT], *given: GivenP.args, **named: GivenP.kwargs
) -> MadeT:
    """What is known by a key: made of what is given where it is not yet, and kept."""
    found = known.get(key)
    if found is None:
        found = known[key] = make(*given, **named)
    return found


def remembered(count: int) -> Callable[[Callable[..., MadeT]], Callable[..., MadeT]]:
    """Of a function of frozen records, the last `count` results, by which records they were made of."""

    def decorate(make: Callable[..., MadeT]) -> Callable[..., MadeT]:
        @lru_cache(maxsize=count)
        def found(*arguments: Same) -> MadeT:
            return make(*(each.one for each in arguments))

        @wraps(make)
        def call(*arguments: Any) -> MadeT:  # noqa: ANN401  as `make`
            return found(*map(Same, arguments))

        return call

    return decorate


def recent(count: int) -> Callable[[Callable[..., MadeT]], Callable[..., MadeT]]:
    """Of a function of records, which need not be hashable, the last `count` results, by equal records."""

    def decorate(make: Callable[..., MadeT]) -> Callable[..., MadeT]:
        made: deque[tuple[tuple[Any, ...], MadeT]] = deque(maxlen=count)

        @wraps(make)
        def call(*arguments: Any) -> MadeT:  # noqa: ANN401  as `make`
            for known, result in made:
                if known == arguments:
                    return result
            made.append((arguments, make(*arguments)))
            return made[-1][1]

        return call

    return decorate
