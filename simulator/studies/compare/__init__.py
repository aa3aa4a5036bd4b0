"""Compare: predictions side by side, their difference with its interval, and what the step would gain without a limit.

docs/guides/compare.md explains one.
"""

from simulator.studies.compare.ablations import ABLATIONS
from simulator.studies.compare.comparison import Comparison, Subject, compare
from simulator.studies.compare.text import render

__all__ = ["ABLATIONS", "Comparison", "Subject", "compare", "render"]
