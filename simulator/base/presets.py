"""Paths of the data files that ship with the project: devices, clusters, models, stacks, calibrations."""

from pathlib import Path
from typing import Final

TOPOLOGIES: Final = Path(__file__).resolve().parents[2] / "topologies"
