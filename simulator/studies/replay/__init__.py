"""Replays of recorded or predicted memory events: exactly, or under other settings and other pool policies."""

from simulator.memory.driver_costs import DriverCosts
from simulator.memory.requests import Sequence, of_history, play, repeated
from simulator.studies.replay.exact import ReplayReport, Tally, replay
from simulator.studies.replay.measure import Demand, Score, compare, demand
from simulator.studies.replay.recording import RecordedBlock, RecordedSegment, Recording
from simulator.studies.replay.sequence import of_recording, varied

__all__ = [
    "Demand", "DriverCosts", "RecordedBlock", "RecordedSegment", "Recording", "ReplayReport", "Score", "Sequence",
    "Tally", "compare", "demand", "of_history", "of_recording", "play", "repeated", "replay", "varied",
]  # fmt: skip
