"""Factorisations, and what solves with them, by LAPACK's counts.

FLOP are those of LAPACK Working Note 41 (appendix C); of eigenvectors and singular vectors Golub and Van Loan's (Matrix
Computations, 4th ed., 7.5.6 and 8.6.4), of divide and conquer Tisseur and Dongarra's (1999). A column waits for the one
before it. It is one kernel where a panel fits into a block; a reduction to fewer diagonals multiplies each with what is left of
the matrix, in as many kernels as LAPACK's dlatrd, dlabrd and dlahr2 call BLAS (Dongarra, Sorensen and Hammarling, 1989). What a
library does otherwise nobody says, so a solver counts as an operator without a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil, prod
from typing import Final, NamedTuple

from simulator.base.kernels import Stated
from simulator.work.captured.products import Args, Priced, dtype_of
from simulator.work.captured.tensors import CapturedTensor

_PANEL: Final = 32  # columns: NB of LAPACK's ilaenv for QR and reductions
_FEW: Final = 8  # matrices: as many, or large ones, are solved one after another (ATen, BatchLinearAlgebraLib.cpp)
_LARGE: Final = 512
_JACOBI: Final = 32  # largest matrices of which cuSOLVER takes several at a time for eigenvalues and singular values


class Solver(NamedTuple):
    """What a solver computes. flop: of (rows, columns, right-hand sides, with vectors).

    steps: kernels one after another for each column. matrix, sides: which arguments these are. vectors: the argument that asks
    for them. left: what a column reads of the matrix, on average; 0: its panel.
    """

    flop: Callable[[int, int, int, bool], float]
    steps: float = 1.0
    matrix: int = 0
    sides: int = 1
    vectors: int = 2
    left: float = 0.0


def _lu(m: int, n: int) -> float:
    k = min(m, n)
    return 2 * m * n * k - (m + n) * k**2 + 2 / 3 * k**3


def _qr(m: int, n: int) -> float:
    return 2 * max(m, n) * min(m, n) ** 2 - 2 / 3 * min(m, n) ** 3


def _svd(m: int, n: int, *, vectors: bool) -> float:
    m, n = max(m, n), min(m, n)
    return 6 * m * n**2 + 20 * n**3 if vectors else 4 * m * n**2 - 4 / 3 * n**3


_CHOLESKY: Final = Solver(lambda _, n, _r, _v: n**3 / 3)
_BY_LU: Final = Solver(lambda m, n, _r, _v: _lu(m, n))
_TWICE: Final = Solver(lambda _, n, r, _v: 2 * n**2 * r, 2 / _PANEL)
_OF_VALUES: Final = Solver(lambda _, n, _r, _v: 10 * n**3, 14, left=0.5)
SOLVERS: Final[Mapping[str, Solver]] = {
    "linalg_cholesky_ex": _CHOLESKY, "cholesky": _CHOLESKY, "linalg_ldl_factor_ex": _CHOLESKY,
    "cholesky_inverse": Solver(lambda _, n, _r, _v: 2 / 3 * n**3),
    "_cholesky_solve_helper": _TWICE._replace(matrix=1, sides=0), "linalg_ldl_solve": _TWICE._replace(sides=2),
    "linalg_lu_solve": _TWICE._replace(sides=2),
    "linalg_solve_triangular": Solver(lambda _, n, r, _v: n**2 * r, 1 / _PANEL),
    "triangular_solve": Solver(lambda _, n, r, _v: n**2 * r, 1 / _PANEL, matrix=1, sides=0),
    "linalg_lu_factor_ex": _BY_LU, "linalg_lu": _BY_LU, "_linalg_det": _BY_LU, "_linalg_slogdet": _BY_LU,
    "_linalg_solve_ex": Solver(lambda m, n, r, _v: _lu(m, n) + 2 * n**2 * r),
    "linalg_inv_ex": Solver(lambda _, n, _r, _v: 2 * n**3),
    "geqrf": Solver(lambda m, n, _r, _v: _qr(m, n)), "linalg_householder_product": Solver(lambda m, n, _r, _v: _qr(m, n)),
    "linalg_qr": Solver(lambda m, n, _r, _v: 2 * _qr(m, n)),
    "ormqr": Solver(lambda m, n, r, _v: (4 * m - 2 * n) * n * r, 1 / _PANEL, sides=2),
    "linalg_lstsq": Solver(lambda m, n, r, _v: _qr(m, n) + (4 * m - n) * n * r),
    "_linalg_eigh": Solver(lambda _, n, _r, v: (4 / 3 + 10 / 3 * v) * n**3, 12, left=1 / 3),
    "_linalg_svd": Solver(lambda m, n, _r, v: _svd(m, n, vectors=v), 20, left=2 / 3),
    "linalg_eig": Solver(lambda _, n, _r, _v: 25 * n**3, 14, left=0.5), "linalg_eigvals": _OF_VALUES, "_linalg_eigvals": _OF_VALUES,
    "linalg_matrix_exp": Solver(lambda _, n, _r, _v: 10 * n**3, 5 / _PANEL),  # degree 18: five products (Bader et al., 2019)
}  # fmt: skip


def solved(name: str, p: Args, made: list[CapturedTensor]) -> Priced:
    """A solver's products, and its columns one after another."""
    one = SOLVERS[name]
    a: CapturedTensor = p[one.matrix]
    beside = p[one.sides] if len(p) > one.sides else None
    sides = beside.shape[-1] if isinstance(beside, CapturedTensor) and len(beside.shape) > 1 else 1
    (m, n), count, times = a.shape[-2:], prod(a.shape[:-2]), 4 if a.dtype.startswith("complex") else 1
    width = min(m, n)
    vectors = bool(p[one.vectors]) if len(p) > one.vectors else True
    apart = count > 1 and (width > _JACOBI if one.left else count <= _FEW or width >= _LARGE)
    read = (one.left * n if one.left else min(n, _PANEL)) + 1
    moved = a.num_bytes + sum(each.num_bytes for each in made) + int(width * count * read * m * a.item_bytes)
    launches = max(1, ceil(width * one.steps) * (count if apart else 1))
    flop = int(times * count * one.flop(m, n, sides, vectors))
    kernel = Stated(flop=flop, num_bytes=moved, dtype=dtype_of(a), launches=launches, together=True)
    return Priced(category="solvers", kernels=(kernel,), known=False)
