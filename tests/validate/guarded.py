"""Loaded by a process that forks ranks on fake CUDA tensors: what `validate.players.rank` does first, done once."""

import os
from pathlib import Path

from validate.players import guard

if guard.needs_guard():
    guard.stand_in(Path(os.environ["SHARDWISE_CACHE"]))
    guard.needs_guard = lambda: False  # a forked rank has it already

import validate.players.fake  # noqa: F401  after the guard, since it loads torch
