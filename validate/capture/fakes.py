"""Fake tensors of a capture: torch's own, whose memo of shapes is asked in fewer words.

A capture runs hundreds of thousands of operators, nearly all of which torch's fake mode has seen before. Its memo is by all
that a tensor is, field by field; here it is by what tells strided tensors apart, and a result that is made of a memo's
entry takes one visit below the dispatcher. Whatever is not plain (sparse, quantised, conjugated, symbolic) goes torch's way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nested._internal.nested_int import NestedIntNode

_PLAIN = frozenset(
    {
        int,
        float,
        bool,
        str,
        complex,
        type(None),
        torch.dtype,
        torch.device,
        torch.memory_format,
        torch.layout,
    }
)  # fmt: skip  values that tell themselves apart, beside their type: 1 and 1.0 are equal
_OWN = object()  # begins every key here: a memo is shared by all fake modes


class Fakes(FakeTensorMode):  # type: ignore[misc]
    """The fake mode of a capture."""

    def create_symbolic_nested_int(self, *, nt_tensor_id: int | None = None) -> Any:
        """The length of a ragged dim, as eager PyTorch has it: of its own, and no symbol."""
        if nt_tensor_id is None:
            nt_tensor_id = self.nt_tensor_id_counter
            self.nt_tensor_id_counter += 1
        return torch.SymInt(NestedIntNode(nt_tensor_id, 1))

    def _cache_key(self, state: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What torch's key tells apart, of plain values; of others torch's key."""
        found: list[Any] = [_OWN, func, torch.get_default_dtype(), torch._C._get_default_device()]
        found += torch.is_inference_mode_enabled(), get_proxy_mode() is not None
        if self.shape_env is None and self._append_values(found, args) and self._append_values(found, kwargs.items()):
            return fake_tensor._DispatchCacheKey(tuple(found))
        return super()._cache_key(state, func, args, kwargs)

    def _append_values(self, found: list[Any], values: Any) -> bool:
        """Append the values that distinguish a call to the key; whether all of them are plain."""
        for one in values:
            kind = type(one)
            if kind in _PLAIN:
                found += kind, one
            elif kind is FakeTensor:
                if not self._is_plain(one):
                    return False
                found += one.dtype, one.shape, one.stride(), one.fake_device, one.storage_offset()
                found += one.untyped_storage().nbytes(), one.requires_grad, one.is_inference()
            elif kind is list or kind is tuple:
                found += kind, len(one)
                if not self._append_values(found, one):
                    return False
            else:
                return False
        return True

    def _is_plain(self, one: FakeTensor) -> bool:
        return (
            one.fake_mode is self
            and one.constant is None
            and one.layout is torch.strided
            and not (one._has_symbolic_sizes_strides or one.is_quantized or one.is_conj() or one.is_neg())
        )

    def _get_output_tensor_from_cache_entry(
        self, state: Any, entry: Any, key: Any, func: Any, args: Sequence[Any]
    ) -> Any:
        """A result as an entry of the memo says, in one visit."""
        metadata = entry.metadata
        if (
            metadata is None
            or entry.inplace_idx is not None
            or key.key[0] is not _OWN
            or metadata.is_conj
            or metadata.is_neg
        ):
            return super()._get_output_tensor_from_cache_entry(state, entry, key, func, args)
        if metadata.layout is not torch.strided:
            return super()._get_output_tensor_from_cache_entry(state, entry, key, func, args)
        of = None if entry.view_idx is None else args[entry.view_idx].untyped_storage()
        with fake_tensor.in_kernel_invocation_manager(self):
            if of is None:
                made = torch.empty_strided(
                    metadata.shape,
                    metadata.stride,
                    dtype=metadata.dtype,
                    device="meta",
                    requires_grad=metadata.requires_grad,
                )
            else:
                made = torch.empty(0, dtype=metadata.dtype, device="meta", requires_grad=metadata.requires_grad)
                made.set_(of, metadata.storage_offset, metadata.shape, metadata.stride)
        return FakeTensor(self, made, metadata.device)
