"""The best rank mapping: priced by the paths between the GPUs of each group, and confirmed by simulated steps."""

from simulator.studies.place.decide import Gain, GroupPath, Placement, place
from simulator.studies.place.local import Local, place_node

__all__ = ["Gain", "GroupPath", "Local", "Placement", "place", "place_node"]
