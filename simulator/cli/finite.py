"""Numbers of options: within their bounds, and numbers."""

from __future__ import annotations

import math

import click


class FiniteRange(click.FloatRange):
    """Click's, which lets `nan` pass, as it lies below no bound and above none."""

    def convert(self, value: float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Fails by click's usual error for what is no finite number."""
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{found} is no finite number.", param, ctx)
        return found
