"""Predict the step time and the peak memory of distributed training, without a GPU.

    from simulator import Cluster, Model, Plan, predict

    prediction = predict(Model.load("llama3-8b"), Plan(dp_shard=8, seq_len=8192), Cluster.load("hgx-h100-8"))

The public names load their modules when they are first touched, so that importing a part does not pay for the whole.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

from typing_extensions import override

from simulator.base.registry import IMPLEMENTATIONS, VIEWS

if TYPE_CHECKING:
    from simulator.api import predict_program, search, search_serving, serve
    from simulator.base.errors import InputError
    from simulator.base.fit import Fit
    from simulator.predict import Prediction, bounds, predict
    from simulator.spec.calibration import Calibration
    from simulator.spec.cluster import Cluster
    from simulator.spec.cluster.device import Device
    from simulator.spec.model import Model
    from simulator.spec.plan import Plan
    from simulator.spec.software.stack import Stack
    from simulator.studies.serving import InferencePlan, Slo, Workload
    from simulator.work.captured.cost import KernelCost, kernel_cost

__all__ = [
    "Calibration", "Cluster", "Device", "Fit", "InferencePlan", "InputError", "KernelCost", "Model", "Plan",
    "Prediction", "Slo", "Stack", "Workload", "bounds", "kernel_cost", "predict", "predict_program", "search",
    "search_serving", "serve",
]  # fmt: skip


def _implementations() -> None:
    """Every implementation of data parallelism registers itself as its file is loaded."""
    from simulator.work import script

    assert script.IMPLEMENTATIONS is IMPLEMENTATIONS


def _views() -> None:
    """What a prediction looks like elsewhere registers itself as its file is loaded."""
    from simulator.formats.writers import views

    assert views.__name__


IMPLEMENTATIONS.loads_by(_implementations)
VIEWS.loads_by(_views)


def _public(name: str) -> object:  # noqa: C901, PLR0912  a case a module
    """A public name, its module loaded now."""
    module: object
    match name:
        case "Calibration":
            from simulator.spec import calibration as module
        case "Cluster":
            from simulator.spec import cluster as module
        case "Device":
            from simulator.spec.cluster import device as module
        case "Fit":
            from simulator.base import fit as module
        case "InputError":
            from simulator.base import errors as module
        case "InferencePlan" | "Slo" | "Workload":
            from simulator.studies import serving as module
        case "predict_program" | "search" | "search_serving" | "serve":
            from simulator import api as module
        case "KernelCost" | "kernel_cost":
            from simulator.work.captured import cost as module
        case "Model":
            from simulator.spec import model as module
        case "Plan":
            from simulator.spec import plan as module
        case "Stack":
            from simulator.spec.software import stack as module
        case "Prediction" | "bounds" | "predict":
            from simulator.predict import Prediction, bounds, predict

            return {"Prediction": Prediction, "bounds": bounds, "predict": predict}[name]
        case _:
            raise AttributeError(f"module 'simulator' has no attribute {name!r}")
    return getattr(module, name)


def __getattr__(name: str) -> object:
    value = _public(name)
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
