"""fp8 products by torch's own scaled product, on a CPU and on fake tensors."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from torch import nn

from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from validate.compare.borders import borders
from validate.models import Decoder
from validate.parallel import style_of
from validate.playable import engine_faults, unplayable
from validate.players import fake
from validate.scaled import ScaledLinear, scale_products

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of which every version has others

STACK = Stack.load("torch-2.13-fake-cpu")
TINY = Model(name="tiny", num_layers=3, d_model=64, num_heads=4, num_kv_heads=2, d_ff=128, vocab_size=256)
ROUNDING = {"tensorwise": 2**-3, "rowwise": 2**-4}  # half a step of 2 (gradients) and of 3 bits beside the leading one


def plan(**options: Any) -> Plan:
    return Plan(**{"seq_len": 64, "precision": "fp8", **options})


@pytest.mark.parametrize("recipe", ROUNDING)
def test_a_scaled_product_and_its_gradients_are_the_wide_ones_rounded(recipe: str) -> None:
    torch.manual_seed(0)
    wide = nn.Linear(64, 32, bias=True)
    scaled = ScaledLinear(wide, by_row=recipe == "rowwise")
    x = torch.randn(2, 48, 64) * torch.logspace(-2, 2, 48).unsqueeze(-1)  # rows of very different size
    x[0, 0] = 0
    results = []
    for module in (wide, scaled):
        read = x.clone().requires_grad_()
        y = module(read)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
        results.append((y.detach(), read.grad, wide.weight.grad, wide.bias.grad))
        wide.weight.grad = wide.bias.grad = None
    for exact, rounded in zip(*results, strict=True):
        error = (rounded - exact).norm() / exact.norm()
        assert 0 <= float(error) < ROUNDING[recipe]
    assert float((results[1][0] - results[0][0]).norm()) > 0, "in 8 bits"
    smallest = [one[0][0, 1] for one in results]
    relative = float((smallest[1] - smallest[0]).norm() / smallest[0].norm())
    assert recipe == "tensorwise" or relative < ROUNDING[recipe], "small rows keep their digits"


def test_layers_at_the_ends_and_the_head_stay_wide() -> None:
    with torch.device("meta"):
        module = Decoder(TINY, style_of(TINY, plan(), STACK))
    names = [name for name, _ in module.named_parameters()]
    scale_products(module, plan(first_layers_bf16=1, last_layers_bf16=1))
    assert [name for name, _ in module.named_parameters()] == names
    scaled = {name for name, one in module.named_modules() if isinstance(one, ScaledLinear)}
    products = ("attention.q", "attention.k", "attention.v", "attention.out", "mlp.gate", "mlp.up", "mlp.down")
    assert scaled == {f"layers.1.{name}" for name in products}


@pytest.mark.parametrize(
    "options",
    [
        {"dp_shard": 4},
        {"zero": 0, "dp_replicate": 4, "fp8_recipe": "rowwise"},
        {"dp_shard": 2, "recompute": "full", "first_layers_bf16": 1, "num_micro_batches": 2},
    ],
    ids=["fsdp2", "ddp-by-row", "recomputed"],
)
def test_what_is_held_is_what_is_predicted(options: dict[str, Any]) -> None:
    asked = plan(**options)
    memory, predicted = fake.play(TINY, asked, STACK), borders(TINY, asked, STACK, granularity_bytes=1)
    assert memory.start.total_bytes == predicted.start_bytes
    assert memory.after_forward.total_bytes == predicted.after_forward_bytes
    scales = 4 * 2 * asked.micro_batch_size * asked.seq_len  # of a product's rows
    assert memory.peak.total_bytes == pytest.approx(predicted.peak_bytes, abs=scales)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"precision": "nvfp4"}, "precision"),
        ({"fp8_recipe": "delayed"}, "fp8_recipe"),
        ({"dp_shard": 2, "fp8_all_gather": True, "fp8_recipe": "tensorwise"}, "fp8_all_gather"),
        ({"tp": 2}, "precision"),
        ({"seq_len": 40}, "precision"),
        ({"recompute": "selective"}, "recompute"),
        ({"pp": 2, "zero": 0, "schedule": "zb_h1", "num_micro_batches": 2}, "schedule"),
    ],
)
def test_what_torch_does_not_scale_is_refused(options: dict[str, Any], field: str) -> None:
    faults = [fault for fault in unplayable(TINY, plan(**options), STACK, "solo") if fault.place == f"plan: {field}"]
    assert faults
    assert all(fault.problem and fault.remedy for fault in faults)
    assert not list(unplayable(TINY, plan(), STACK, "solo"))


def test_engines_are_not_played_in_fp8() -> None:
    asked = plan(data_parallel="megatron", dp_shard=2, zero=1, stack="megatron-core-0.16-local-cpu")
    faults = list(engine_faults(TINY, asked, Stack.of(asked), "cpu"))
    assert "plan: precision" in [fault.place for fault in faults]
