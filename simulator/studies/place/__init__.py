"""Which GPU each rank gets: priced by the routes between the GPUs of its groups, and confirmed by a step played on both."""

from simulator.studies.place.decide import Gain, GroupPath, Placement, place
from simulator.studies.place.local import Local, place_node

__all__ = ["Gain", "GroupPath", "Local", "Placement", "place", "place_node"]
