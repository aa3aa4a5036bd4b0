"""Predict the step time and the peak memory of distributed training, without a GPU.

    from simulator import Cluster, Model, Plan, predict

    prediction = predict(Model.load("llama3-8b"), Plan(dp_shard=8, seq_len=8192), Cluster.load("hgx-h100-8"))

The public names load their modules when they are first touched, so that importing a part does not pay for the whole.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from typing_extensions import override

if TYPE_CHECKING:
    from simulator.calibration import Calibration
    from simulator.device import Device
    from simulator.model import Model
    from simulator.plan import Plan
    from simulator.predict import Prediction, bounds, predict
    from simulator.stack import Stack
    from simulator.topology import Cluster

__all__ = ["Calibration", "Cluster", "Device", "Model", "Plan", "Prediction", "Stack", "bounds", "predict"]

_HOMES = {
    "Calibration": "calibration",
    "Cluster": "topology",
    "Device": "device",
    "Model": "model",
    "Plan": "plan",
    "Prediction": "predict",
    "Stack": "stack",
    "bounds": "predict",
    "predict": "predict",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'simulator' has no attribute {name!r}")
    value: object = getattr(import_module(f"simulator.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `simulator.predict` the function: the import system would bind the submodule of that name over it."""

    @override
    def __setattr__(self, name: str, value: object) -> None:
        bound = getattr(value, name, value) if name == "predict" and isinstance(value, ModuleType) else value
        super().__setattr__(name, bound)


sys.modules[__name__].__class__ = _Package
