"""A check as text, as JUnit's XML, and as Prometheus' text format."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import quoteattr

from validate.check.findings import Finding
from validate.samples import SampleFile

_FACTS = ("device", "driver", "vbios", "cuda", "torch", "nccl", "python", "ecc", "power_limit_w", "max_sm_clock_mhz", "pcie_generation", "pcie_width", "num_ranks", "threads", "hostname")  # fmt: skip

_CLOCKS = ("host", "sm_clock_mhz", "lowest_sm_clock_mhz", "temperature_c", "power_w", "throttled_by")


def changed_facts(new: Mapping[str, Any], old: Mapping[str, Any]) -> list[str]:
    """Versions and settings that differ, `name: old -> new`; only what both files state."""
    lines = [
        f"{name}: {old[name]} -> {new[name]}"
        for name in _FACTS
        if name in new and name in old and new[name] != old[name]
    ]
    ours, theirs = (facts.get("settings") or {} for facts in (new, old))
    if "settings" in new and "settings" in old:
        names = sorted(ours.keys() | theirs.keys())
        lines += [
            f"{n}: {theirs.get(n, 'unset')} -> {ours.get(n, 'unset')}" for n in names if ours.get(n) != theirs.get(n)
        ]
    if new.get("nics") and old.get("nics") and new["nics"] != old["nics"]:
        lines += [f"network card, was: {one}" for one in old["nics"] if one not in new["nics"]]
        lines += [f"network card, is: {one}" for one in new["nics"] if one not in old["nics"]]
    return lines


def clocks(new: SampleFile) -> list[dict[str, Any]]:
    """Clock, temperature and power of each rank in each phase, where the run has written them down."""
    rows = [{"phase": row.get("name"), "rank": row.get("rank", 0), **_held(row)} for row in new.sections]
    return [row for row in rows if len(row) > 2]


def links(new: SampleFile) -> list[dict[str, Any]]:
    """What each rank sends to each other one of its node, and to the next node: bytes a second of the largest message."""
    found: dict[tuple[int, int | None], dict[int, list[float]]] = {}
    hosts = {sample.rank: sample.host for sample in new.samples}
    for one in new.of("pair", "rail"):
        ends = (int(one["source"]), int(one["target"])) if one.kind == "pair" else (one.rank, None)
        found.setdefault(ends, {}).setdefault(int(one["size_bytes"]), []).append(one.time_s)
    rows = []
    for (source, target), times in sorted(
        found.items(), key=lambda item: (item[0][0], item[0][1] is None, item[0][1] or 0)
    ):
        size = max(times)
        row = {
            "source": source,
            "target": target,
            "size_bytes": size,
            "bytes_per_s": size / statistics.median(times[size]),
        }
        rows.append({**row, **({"host": hosts[source]} if hosts.get(source) else {})})
    return rows


def matrix(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Gigabytes a second from each rank (line) to each other one (column), and to the next node, as lines."""
    if not rows:
        return []
    columns = sorted({row["target"] for row in rows if row["target"] is not None})
    speeds = {(row["source"], row["target"]): f"{row['bytes_per_s'] / 1e9:.3g}" for row in rows}
    targets = [*columns, *([None] if any(row["target"] is None for row in rows) else [])]
    head = ["GB/s from", *("next node" if one is None else f"to {one}" for one in targets)]
    table = [head, *([str(s), *(speeds.get((s, t), "-") for t in targets)] for s in sorted({one for one, _ in speeds}))]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in table]


def _held(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in _CLOCKS if row.get(name) not in (None, "")}


def text(found: Sequence[Finding], facts: Sequence[str]) -> str:
    """What is bad first; one line says what was looked at."""
    lines = [f"changed: {line}" for line in facts]
    lines += [one.line for one in found if one.bad]
    lines += [one.line for one in found if one.kind == "improvement"]
    bad = len({one.component for one in found if one.bad})
    looked = len({one.component for one in found})
    if not looked:
        return "\n".join([*lines, "nothing to compare with yet"])
    return "\n".join(
        [*lines, f"{bad} of {looked} parts of the machine are worse" if bad else f"ok: {looked} parts of the machine"]
    )


def junit(found: Sequence[Finding]) -> str:
    """A test case a part; bad ones are failures."""
    cases = []
    for one in found:
        name = quoteattr(f"{one.component} ({one.kind if one.bad else one.detail or 'ok'})")
        case = f"  <testcase classname={quoteattr(f'shardwise.{one.component.what}')} name={name}"
        cases.append(f"{case}><failure message={quoteattr(one.line)}/></testcase>" if one.bad else f"{case}/>")
    head = (
        f'<testsuite name="shardwise calibrate check" tests="{len(found)}" failures="{sum(one.bad for one in found)}">'
    )
    return "\n".join(['<?xml version="1.0" encoding="UTF-8"?>', head, *cases, "</testsuite>", ""])


def prometheus(found: Sequence[Finding], new: SampleFile) -> str:
    """Gauges for a node exporter's textfile collector."""
    return "\n".join([*_gauges(found, new.machine.text("hostname")), ""])


def _gauges(found: Sequence[Finding], machine: str) -> Iterator[str]:
    def label(**labels: str) -> str:
        quoted = (f'{k}="{v.translate(_ESCAPED)}"' for k, v in labels.items())
        return "{" + ",".join(quoted) + "}"

    parts = [
        (
            one,
            {
                "machine": machine,
                "part": one.component.what,
                "who": one.component.who,
                "category": one.component.category,
            },
        )
        for one in found
    ]
    yield "# HELP shardwise_time_ratio Time against peers or against the baseline."
    yield "# TYPE shardwise_time_ratio gauge"
    for one, labels in parts:
        if one.judged is not None:
            yield f"shardwise_time_ratio{label(**labels, against=one.detail)} {one.judged.ratio:.6g}"
    yield "# HELP shardwise_bad 1 for a part of the machine that is worse, by what was found."
    yield "# TYPE shardwise_bad gauge"
    for part in dict.fromkeys(one.component for one in found):
        kinds = sorted({one.kind for one in found if one.component == part and one.bad})
        labels = {"machine": machine, "part": part.what, "who": part.who, "category": part.category}
        yield f"shardwise_bad{label(**labels, found=','.join(kinds) or 'ok')} {int(bool(kinds))}"


_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
