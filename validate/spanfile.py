"""Spans of a measured step as a file: gzipped JSON, one object a span. No torch."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from simulator.formats.readers.spans import read_spans
from simulator.work.trace import Timeline

__all__ = ["read_spans", "write_spans"]


def write_spans(path: Path, timeline: Timeline) -> None:
    """Write a timeline; the same timeline gives the same bytes."""
    data = {"schema_version": 1, "step_s": float(timeline.step_s), "spans": [span._asdict() for span in timeline.spans]}
    with gzip.GzipFile(path, "wb", mtime=0) as file:
        file.write(json.dumps(data, separators=(",", ":"), allow_nan=False).encode())
