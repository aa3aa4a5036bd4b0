"""A record of `validate run` with its inputs built again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import ValidationError

from simulator.base.errors import ClusterError, InputError, ModelError, PlanError, StackError
from simulator.base.schema import Strict, faults_of
from simulator.memory import Library
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import NOTHING_OFFLOADED, Plan
from simulator.spec.software.stack import Stack

InputT = TypeVar("InputT", bound=Strict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A record, and what was run."""

    record: Mapping[str, Any]
    model: Model
    plan: Plan
    stack: Stack

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """Raises InputError where the record's model, plan or stack are none.

        On a CPU device and host are one memory: the plan that ran there is the one that offloads nothing.
        """
        plan = _noun(Plan, record, "plan", PlanError)
        return cls(
            record=record,
            model=_noun(Model, record, "model", ModelError),
            plan=plan.copy_with(offload=NOTHING_OFFLOADED) if _device(record) == "cpu" else plan,
            stack=_noun(Stack, record, "stack", StackError),
        )

    @property
    def device(self) -> str:
        """Whose tensors were counted: cuda or cpu."""
        return _device(self.record)

    @property
    def library(self) -> Library:
        """What the collectives were; a process group that only pretends holds what NCCL does."""
        return "gloo" if self.device == "cpu" and self.record["mode"] in ("cpu", "full") else "nccl"

    @property
    def stage(self) -> int:
        """The pipeline stage of the rank whose memory the record has: stages are outermost."""
        return int(self.record.get("rank") or 0) // (self.plan.num_devices // self.plan.pp)

    @property
    def on_gpu(self) -> bool:
        """The caching allocator was there to be asked."""
        return "peak_reserved_bytes" in (self.record.get("memory") or {})

    @property
    def allocator_settings(self) -> str:
        """What PYTORCH_CUDA_ALLOC_CONF said during the run."""
        return str(self.record.get("allocator_settings") or "")

    @property
    def what(self) -> str:
        """The run in one line."""
        plan = self.plan
        degrees = " ".join(
            f"{name}={plan.value(name)}"
            for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
            if plan.value(name) > 1
        )
        return (
            f"{self.model.name}, {plan.implementation} {degrees or 'one rank'}, {plan.micro_batch_size} x "
            f"{plan.seq_len} tokens x {plan.num_micro_batches}, recompute {plan.recompute.mode}, {plan.precision.compute}"
        )

    def cluster(self, name: str | None, nodes: int | None) -> Cluster | None:
        """The cluster to predict for: the one named, or the study's; None where nothing says which."""
        if name is not None:
            return Cluster.load(name, nodes)
        cluster = (self.record.get("study") or {}).get("cluster")
        return Cluster.parse(cluster, "run: study.cluster", ClusterError) if cluster else None

    def calibration(self, name: str | None, cluster: Cluster) -> Calibration | None:
        """The calibration to predict with: the one named, the study's, or None for the device's own."""
        name = name or (self.record.get("study") or {}).get("calibration")
        match name:
            case None:
                return None
            case "ideal":
                return Calibration.ideal()
            case "datasheet":
                return Calibration.datasheet(cluster.device)
            case _:
                return Calibration.load(Path(name) if name.endswith(".json") else name)


def _device(record: Mapping[str, Any]) -> str:
    """Records of before it was written down: the caching allocator tells a GPU."""
    device = record.get("device")
    if isinstance(device, str):
        return device
    return "cuda" if "peak_reserved_bytes" in (record.get("memory") or {}) else "cpu"


def _noun(kind: type[InputT], record: Mapping[str, Any], key: str, error: type[InputError]) -> InputT:
    """Strict inputs read JSON as JSON: lists become tuples only there."""
    try:
        return kind.model_validate_json(json.dumps(record.get(key)))
    except ValidationError as exc:
        raise error(faults_of(exc, f"run: {key}", kind)) from None
