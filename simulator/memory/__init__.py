"""Memory: what is alive when in a step, who owns it at the peak, and what the caching allocator reserves for it.

`simulate_memory` writes a first and a steady step as allocations and frees (`step`), sums the live bytes
and plays the same sequence through the caching allocator. There is no clock in here.
"""

from simulator.memory.history import (
    History,
    activation_bytes,
    label,
    moment_of,
    step_live_bytes,
    step_reserved_bytes,
    write_history,
)
from simulator.memory.outside import capacity_bytes, outside_torch_bytes, window_bytes
from simulator.memory.pressure import Pressure
from simulator.memory.use import MemoryUse, device_history, memory_uses, simulate_memory
from simulator.work.script.implementation import Library

__all__ = [
    "History", "Library", "MemoryUse", "Pressure", "activation_bytes", "capacity_bytes", "device_history", "label",
    "memory_uses", "moment_of", "outside_torch_bytes", "simulate_memory", "step_live_bytes",
    "step_reserved_bytes", "window_bytes", "write_history",
]  # fmt: skip
