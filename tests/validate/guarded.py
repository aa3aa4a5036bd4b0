"""Loaded by a process that forks ranks on fake CUDA tensors: what they and captures do first, done once."""

import os
from pathlib import Path

from validate.players import guard

if guard.needs_guard():
    guard.stand_in(Path(os.environ["SHARDWISE_CACHE"]))
    guard.stand_in = lambda _: None  # a forked rank has it already

import validate.capture.child  # after the guard, since what it needs loads torch
import validate.players.fake

validate.capture.child._load()

import torch.distributed.pipelining  # noqa: E402, F401  what many programs load
