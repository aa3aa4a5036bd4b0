"""PyTorch's allocator settings as launch scripts state them, and as exports write them."""

from __future__ import annotations

import pytest

from simulator.formats.exchange import Job, export_plan
from simulator.formats.readers.plans.megatron import read_megatron
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack

TRAIN = "pretrain_gpt.py --micro-batch-size 1 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
CONF = "expandable_segments:True,max_split_size_mb:128"


@pytest.mark.parametrize(
    "script",
    [
        f"export PYTORCH_CUDA_ALLOC_CONF={CONF}\ntorchrun {TRAIN}",
        f'X={CONF}\nPYTORCH_ALLOC_CONF="$X" torchrun {TRAIN}',
        f"env PYTORCH_CUDA_ALLOC_CONF={CONF} torchrun {TRAIN}",
        f"srun --export=ALL,PYTORCH_CUDA_ALLOC_CONF={CONF} torchrun {TRAIN}",
        f"docker run -e PYTORCH_HIP_ALLOC_CONF={CONF} image torchrun {TRAIN}",
        f"export PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync\nexport PYTORCH_ALLOC_CONF={CONF}\ntorchrun {TRAIN}",
    ],
)
def test_settings_are_read_where_a_script_states_them(script: str) -> None:
    draft = read_megatron(script, "train.sh")
    assert draft.fields["alloc_conf"] == CONF
    assert draft.places["alloc_conf"].startswith("train.sh:")
    used = [one for one in draft.settings if one.note == "plan.memory.alloc_conf"]
    assert [one.value for one in used] == [CONF]


@pytest.mark.parametrize(
    ("value", "use", "note"),
    [
        ("$SET_BY_NOBODY", "unknown", "--define PYTORCH_CUDA_ALLOC_CONF="),
        ("backend:cudaMallocAsync", "not modelled", "no published rules"),
    ],
)
def test_what_cannot_be_played_is_told(value: str, use: str, note: str) -> None:
    draft = read_megatron(f"export PYTORCH_CUDA_ALLOC_CONF={value}\ntorchrun {TRAIN}", "train.sh")
    assert "alloc_conf" not in draft.fields
    (told,) = (one for one in draft.settings if one.name == "PYTORCH_CUDA_ALLOC_CONF")
    assert (told.use, note in told.note) == (use, True)


def test_a_value_that_torch_refuses_is_a_fault_at_its_line_and_what_is_defined_holds() -> None:
    script = f"set -e\nexport PYTORCH_CUDA_ALLOC_CONF=max_split:9\ntorchrun {TRAIN}"
    (fault,) = (one for one in read_megatron(script, "train.sh").faults if "ALLOC" in one.place)
    assert fault.place == "train.sh:2: PYTORCH_CUDA_ALLOC_CONF"
    assert "max_split_size_mb" in fault.problem
    for text in ("", CONF):
        draft = read_megatron(script, "train.sh", define={"PYTORCH_CUDA_ALLOC_CONF": text})
        assert draft.fields.get("alloc_conf", "") == text
        assert draft.places.get("alloc_conf", "--define PYTORCH_CUDA_ALLOC_CONF") == "--define PYTORCH_CUDA_ALLOC_CONF"


def test_an_exported_script_keeps_them() -> None:
    plan = Plan(
        dp_shard=1, dp_replicate=8, zero=0, data_parallel="megatron", stack="megatron-core-2025", alloc_conf=CONF
    )  # fmt: skip
    job = Job(
        model=Model.load("llama3.2-1b"),
        plan=plan,
        stack=Stack.load("megatron-core-2025"),
        gpus_per_node=8,
    )
    written = export_plan(job, "megatron")
    assert f"export PYTORCH_CUDA_ALLOC_CONF={CONF}\n" in written.text
    assert "alloc_conf" not in written.beside
    assert written.draft.fields["alloc_conf"] == CONF
