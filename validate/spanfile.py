"""Spans of a measured step as a file: gzipped JSON, one object a span. No torch."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from pathlib import Path

from simulator.base.errors import Fault, InputError
from simulator.work.trace import Span, Timeline


def write_spans(path: Path, timeline: Timeline) -> None:
    """Write a timeline; the same timeline gives the same bytes."""
    data = {"schema_version": 1, "step_s": float(timeline.step_s), "spans": [asdict(span) for span in timeline.spans]}
    with gzip.GzipFile(path, "wb", mtime=0) as file:
        file.write(json.dumps(data, separators=(",", ":"), allow_nan=False).encode())


def read_spans(path: Path) -> Timeline:
    """Read what `write_spans` wrote. Raises InputError."""
    try:
        with gzip.open(path) as file:
            data = json.load(file)
        spans = [Span(**{**row, "parts": tuple(map(tuple, row["parts"]))}) for row in data["spans"]]
        return Timeline(spans=tuple(spans), step_s=data["step_s"])
    except (OSError, EOFError, ValueError, KeyError, TypeError) as exc:
        fault = Fault(place=str(path), problem=f"not a file of spans: {exc}", remedy="one that `validate run` wrote")
        raise InputError(fault) from None
