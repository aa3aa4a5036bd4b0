"""Which GPU each rank gets: priced by the roads between the GPUs of its groups, and confirmed by a step played on both."""

from simulator.place.decide import Gain, Placement, Road, place
from simulator.place.local import Local, place_node

__all__ = ["Gain", "Local", "Placement", "Road", "place", "place_node"]
