"""The best rank mapping: priced by the paths between the GPUs of each group, and confirmed by simulated steps."""

from simulator.studies.place.decide import place
from simulator.studies.place.local import place_node

__all__ = ["place", "place_node"]
