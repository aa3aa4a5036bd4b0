"""`import shardwise`: the public names of `simulator` under the name of the project."""

from simulator import *  # noqa: F403
from simulator import __all__ as __all__  # noqa: PLC0414  exported on
