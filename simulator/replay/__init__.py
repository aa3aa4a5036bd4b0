"""Replays of recorded or predicted memory events: exactly, or under other settings and other pool policies."""

from simulator.replay.exact import Mismatch, ReplayReport, Tally, memory_trace, replay
from simulator.replay.recording import RecordedBlock, RecordedSegment, Recording

__all__ = [
    "Mismatch",
    "RecordedBlock",
    "RecordedSegment",
    "Recording",
    "ReplayReport",
    "Tally",
    "memory_trace",
    "replay",
]
