"""Split models compute what whole ones do, and hold what the simulator says."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from tests import warm
from validate.compare.borders import borders
from validate.players import fake
from validate.torch_releases import DUALPIPE_V, installed, release

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of which every version has others

CPU = Stack.load("torch-2.13-cpu")
SIZES: dict[str, Any] = {"num_layers": 2, "d_model": 64, "num_heads": 4, "d_ff": 128, "vocab_size": 256}
LLAMA: dict[str, Any] = {"name": "llama", **SIZES, "num_kv_heads": 2, "qk_norm": True}
GPT: dict[str, Any] = {
    "name": "gpt", **SIZES, "mlp": "gelu_tanh", "norm": "layer", "norm_bias": True, "qkv_bias": True, "out_bias": True,
    "mlp_bias": True, "positions": "learned", "max_positions": 16, "tied_embeddings": True,
}  # fmt: skip
MPT: dict[str, Any] = {"name": "mpt", **SIZES, "positions": "alibi", "vocab_size": 255}
GEMMA: dict[str, Any] = {"name": "gemma", **SIZES, "post_norms": True, "logit_softcap": True, "embedding_scale": True}
FALCON: dict[str, Any] = {"name": "falcon", **SIZES, "parallel_residual": True, "shared_input_norm": True}
MIXTURE: dict[str, Any] = {
    "name": "mixture",
    **SIZES,
    "experts": {"num_experts": 4, "top_k": 2, "d_ff": 64, "shared_d_ff": 32},
}
FOUR_LAYERS = FALCON | {"num_layers": 4}
ONE_CHUNK, SEVERAL_CHUNKS = ("gpipe", "1f1b", "zb_h1"), ("interleaved", "dualpipe_v")

WAYS: list[dict[str, Any]] = [
    {"sequence_parallel": sequence, "vocab_parallel": vocabulary}
    for sequence in (False, True)
    for vocabulary in (False, True)
]
CASES = [
    *({"model": model, "plan": {"tp": 2, "zero": 0, **way}} for model in (LLAMA, GPT) for way in WAYS),
    *({"model": model, "plan": {"tp": 2, "zero": 0, "sequence_parallel": True}} for model in (MPT, GEMMA, FALCON)),
    {"model": LLAMA, "plan": {"tp": 2, "zero": 3, "sequence_parallel": True, "recompute": "full"}},
    {"model": GPT, "plan": {"tp": 2, "zero": 3, "sequence_parallel": True, "recompute": "selective"}},
    {"model": LLAMA, "plan": {"cp": 2}},
    {"model": GPT, "plan": {"cp": 2, "cp_exchange": "all_to_all"}},
    {"model": MPT, "plan": {"cp": 2, "cp_exchange": "all_to_all", "recompute": "full"}},
    {"model": MIXTURE, "plan": {"dp_shard": 2, "ep": 2}},
    *({"model": FALCON, "plan": {"pp": 2, "zero": 0, "num_micro_batches": 3, "schedule": one}} for one in ONE_CHUNK),
    *(
        {
            "model": FOUR_LAYERS,
            "plan": {"pp": 2, "zero": 0, "num_micro_batches": 4, "schedule": one, "virtual_stages": 2},
        }
        for one in SEVERAL_CHUNKS
        if one != "dualpipe_v" or release(installed()) >= DUALPIPE_V
    ),
    {
        "model": LLAMA,
        "plan": {"pp": 2, "zero": 2, "num_micro_batches": 2, "sync_every_micro_batch": False, "recompute": "full"},
    },
]


def test_loss_and_every_gradient_are_those_of_the_whole_model(tmp_path: Path, torch_server: warm.Server) -> None:
    """Two ranks with gloo; fp32, so what is left is the order of sums."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    program = [sys.executable, "-m", "tests.validate.tensor_parallel_ranks"]
    told, store = tmp_path / "told.json", tmp_path / "store"
    ranks = [
        torch_server.popen([*program, str(rank), str(store), str(told), json.dumps(CASES)], env=environment)
        for rank in range(2)
    ]
    try:
        statuses = [rank.wait(timeout=280) for rank in ranks]
        assert statuses == [0, 0], [rank.stderr.read()[-2000:] for rank in ranks]
    finally:
        for rank in ranks:
            rank.close()
    for case, (name, difference) in zip(CASES, json.loads(told.read_text()), strict=True):
        assert difference < 1e-4, (case, name)


# --- memory


OPTIONS: dict[str, dict[str, Any]] = {
    "sequence": {"sequence_parallel": True},
    "vocabulary": {},
    "blocks": {"vocab_parallel": False},
    "blocks and sequence": {"vocab_parallel": False, "sequence_parallel": True},
    "several sequences": {"sequence_parallel": True, "micro_batch_size": 2},
    "16 bits": {"sequence_parallel": True, "precision": "bf16"},
    "checkpointed": {"sequence_parallel": True, "recompute": "full"},
    "accumulated": {"sequence_parallel": True, "num_micro_batches": 2},
}
STRATEGIES: dict[str, dict[str, Any]] = {"alone": {"zero": 0}, "fsdp2": {"dp_shard": 2}}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_split_models_hold_is_predicted(strategy: str, option: str) -> None:
    """Whole tables' gradients, copies around collectives, the loss by columns: to the scalars that attention keeps."""
    model = Model.model_validate({"name": "tiny", **SIZES, "num_kv_heads": 2, "vocab_size": 4096})
    plan = Plan.model_validate({"tp": 2, "seq_len": 64, "precision": "fp32", **STRATEGIES[strategy], **OPTIONS[option]})
    tracked, predicted = fake.play(model, plan, CPU), borders(model, plan, CPU, granularity_bytes=1)
    for name in ("start", "after_forward", "after_backward", "peak"):
        difference = getattr(predicted, f"{name}_bytes") - getattr(tracked, name).total_bytes
        assert 0 <= difference <= 24 * model.num_layers, name


def test_a_tied_table_sums_its_two_gradients() -> None:
    model = Model.model_validate({**GPT, "vocab_size": 4096, "max_positions": 64})
    plan = Plan(tp=2, zero=0, seq_len=64, precision="fp32")
    tracked, predicted = fake.play(model, plan, CPU), borders(model, plan, CPU, granularity_bytes=1)
    assert predicted.peak_bytes == tracked.peak.total_bytes


def test_a_tied_table_is_not_taken_for_positions_of_its_size() -> None:
    model = Model.model_validate({**GPT, "vocab_size": 64, "max_positions": 64})
    plan = Plan(zero=0, seq_len=64, precision="fp32")
    tracked, predicted = fake.play(model, plan, CPU), borders(model, plan, CPU, granularity_bytes=1)
    assert predicted.after_backward_bytes == tracked.after_backward.total_bytes
