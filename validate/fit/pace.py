"""The pace of the cores while samples were taken: times of a slow minute are brought to the pace of the whole run.

A virtual machine's cores run at the speed that its neighbours leave. Beside every sample of a CPU stands the time of one
fixed product just before it (validate.stopwatch.reference_s); a sample counts as if that product had taken its median.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from validate.fit.ranks import SHARED
from validate.samples import Sample

LIMIT = 2.0  # a reference further off than this was disturbed itself: no pace, but an interruption


def reference_of(samples: Sequence[Sample]) -> float | None:
    """Median seconds of the reference product; None where nobody measured it."""
    found = [s.shape["reference_s"] for s in samples if _known(s)]
    return float(np.median(found)) if found else None


def at_one_pace(samples: Sequence[Sample]) -> list[Sample]:
    """The samples with their times at the median pace; what ranks do together, and what has no reference, stays as it is."""
    middle = reference_of(samples)
    return [_scaled(s, middle / s.shape["reference_s"]) if middle and _known(s) else s for s in samples]


def _known(sample: Sample) -> bool:
    value = None if sample.kind in SHARED else sample.shape.get("reference_s")
    return isinstance(value, int | float) and value > 0


def _scaled(sample: Sample, factor: float) -> Sample:
    if not 1 / LIMIT <= factor <= LIMIT:
        return sample
    return replace(sample, time_s=factor * sample.time_s)
