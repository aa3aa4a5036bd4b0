"""A picture that is drawn on demand: in a notebook, or as a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory


@dataclass(frozen=True, slots=True)
class Picture:
    """A plot of a prediction. draw: writes the file of a path, in the format of its suffix."""

    draw: Callable[[Path], None]

    def save(self, path: str | Path) -> None:
        """Write a .png, .svg or .pdf. Raises InputError for another ending, or where the file cannot be written."""
        self.draw(Path(path))

    def svg(self) -> str:
        """The picture as the text of an SVG file."""
        with TemporaryDirectory() as folder:
            path = Path(folder, "picture.svg")
            self.draw(path)
            return path.read_text(encoding="utf-8")

    def _repr_svg_(self) -> str:
        """SVG for notebooks."""
        return self.svg()
