"""The attention window of each layer of a model."""

from __future__ import annotations

from collections.abc import Iterable

from simulator.spec.model import Model


def windows(model: Model, layers: Iterable[int]) -> tuple[tuple[int | None, int], ...]:
    """(keys a token sees, None: all; layers that do) of the layers with these numbers."""
    every = model.global_every
    counts: dict[int | None, int] = {}
    for layer in layers:
        sees_all = model.sliding_window is None or (every > 0 and (layer + 1) % every == 0)
        window = None if sees_all else model.sliding_window
        counts[window] = counts.get(window, 0) + 1
    return tuple(sorted(counts.items(), key=lambda item: item[0] or 0))
