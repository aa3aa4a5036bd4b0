"""Compare: predictions side by side, their difference with its interval, and what the step would gain without a limit.

docs/guides/compare.md explains one.
"""

from simulator.studies.compare.ablations import ABLATIONS, Gain, ablated
from simulator.studies.compare.comparison import Comparison, Subject, compare, compared
from simulator.studies.compare.text import render

__all__ = ["ABLATIONS", "Comparison", "Gain", "Subject", "ablated", "compare", "compared", "render"]
