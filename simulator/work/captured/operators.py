"""Names of torch's operators by what their kernels do: operators.toml."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

from simulator.base.presets import facts

_NAMES: Final = facts(__file__, "operators")


def _of(kind: str) -> AbstractSet[str]:
    return frozenset(_NAMES[kind])


POINTWISE: Final = _of("pointwise")
ACTIVATIONS: Final = _of("activations")
REDUCTIONS: Final = _of("reductions")
BY_BYTES: Final = _of("by_bytes")
GATHERS: Final = _of("gathers")
SCATTERS: Final = _of("scatters")
FAMILIES: Final = tuple(_NAMES["families"])
