"""peft's ways to name modules, as words of `[plan.peft]` (peft 0.13 to 0.21: tuners/tuners_utils.py, utils/other.py).

Names, patterns of whole paths, `layers_to_transform`, and `rank_pattern`, whose first key that the end of a path matches decides.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Final

from simulator.base.patterns import compiled

_OF_PATTERNS: Final = frozenset("()|\\^$*?+[]")
_MOST_LAYERS: Final = 200  # whose paths a pattern is tried on; what holds for all of these holds for more
_MOST_PATTERNS: Final = 64
_MOST_S: Final = 2.0  # of the CPU, for all paths; published patterns take milliseconds
_PATHS: Final = (
    "model.layers.{}.",
    "model.language_model.layers.{}.",
    "language_model.model.layers.{}.",
    "model.text_model.layers.{}.",
)
_MODULES: Final = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
_PLAIN: Final = re.compile(
    r"(?:\w+\.)*?(?:(?:layers|layer|h|blocks|block)\.(\d{1,5})\.)?(?:[A-Za-z]\w*\.)*([A-Za-z]\w*)"
)
Layers = frozenset[int] | None  # None: all


def is_pattern(text: str) -> bool:
    """A name is none."""
    return bool(set(text) & _OF_PATTERNS)


def scoped(modules: Iterable[str], layers: Iterable[int] | None) -> tuple[str, ...]:
    """Words for modules in these layers; None: in all."""
    return tuple(f"{scope}{module}".rstrip(".") for scope in _scopes(layers) for module in modules)


def _scopes(layers: Iterable[int] | None) -> Iterator[str]:
    if layers is None:
        yield ""
        return
    first = last = -2
    for number in (*sorted(set(layers)), -2):
        if number != last + 1:
            if first >= 0:
                yield (
                    f"layers.{first}-{'' if last == _MOST_LAYERS - 1 else last}."
                    if last > first
                    else f"layers.{first}."
                )
            first = number
        last = number


def matched(pattern: str, *, ends: bool = False) -> tuple[str, ...]:
    """Words for the modules that a pattern matches; none if it matches none or cannot be tried. ends: of paths' ends too."""
    found = _matches(pattern, ends=ends)
    groups: dict[Layers, list[str]] = {}
    for module, layers in found.items():
        groups.setdefault(layers, []).append(module)
    return tuple(word for layers, modules in groups.items() for word in scoped(modules, layers))


def _matches(pattern: str, *, ends: bool) -> dict[str, Layers]:
    """Module -> layers."""
    if ends and (plain := _PLAIN.fullmatch(pattern)):
        return {plain[2]: None if plain[1] is None else frozenset({int(plain[1])})}
    whole = compiled(pattern, r"(?:.*\.)?" if ends else "")
    if whole is None:
        return {}
    found: dict[str, set[int]] = {}
    until_s = time.process_time() + _MOST_S
    for name, number in product(_MODULES, range(_MOST_LAYERS)):
        if any(whole.fullmatch(path.format(number) + name) for path in _PATHS):
            found.setdefault(name.rpartition(".")[2], set()).add(number)
        if time.process_time() > until_s:
            return {}
    return {name: None if len(layers) == _MOST_LAYERS else frozenset(layers) for name, layers in found.items()}


def with_ranks(
    targets: Sequence[str], layers: Sequence[int] | None, ranks: Mapping[str, object]
) -> tuple[tuple[str, ...], list[tuple[str, str]]]:
    """Words for modules in these layers, of which some have ranks of their own; and (key, fault) of ranks that have none."""
    faults, own = [], list[str]()
    here: Layers = None if layers is None else frozenset(layers)
    everywhere = {"all", "all-linear"} & set(targets)
    for number, (key, rank) in enumerate(ranks.items()):
        found = _matches(key, ends=True) if number < _MOST_PATTERNS or _PLAIN.fullmatch(key) else {}
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            faults.append((key, f"{str(rank)[:60]!r} is no rank"))
        elif not found:
            faults.append((key, "matches no module of a layer"))
        else:
            for module, numbers in found.items():
                both = numbers if here is None else here if numbers is None else here & numbers
                if everywhere or module in targets:
                    own += [f"{word}:{rank}" for word in scoped([module], both)]
    return (*own, *scoped(targets, layers)), faults
