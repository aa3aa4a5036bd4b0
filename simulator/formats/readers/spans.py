"""Spans of a measured step as a file: gzipped JSON, one object a span. `validate.spanfile` writes it."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from simulator.base.errors import Fault, InputError
from simulator.formats.readers.json_stream import open_text
from simulator.work.trace import Span, Timeline


def read_spans(path: Path) -> Timeline:
    """Read what `write_spans` wrote. Raises InputError."""
    try:
        with open_text(path) as file:
            data = json.load(file)
        spans = [Span(**{**row, "parts": tuple(map(tuple, row["parts"]))}) for row in data["spans"]]
        return Timeline(spans=tuple(_checked(span) for span in spans), step_s=float(data["step_s"]))
    except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError, zlib.error) as exc:
        fault = Fault(place=str(path), problem=f"not a file of spans: {exc}", remedy="one that `validate run` wrote")
        raise InputError(fault) from None


def _checked(span: Span) -> Span:
    """Raises ValueError where its times are none."""
    if not 0 <= float(span.start_s) <= float(span.end_s) < float("inf"):
        raise ValueError(f"span {span.id} runs from {span.start_s} to {span.end_s}")
    return span
