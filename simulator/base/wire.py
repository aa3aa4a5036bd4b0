"""Protocol buffers' wire format: fields in and out of bytes, without a schema (protobuf.dev/programming-guides/encoding)."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Final

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
_MOST_VARINT: Final = 10  # bytes of a 64-bit number
_FIXED: Final = {FIXED64: 8, FIXED32: 4}

Field = tuple[int, int, int | bytes]  # (number, wire type, value: of fixed ones the bytes)


class BrokenMessageError(ValueError):
    """Bytes that are no message. at: the offset at which that is seen."""

    def __init__(self, problem: str, at: int) -> None:
        super().__init__(problem)
        self.at = at


def varint(number: int) -> bytes:
    """A whole number; negative ones as two's complement of 64 bits."""
    number &= 2**64 - 1
    found = bytearray()
    while number > 0x7F:
        found.append(0x80 | number & 0x7F)
        number >>= 7
    found.append(number)
    return bytes(found)


def integer(field: int, value: int) -> bytes:
    """A field of int32, int64, uint32, uint64, bool or an enum; nothing where it is 0, as proto3 has it."""
    return varint(field << 3 | VARINT) + varint(value) if value else b""


def member(field: int, value: int) -> bytes:
    """The same of a member of a oneof, which is written where it is 0 too."""
    return varint(field << 3 | VARINT) + varint(value)


def double(field: int, value: float) -> bytes:
    """A member of a oneof that is a double."""
    return varint(field << 3 | FIXED64) + struct.pack("<d", value)


def block(field: int, content: bytes | str) -> bytes:
    """A field of a string, of bytes or of a message."""
    data = content.encode() if isinstance(content, str) else content
    return varint(field << 3 | LENGTH) + varint(len(data)) + data


def packed(field: int, values: Iterable[int]) -> bytes:
    """A repeated field of whole numbers, which proto3 packs; nothing where there are none."""
    data = b"".join(varint(value) for value in values)
    return block(field, data) if data else b""


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """(number, offset behind it). Raises BrokenMessageError."""
    number = 0
    for count in range(_MOST_VARINT):
        if at + count >= len(data):
            raise BrokenMessageError("ends within a number", at)
        byte = data[at + count]
        number |= (byte & 0x7F) << 7 * count
        if byte < 0x80:
            return number & 2**64 - 1, at + count + 1
    raise BrokenMessageError("a number of more than ten bytes", at)


def fields(data: bytes) -> Iterator[Field]:
    """The fields of a message, unknown ones too, in order. Raises BrokenMessageError."""
    at = 0
    while at < len(data):
        key, behind = read_varint(data, at)
        number, kind = key >> 3, key & 7
        if not number:
            raise BrokenMessageError("a field of number 0", at)
        if kind == VARINT:
            value, at = read_varint(data, behind)
            yield number, kind, value
            continue
        if kind not in (FIXED64, FIXED32, LENGTH):
            raise BrokenMessageError(f"a field of unknown wire type {kind}", at)
        size, behind = read_varint(data, behind) if kind == LENGTH else (_FIXED[kind], behind)
        if behind + size > len(data):
            raise BrokenMessageError(f"a field of {size:,} bytes of which {len(data) - behind:,} are there", at)
        yield number, kind, data[behind : behind + size]
        at = behind + size


def numbers(kind: int, value: int | bytes) -> list[int]:
    """A repeated field of whole numbers, packed or one by one. Raises BrokenMessageError."""
    if isinstance(value, int):
        return [value]
    found: list[int] = []
    at = 0
    while kind == LENGTH and at < len(value):
        number, at = read_varint(value, at)
        found.append(number)
    return found


def signed(number: int) -> int:
    """An int32 or int64 as it was meant."""
    return number - 2**64 if number >= 2**63 else number
