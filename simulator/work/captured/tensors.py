"""Arguments of a captured operator: tensors by dtype, shape and strides; numbers, texts and lists as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

ITEM_BYTES = {
    "fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CapturedTensor:
    """A tensor that an operator read or made. strides: None where it is contiguous. pinned: of one on the CPU."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    on_gpu: bool = True
    pinned: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES.get(self.dtype, 4)

    @property
    def num_bytes(self) -> int:
        """Bytes that a kernel touches: of a broadcast tensor those that there are."""
        if self.strides is None:
            return self.numel * self.item_bytes
        return prod(size for size, stride in zip(self.shape, self.strides, strict=True) if stride) * self.item_bytes

    @property
    def is_transposed(self) -> bool:
        """The last two dims lie the other way round."""
        return self.strides is not None and len(self.shape) > 1 and self.strides[-2] == 1 and self.strides[-1] != 1

    @property
    def is_dense(self) -> bool:
        """No gaps and nothing twice, whatever the order of dims."""
        if self.strides is None:
            return True
        step = 1
        for size, stride in sorted(zip(self.shape, self.strides, strict=True), key=lambda one: one[1]):
            if size > 1 and stride != step:
                return False
            step *= size
        return True


def parsed(value: Any) -> Any:  # noqa: ANN401
    """A value of the file with its tensors as `CapturedTensor`."""
    if isinstance(value, list | tuple):
        if len(value) >= 4 and value[0] == "T":
            strides = None if value[3] is None else tuple(value[3])
            return CapturedTensor(value[1], tuple(value[2]), strides, len(value) == 4, value[-1] == "pinned")
        return tuple(parsed(one) for one in value)
    return value


def tensors(value: Any) -> Iterator[CapturedTensor]:  # noqa: ANN401
    """All tensors in a value, in order."""
    if isinstance(value, CapturedTensor):
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from tensors(one)
