"""The design of samples: which points of the ranges are predicted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Saltelli's sample (Computer Physics Communications 181, 2010): two matrices A and B of n points each, and for every input i the
# matrix A with column i of B. Points are those of a scrambled Sobol sequence, whose seed decides them
Points = NDArray[np.float64]  # a row a point, a column an input, each a share of its range


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """n points twice, and once an input. a, b: [n, d]; mixed: [d, n, d]."""

    a: Points
    b: Points
    mixed: Points

    @classmethod
    def of(cls, num_inputs: int, num_points: int, seed: int) -> Design:
        """num_points: a power of two. scipy is imported here: it takes half a second."""
        from scipy.stats import qmc

        sequence = qmc.Sobol(d=2 * num_inputs, scramble=True, rng=np.random.default_rng(seed))
        points = sequence.random(num_points)
        a, b = points[:, :num_inputs], points[:, num_inputs:]
        mixed = np.repeat(a[None], num_inputs, axis=0)
        for column in range(num_inputs):
            mixed[column, :, column] = b[:, column]
        return cls(a=a, b=b, mixed=mixed)

    @property
    def points(self) -> Points:
        """All of them, A first: [(2 + d) n, d]."""
        return np.concatenate([self.a, self.b, *self.mixed])

    def parts(self, values: Points) -> tuple[Points, Points, Points]:
        """Values of all points, [s, (2 + d) n], as f_A [s, n], f_B [s, n], f_AB [d, s, n]."""
        num_points = len(self.a)
        blocks = [values[:, start : start + num_points] for start in range(0, values.shape[1], num_points)]
        return blocks[0], blocks[1], np.stack(blocks[2:])
