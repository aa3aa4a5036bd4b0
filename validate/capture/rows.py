"""Gradients of some rows of a table (`sparse=True`): indices and values as the strided tensors that they are.

torch's sparse tensors have no storage that could be followed, and fake ones end the process. What autograd makes as one becomes
a wrapper here, of which optimizers ask what they ask of sparse gradients. Rows that are picked twice nobody knows, so all of
them are taken to differ, which is the most that there can be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch

from simulator.work.captured.capture import Kind
from validate.capture.ranks import RefusedError
from validate.capture.streams import Recorder

aten = torch.ops.aten
MATRICES = "sparse matrices are not captured: index_add or scatter for adjacency"
MAKES_SPARSE = aten._sparse_coo_tensor_with_dims_and_tensors.default


class Rows(torch.Tensor):  # type: ignore[misc]
    """Values of rows of a table: `rows` (1, n) says which, `held` (n, …) what they are. distinct: each row once, in order."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_sparse, layout = True, torch.sparse_coo
    rows: torch.Tensor
    held: torch.Tensor
    distinct: bool

    @staticmethod
    def __new__(
        cls: type[Self], rows: torch.Tensor, held: torch.Tensor, size: Sequence[int], *, distinct: bool = False
    ) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, size, dtype=held.dtype, device=held.device)
        made.rows, made.held, made.distinct = rows, held, distinct
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["rows", "held"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func not in _DOES:
            raise RefusedError(f"{func} of a sparse gradient is not captured: sparse=False for this table")
        return _DOES[func](*args, **(kwargs or {}))

    def like(self, held: torch.Tensor) -> Rows:
        """Other values of the same rows."""
        return Rows(self.rows, held, self.shape, distinct=self.distinct)

    def coalesce(self) -> Rows:
        """Each row once: indices are sorted, equal ones added up, and the host waits for how many are left (ATen, SparseCUDATensor.cu)."""
        if self.distinct:
            return self
        ordered, order = torch.sort(self.rows[0])
        count = self.rows.shape[1]
        Recorder.write(Kind.SYNCHRONIZE, Recorder.stack[-1].number)
        Recorder.log.answer(f"which of {count:,} rows of a sparse gradient differ: all of them")
        return Rows(ordered[None], self.held.index_select(0, order), self.shape, distinct=True)

    def is_coalesced(self) -> bool:
        return self.distinct

    def _indices(self) -> torch.Tensor:
        return self.rows

    def _values(self) -> torch.Tensor:
        return self.held

    indices, values = _indices, _values

    def _nnz(self) -> int:
        return int(self.rows.shape[1])

    def new(self, rows: torch.Tensor, held: torch.Tensor, size: Sequence[int]) -> Rows:
        """As optimizers make another one."""
        return Rows(rows, held, size)


def made_sparse(args: Sequence[Any]) -> Rows:
    """What autograd makes as a sparse tensor: of (sparse dims, dense dims, size, indices, values)."""
    if args[0] != 1:
        raise RefusedError(MATRICES)
    return Rows(args[3], args[4], args[2])


def _added_(one: Any, other: Rows, *, alpha: float = 1) -> Any:
    if not isinstance(one, Rows):
        return one.index_add_(0, other.rows[0], other.held, alpha=alpha)
    one.rows, one.held = torch.cat([one.rows, other.rows], 1), torch.cat([one.held, other.held * alpha])
    one.distinct = False
    return one


def _added(one: Any, other: Rows, *, alpha: float = 1) -> Any:
    return _added_(one.like(one.held) if isinstance(one, Rows) else one.clone(), other, alpha=alpha)


def _each(function: Callable[..., Any]) -> Callable[..., Rows]:
    return lambda one, *args: one.like(function(one.held, *args))


def _dense(one: Rows, *_: Any, **__: Any) -> torch.Tensor:
    return one.held.new_zeros(one.shape).index_add_(0, one.rows[0], one.held)


def _same(one: Rows, *_: Any, **__: Any) -> Rows:
    return one.like(one.held)


def _set(one: Rows, other: Rows, *_: Any) -> Rows:
    one.rows, one.held, one.distinct = other.rows, other.held, other.distinct
    return one


def _masked(table: torch.Tensor, mask: Rows) -> Rows:
    return mask.like(table.index_select(0, mask.rows[0]))


_DOES: Mapping[Any, Callable[..., Any]] = {
    aten.detach.default: _same, aten.alias.default: _same,
    aten.new_empty_strided.default: _same, aten.copy_.default: _set,  # autograd's copy of a gradient, which sparse ones need not
    aten.clone.default: lambda one, **_: one.like(one.held.clone()),
    aten.add_.Tensor: _added_, aten.add.Tensor: _added, aten.sparse_mask.default: _masked,
    aten.mul.Tensor: _each(torch.mul), aten.div.Tensor: _each(torch.div), aten.neg.default: _each(torch.neg),
    aten.mul_.Tensor: _each(torch.Tensor.mul_), aten.div_.Tensor: _each(torch.Tensor.div_),
    aten._to_dense.default: _dense,
}  # fmt: skip
