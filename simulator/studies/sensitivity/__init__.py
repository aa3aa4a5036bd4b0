"""Sensitivity: how much a figure, and a decision between alternatives, depend on each of their inputs.

Inputs vary at once over stated ranges (Saltelli's sample of a Sobol sequence); Sobol's indices say what share of the
variance each explains alone, and with its interactions; counted is how often another alternative would win.
"""

from simulator.studies.sensitivity.answer import Ends, Evaluated, Sensitivity, analysed
from simulator.studies.sensitivity.design import Design
from simulator.studies.sensitivity.ranges import Error, Input, Range, together
from simulator.studies.sensitivity.text import render

__all__ = ["Design", "Ends", "Error", "Evaluated", "Input", "Range", "Sensitivity", "analysed", "render", "together"]
