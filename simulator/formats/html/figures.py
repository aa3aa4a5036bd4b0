"""Values as people read them, by the unit in their name; static/format.js says the same in the browser."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from simulator.base.units import format_bytes, format_duration, format_flop_per_s, format_number, format_rate

_SHARE_ENDS: Final = (
    *("_mfu", "_hfu", "_share", "_fraction", "utilization", "utilisation", "_goodput", "_gain", "_lost"),
    *("_abs_error", "_bias", "_coverage_90", "relative_error"),
)
NOTHING: Final = "–"
_UNITS: Final = ("_s", "_bytes")  # that a record may have for all its values
_SAID: Final = {
    "num_devices": "GPUs",
    "used_bytes": "memory used",
    "low_s": "lower end, 90 %",
    "high_s": "upper end, 90 %",
    "lower_s": "all overlapped",
    "upper_s": "nothing overlapped",
}
_SPELT: Final = {
    word.lower(): word
    for word in ("GPU", "GPUs", "CPU", "HBM", "KV", "MFU", "HFU", "NIC", "NICs", "NVLink", "NVMe", "PCIe", "RDMA")
}


def shown(name: str, value: object) -> str:
    """`value` formatted. name: its key, whose suffix is its unit."""
    match value:
        case bool():
            text = "yes" if value else "no"
        case int() | float():
            text = _number(name, value)
        case Mapping():
            text = ", ".join(f"{key} = {shown(str(key), one)}" for key, one in value.items())
        case str():
            text = value
        case Sequence():
            text = ", ".join(shown(name, one) for one in value)
        case _:
            text = ""
    return text or NOTHING


def _per_s(value: float) -> str:
    return f"{value:,.0f}/s" if value >= 100 else f"{format_number(value)}/s"


_BY_UNIT: Final[tuple[tuple[tuple[str, ...], Callable[[float], str]], ...]] = (  # the first that fits
    (("flop_per_s",), format_flop_per_s),
    (("bytes_per_s",), format_rate),
    (("_per_s", "_per_s_user", "_per_s_gpu"), _per_s),
    (("_s", "_s_per_token", "_seconds"), format_duration),
    (("_days",), lambda value: format_duration(86_400 * value)),
    (("_bytes",), format_bytes),
    (_SHARE_ENDS, "{:,.1%}".format),
    (("_flop", "flop_per_step"), lambda value: format_flop_per_s(value).removesuffix("/s")),
)


def _number(name: str, value: float) -> str:
    form = next((form for ends, form in _BY_UNIT if f"_{name}".endswith(ends)), None)
    if form is not None:
        return form(value)
    return f"{value:,}" if isinstance(value, int) else format_number(value)


def unit_of(path: str) -> str:
    """The name that gives the unit of the value at a path: its own, or that of the record: breakdown_s/gemm is in seconds."""
    *above, last = [part for part in path.split("/") if not part.isdecimal()] or [""]
    own = any(f"_{last}".endswith(end) for ends, _ in _BY_UNIT for end in ends)
    return above[-1] if above and not own and above[-1].endswith(_UNITS) else last


def found(data: Any, path: str) -> Any:  # noqa: ANN401  whatever JSON holds
    """The value at a path of keys and indices, "memory/used_bytes"; None if there is none."""
    for part in path.split("/"):
        if isinstance(data, Mapping):
            data = data.get(part)
        elif isinstance(data, Sequence) and not isinstance(data, str) and part.isdecimal() and int(part) < len(data):
            data = data[int(part)]
        else:
            return None
    return data


def words(name: str) -> str:
    """A key as a heading: "peak_allocated_bytes" is "peak allocated", "num_steps" is "steps"."""
    if name in _SAID:
        return _SAID[name]
    for unit in ("_bytes_per_s", "_flop_per_s", "_bytes", "_s", "_flop"):
        if name.endswith(unit) and not name.endswith("_per_s" if unit == "_s" else "\0"):
            name = name.removesuffix(unit)
            break
    name = f"{name.removesuffix('_per_s')} a second" if name.endswith("_per_s") else name
    return " ".join(_SPELT.get(word, word) for word in name.removeprefix("num_").replace("_", " ").split(" "))
