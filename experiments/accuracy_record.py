"""Errors on measured runs, for reports: the tables of docs/accuracy as simulator/formats/html/static/record.toml.

    python experiments/accuracy_record.py      # after experiments/accuracy.py, which calls it too

Nothing is predicted here: the figures are those of the pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from simulator.base.errors import InputError
from simulator.spec.cluster.device import Device

ROOT = Path(__file__).resolve().parents[1]
PAGE, APPENDICES = ROOT / "docs" / "accuracy.md", ROOT / "docs" / "accuracy"
RECORD = ROOT / "simulator" / "formats" / "html" / "static" / "record.toml"
HEAD = """# How far off predictions were on measured runs, per cent: what reports show of it.
# Written by `python experiments/accuracy_record.py` from docs/accuracy.md and its appendices; nobody edits it.
"""
STEP, STACKS = "## Step time", "## My framework is described"
NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")


def text(page: Path = PAGE, folder: Path = APPENDICES) -> str:
    """The whole file."""
    return HEAD + "".join(_toml(kind, row) for kind, row in (*_of_sources(folder), *_of_stacks(page)))


def _table(lines: list[str], heading: str) -> Iterator[dict[str, str]]:
    """The rows of the first table below a heading, by its columns."""
    if heading not in lines:
        return
    below = lines[lines.index(heading) + 1 :]
    start = next((i for i, line in enumerate(below) if line.startswith("|")), len(below))
    names: list[str] = []
    for line in below[start:]:
        if not line.startswith("|"):
            return
        cells = [cell.strip(" *`") for cell in line.strip("|").split("|")]
        if not names:
            names = cells
        elif not set("".join(cells)) <= set("-: "):
            yield dict(zip(names, cells, strict=True))


def _of_sources(folder: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    """A row a source, GPU and precision."""
    for file in sorted(folder.glob("*.md")):
        lines = file.read_text(encoding="utf-8").splitlines()
        for row in _table(lines, STEP):
            device = _device(row["GPU"])
            if device is None or int(row["n"]) == 0:
                continue
            constant = [_number(one) for one in row["one MFU"].split("/")]
            yield (
                "row",
                {
                    "runs_of": lines[0].removeprefix("# "),
                    "gpu": row["GPU"],
                    "device": device,
                    "precision": row["precision"],
                    "n": int(row["n"]),
                    "median": _number(row["median"]),
                    "p90": _number(row["p90"]),
                    "inside": _number(row["in 90 %"]),
                    "mfu_median": constant[0],
                    "mfu_p90": constant[-1],
                },
            )


def _of_stacks(page: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    for row in _table(page.read_text(encoding="utf-8").splitlines(), STACKS):
        found = {"n": int(row["runs"]), "median": _number(row["median"]), "p90": _number(row["p90"])}
        yield "stack", {"name": row["stack"], **found, "inside": _number(row["holds"])}


def _device(label: str) -> str | None:
    """The GPU of a table by the name that clusters have for it."""
    try:
        return Device.resolve(label)
    except InputError:
        return None


def _number(cell: str) -> float | None:
    match = NUMBER.search(cell)
    return float(match[0]) if match else None


def _toml(kind: str, row: Mapping[str, object]) -> str:
    values = {name: value for name, value in row.items() if value is not None}
    cells = "".join(f"{name} = {_quoted(value)}\n" for name, value in values.items())
    return f"\n[[{kind}]]\n{cells}"


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def write() -> None:
    """Write the file anew."""
    RECORD.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    write()
