"""PyTorch's allocator settings as launch scripts state them, and as exports write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.base.errors import StackError
from simulator.formats.exchange import Job, export_plan
from simulator.formats.readers.plans import read_plan
from simulator.formats.readers.plans.megatron import read_megatron
from simulator.formats.study.imported import stack_overrides
from simulator.formats.study.overrides import patched
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


_MEGATRON = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --bf16 "
    "--seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --vocab-size 32000"
)
_TRAINER = (
    "torchrun --nproc_per_node 8 train.py --per_device_train_batch_size 2 --bf16 --model_name_or_path Qwen/Qwen2.5-7B"
)


@pytest.mark.parametrize("command", [_MEGATRON, _TRAINER])
@pytest.mark.parametrize("how", ["export {0}\n{1}", "{0} {1}", "env {0} {1}", "srun --export=ALL,{0} {1}"])
def test_nccl_s_variables_are_the_stack_s(tmp_path: Path, command: str, how: str) -> None:
    file = tmp_path / "train.sh"
    file.write_text(how.format("NCCL_P2P_DISABLE=1", command))
    draft = read_plan(file)
    assert [(s.use, s.note) for s in draft.settings if s.name == "NCCL_P2P_DISABLE"] == [
        ("used", "stack.nccl.env.NCCL_P2P_DISABLE")
    ]
    assert draft.stack_changes["nccl.env.NCCL_P2P_DISABLE"][0] == "1"
    changes = stack_overrides(draft, [], {})
    stack = patched(Stack.load(draft.stack), changes, StackError)
    assert stack.nccl.env == {"NCCL_P2P_DISABLE": "1"}


def test_what_nccl_cannot_read_is_an_error_and_what_no_model_knows_is_told(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    lines = ["NCCL_P2P_DISABLE=yes", "NCCL_IB_HCA=mlx5", "CUDA_LAUNCH_BLOCKING=1", "NCCL_DEBUG=INFO", "NCCL_ALGO=$ALGO"]
    file.write_text("".join(f"export {line}\n" for line in lines) + _MEGATRON)
    draft = read_plan(file)
    assert [fault.place.rpartition(": ")[2] for fault in draft.faults] == ["NCCL_P2P_DISABLE"]
    told = {s.name: s.use for s in draft.settings if s.name in {line.partition("=")[0] for line in lines}}
    assert told == {
        "NCCL_P2P_DISABLE": "used",
        "NCCL_IB_HCA": "not modelled",
        "CUDA_LAUNCH_BLOCKING": "not modelled",
        "NCCL_ALGO": "unknown",
    }


@pytest.mark.parametrize(
    ("variables", "options", "kernel"),
    [
        ("NVTE_FLASH_ATTN=1 NVTE_FUSED_ATTN=0", "", "flash2"),
        ("NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=0", "", "math"),
        ("NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=1", "", None),
        ("NVTE_FUSED_ATTN=0", "--attention-backend unfused", "math"),
        ("NVTE_FUSED_ATTN=0", "--attention-backend fused", None),
        ("NVTE_FUSED_ATTN=0", "--transformer-impl local --use-mcore-models --use-flash-attn", "flash2"),
    ],
)
def test_transformer_engine_s_attention_is_what_the_environment_leaves(
    tmp_path: Path, variables: str, options: str, kernel: str | None
) -> None:
    """TransformerEngine: dot_product_attention/utils.py, get_attention_backend; cuDNN's is the stack's own."""
    file = tmp_path / "train.sh"
    file.write_text(f"export {variables}\n{_MEGATRON} {options}")
    assert read_plan(file).stack_changes.get("attention.kernel", (None,))[0] == kernel


@pytest.mark.parametrize(
    "words",
    [
        "srun --export=ALL,NCCL_ALGO=Ring,Tree,NCCL_PROTO=Simple",
        "srun --export=NCCL_ALGO=Ring,Tree,NCCL_PROTO=Simple,ALL",
        "env NCCL_ALGO=Ring,Tree NCCL_PROTO=Simple",
        "mpirun -x NCCL_ALGO=Ring,Tree -x NCCL_PROTO=Simple",
    ],
)
def test_several_variables_that_a_launcher_passes_on_are_told_apart(tmp_path: Path, words: str) -> None:
    file = tmp_path / "train.sh"
    file.write_text(f"{words} {_MEGATRON}")
    draft = read_plan(file)
    found = {name: value for name, (value, _) in draft.stack_changes.items() if name.startswith("nccl.")}
    assert found == {"nccl.env.NCCL_ALGO": "Ring,Tree", "nccl.env.NCCL_PROTO": "Simple"}
    assert not [fault for fault in draft.faults if "NCCL" in fault.place]
