"""The public surface: exactly these names, loaded when touched, whatever was imported before."""

from __future__ import annotations

import subprocess
import sys

import pytest

import simulator

NAMES = [
    "Calibration", "Cluster", "Device", "Fit", "InferencePlan", "InputError", "KernelCost", "Model", "Plan", "Prediction",
    "Slo", "Stack", "Workload", "bounds", "kernel_cost", "predict", "predict_program", "search", "search_serving", "serve",
]  # fmt: skip
HEAVY = ("torch", "matplotlib", "scipy", "dask", "validate")


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_list_is_this_one() -> None:
    assert simulator.__all__ == NAMES
    assert set(NAMES) <= set(dir(simulator))


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_what_it_says(name: str) -> None:
    assert getattr(simulator, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Clustre"):
        simulator.Clustre  # noqa: B018


@pytest.mark.parametrize(
    "first", ["import simulator.predict", "from simulator import Prediction", "import simulator.cli.predict"]
)
def test_predict_is_the_function_though_a_module_has_its_name(first: str) -> None:
    assert run_python(f"{first}; from simulator import predict; print(type(predict).__name__)") == "function"


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = run_python("import sys, simulator; print(*sorted(sys.modules))").split()
    assert not {"numpy", "pydantic", "simpy", "rich", *HEAVY} & set(loaded)


def test_predicting_needs_no_framework_and_no_scipy() -> None:
    loaded = run_python("import sys; from simulator import *; print(*sorted(sys.modules))").split()
    assert not set(HEAVY) & set(loaded)
