"""Every gradient of a pipeline is reduced on the stage that holds its parameter, whoever runs the data parallelism."""

from __future__ import annotations

import pytest

from simulator.base.kernels import DTYPE_BYTES
from simulator.play.lower import lower
from simulator.predict.play import play
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.plan.traits import implementation_names, traits_of
from simulator.spec.software.stack import Stack

STAGES, RANKS = 2, 4
CASES = [(name, zero) for name in implementation_names() for zero in traits_of(name).zero_stages]


@pytest.mark.parametrize(("name", "zero"), CASES)
def test_each_stage_reduces_what_it_holds(name: str, zero: int) -> None:
    model, cluster = Model.load("llama3-8b"), Cluster.load("hgx-h100-8").with_nodes(1)
    ranks = {"dp_shard": RANKS} if zero else {"dp_replicate": RANKS}
    fields = {"pp": STAGES, "zero": zero, "data_parallel": name, "num_micro_batches": 4, "seq_len": 2048, **ranks}
    plan = Plan.model_validate(fields)
    low = lower(
        model, plan, cluster, Stack.load("torch-2.11-eager"), Calibration.datasheet(cluster.device), default_curves()
    )
    sizes = DTYPE_BYTES[plan.gradient_dtype]
    ends = {stage.index: stage.chunks[0].units for stage in low.stages}
    matrix = model.vocab_size * model.d_model * sizes
    for index, end in ((0, 0), (STAGES - 1, -1)):
        comm = ends[index][end].comm
        assert max(comm.reduce_scatter_bytes, comm.all_reduce_bytes) >= matrix, (index, comm)


@pytest.mark.parametrize("layers", [(16, 0, 16, 0), (0, 16, 16, 0), (32, 0, 0, 0)])
def test_stages_without_layers_hand_on_what_they_receive(layers: tuple[int, ...]) -> None:
    """Messages through an empty stage take their time; what is computed is what the layers and ends take."""
    model, cluster = Model.load("llama3-8b"), Cluster.load("hgx-h100-8").with_nodes(1)
    fields = {"pp": 4, "zero": 1, "data_parallel": "megatron", "dp_shard": 2, "num_micro_batches": 4, "seq_len": 2048}
    plan = Plan.model_validate(fields | {"stage_layers": layers})
    stack = Stack.load("megatron-core-2025")
    low = lower(model, plan, cluster, stack, Calibration.datasheet(cluster.device), default_curves())
    work_s = [sum((u.work.forward + u.backward).work.duration_s for u in stage.chunks[0].units) for stage in low.stages]
    assert play(low).step_s > 4 * max(work_s)
