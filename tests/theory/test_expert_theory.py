"""Mixtures of experts against closed forms: FLOP, all-to-all volumes, what a rank holds."""

from __future__ import annotations

import math
from collections import Counter
from math import ceil, prod

import pytest

from simulator.base.kernels import Attention, Gemm, Stream
from simulator.memory.tapes import record
from simulator.parallel.mesh import Mesh
from simulator.parallel.model_shard import shard_of
from simulator.play.lower import lower
from simulator.predict import Prediction, predict
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops import Block, build_blocks, recompute_ops
from simulator.work.ops.core import Exchange
from simulator.work.script import communication, model_state_bytes, resident_tensors

STACK = Stack.load("megatron-core-2025")
MIXTURES = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2", "deepseek-v3", "gpt-oss-20b", "grok-1")


def megatron(**fields: object) -> Plan:
    """Megatron's distributed optimizer."""
    return Plan.model_validate({"zero": 1, "data_parallel": "megatron", "stack": STACK.name, **fields})


def exchanges(block: Block, axis: str) -> list[Exchange]:
    both = (e for op in block.ops for e in (*op.forward_exchanges, *op.backward_exchanges))
    return [e for e in both if e.axis == axis]


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("stack", ["megatron-core-2025", "torch-2.6-eager", "torch-2.11-compiled"])
def test_products_are_six_flop_an_active_parameter_and_token(name: str, stack: str) -> None:
    """Forward, data gradient and weight gradient of every parameter that a token passes; attention over half the square.

    Of attention two products forward and five backward: Q Kᵀ thrice (scores again, dQ, dK) with the channels of keys,
    the rest with those of values.
    """
    model, plan = Model.load(name), Plan(micro_batch_size=2, seq_len=1280, zero=3)
    built = build_blocks(model, Stack.load(stack), plan)
    counts = Counter(model.body)
    kernels = [k for b in (built.embedding, built.head) for op in b.ops for k in (*op.forward, *op.backward)]
    for block in built.body:
        kernels += counts[block.name] * [k for op in block.ops for k in (*op.forward, *op.backward)]
    tokens = plan.micro_batch_size * plan.seq_len
    assert sum(k.flop for k in kernels if isinstance(k, Gemm)) == 6 * model.num_matmul_parameters * tokens
    if model.sliding_window is None:
        pairs = plan.micro_batch_size * len(model.body) * model.num_heads * plan.seq_len**2 // 2
        values = model.o_width // model.num_heads
        channels = 2 * (model.head_dim + values) + 2 * (3 * model.head_dim + 2 * values)
        assert sum(k.flop for k in kernels if isinstance(k, Attention)) == pairs * channels


@pytest.mark.parametrize(("ep", "top_k"), [(2, 1), (4, 2), (8, 8)])
def test_an_all_to_all_sends_each_tokens_rows_to_the_ranks_of_its_experts(ep: int, top_k: int) -> None:
    """Four a layer (there and back, forward and backward), each of top_k · tokens · D elements of 16 bits; of them
    (ep − 1)/ep leave the rank. Behind the rows their weights in fp32; before them how many go to each expert (int64)."""
    base = Model.load("qwen3-30b-a3b")
    assert base.experts is not None
    model = base.model_copy(update={"experts": base.experts.model_copy(update={"top_k": top_k})})
    plan = megatron(dp_shard=8, ep=ep, seq_len=1024, micro_batch_size=2)
    found = exchanges(build_blocks(model, STACK, plan).layer, "ep")
    rows = top_k * plan.micro_batch_size * plan.seq_len
    size, weights = rows * model.d_model * 2, rows * 4
    assert [(e.kind, e.num_bytes) for e in found] == [
        ("all_gather", 8 * base.experts.num_experts * ep),
        *[("all_to_all", size), ("all_to_all", weights)] * 2,
        *[("all_to_all", size)] * 2,
    ]


@pytest.mark.parametrize(("ep", "top_k"), [(4, 2), (8, 8)])
def test_tokens_that_travel_become_rows_where_their_experts_are(ep: int, top_k: int) -> None:
    """A token reaches n (1 − (1 − 1/n)^k) of n ranks on average; one kernel there reads it once and writes all its rows."""
    base = Model.load("qwen3-30b-a3b")
    assert base.experts is not None
    model = base.model_copy(update={"experts": base.experts.model_copy(update={"top_k": top_k})})
    plan = megatron(dp_shard=8, ep=ep, seq_len=1024, dispatcher="deep_ep")
    ops = {op.name: op for op in build_blocks(model, STACK, plan).layer.ops}
    (kernel,) = ops["permute"].forward
    assert isinstance(kernel, Stream)
    token = 2 * model.d_model
    assert kernel.read_bytes == pytest.approx(1024 * ep * (1 - (1 - 1 / ep) ** top_k) * token, rel=1e-3)
    assert kernel.write_bytes == 1024 * top_k * token
    assert {"sorted", "unsorted"}.isdisjoint(ops)


def test_a_graph_of_the_whole_step_holds_the_experts_as_one_kernel_a_product() -> None:
    """Activation and casts stand in the products' kernels (Transformer Engine, ops/fused/grouped_mlp.py): what reads and
    writes memory beside them are the casts of what comes from outside, rows forward and their gradients backward."""
    model = Model.load("qwen3-30b-a3b")
    fields = {"dp_shard": 8, "ep": 8, "seq_len": 1024, "precision": "fp8", "fp8_recipe": "mxfp8"}

    def counted(**more: object) -> tuple[int, int]:
        ops = build_blocks(model, STACK, megatron(**fields, **more)).layer.ops
        mine = [op for op in ops if op.name.startswith(("experts.up", "experts.down", "activation"))]
        kernels = [k for op in mine for k in (*op.forward, *op.backward)]
        return sum(isinstance(k, Stream) for k in kernels), sum(k.launches for k in kernels if isinstance(k, Gemm))

    held = 128 // 8
    # casts of rows, of both weights, of both products' gradients; the activation each way; three products twice
    assert counted() == (2 + 2 + 2 + 2, 6 * held)
    assert counted(cuda_graphs=("full_iteration",)) == (1 + 2 + 1, 6)


def test_capacity_pads_every_expert_to_the_same_rows() -> None:
    """Megatron-LM, moe_utils.get_capacity: ⌈tokens · top_k · factor / experts⌉ of every rank for every expert."""
    model, plan = Model.load("deepseek-v2"), megatron(dp_shard=8, ep=8, seq_len=4096, expert_capacity_factor=1.0)
    (first, *_) = exchanges(build_blocks(model, STACK, plan).layer, "ep")
    assert first.num_bytes == 160 * ceil(4096 * 6 / 160) * model.d_model * 2


def test_the_busiest_rank_receives_more() -> None:
    model = Model.load("mixtral-8x7b")
    plans = [megatron(dp_shard=8, ep=8, seq_len=1024, expert_imbalance=i) for i in (1.0, 1.5)]
    rows = [max(k.m for op in build_blocks(model, STACK, plan).layer.ops for k in op.forward
                if isinstance(k, Gemm) and k.grouped) for plan in plans]  # fmt: skip
    assert rows == [1024 * 2, 1024 * 2 * 3 // 2]


@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 4, 1), (2, 8, 1), (2, 4, 2), (1, 1, 1)])
def test_a_rank_holds_its_experts_and_shards_them_over_their_replicas(tp: int, ep: int, etp: int) -> None:
    """Of E experts a rank holds E / ep, cut by etp; Adam's 12 B a parameter are cut over what is left of the ranks:
    dp · cp · tp / (ep · etp), those of the rest over dp · cp. 2 B parameters and 4 B gradients stay whole."""
    model, dp = Model.load("qwen3-30b-a3b"), 16 // tp
    assert model.experts is not None
    fields = {"sequence_parallel": tp > 1, "reduce_dtype": "fp32"}
    plan = megatron(dp_shard=dp, tp=tp, ep=ep, etp=etp, seq_len=1024, **fields)
    share = shard_of(model, plan)
    experts = model.num_layers * 128 * 3 * 2048 * 768 // (ep * etp)
    rest = share.num_parameters - experts
    replicas = 16 // (ep * etp)
    state = 6 * (rest + experts) + 12 * rest / dp + 12 * experts / replicas
    assert model_state_bytes(share, plan) == pytest.approx(state, rel=1e-6)


def test_gradients_of_experts_travel_among_their_replicas() -> None:
    model, plan = Model.load("mixtral-8x7b"), megatron(dp_shard=8, ep=4, seq_len=1024)
    (layer,) = {c for c in communication(shard_of(model, plan), plan) if c.unit == "layer5"}
    assert layer.experts is not None
    experts = 2 * 3 * 4096 * 14336
    assert layer.experts.reduce_scatter_bytes == 2 * experts
    assert layer.reduce_scatter_bytes == 2 * (model.num_parameters_of("layer") - 4 * experts)
    mesh = Mesh(plan, Cluster.load("hgx-h100-8"))
    assert (mesh.group_shape("ep").num_ranks, mesh.group_shape("expert_dp").num_ranks) == (4, 2)


def test_expert_groups_are_neighbours_and_replicas_lie_across_them() -> None:
    """Megatron-LM's order for experts: etp, ep, replicas; tp = 4, ep = 8 on four nodes of eight GPUs."""
    plan = megatron(dp_shard=16, tp=4, ep=8, etp=4, seq_len=1024)
    mesh = Mesh(plan, Cluster.load("hgx-h100-8").with_nodes(8))
    assert mesh.group_of("etp", 5) == range(4, 8)
    assert mesh.group_of("ep", 5) == range(1, 33, 4)
    assert mesh.group_of("expert_dp", 5) == range(5, 64, 32)
    for axis in ("etp", "ep", "expert_dp"):
        assert sorted(rank for group in mesh.groups(axis) for rank in group) == list(range(64))


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_flop_of_all_ranks_do_not_depend_on_the_placement_of_experts(ep: int) -> None:
    model = Model.load("qwen3-30b-a3b")
    plan = megatron(dp_shard=8, ep=ep, seq_len=4096)
    whole = build_blocks(model, STACK, megatron(dp_shard=8, seq_len=4096)).layer
    part = build_blocks(model, STACK, plan).layer
    assert (part.forward_flop, part.backward_flop) == (whole.forward_flop, whole.backward_flop)


def test_one_expert_does_the_work_of_a_dense_layer() -> None:
    """One expert that takes every token: the MLP's FLOP, and a router's 6 D a token; nothing is sent."""
    dense = Model.load("llama3-8b")
    fields = dense.model_dump(exclude={"experts", "latent"})
    one = Model.model_validate({**fields, "experts": {"num_experts": 1, "top_k": 1}})
    plan = megatron(dp_shard=8, seq_len=2048)
    mixture, layer = (build_blocks(model, STACK, plan).layer for model in (one, dense))
    router = 6 * dense.d_model * plan.seq_len
    assert mixture.forward_flop + mixture.backward_flop == layer.forward_flop + layer.backward_flop + router
    assert not exchanges(mixture, "ep")


def test_shapes_of_latent_attention_are_the_papers() -> None:
    """arXiv 2405.04434, section 2.1: queries through q_lora_rank, keys and values through kv_lora_rank and a rotating part."""
    model = Model.load("deepseek-v2")
    shapes = dict(model.parameter_shapes("layer"))
    assert shapes["attention.kv_down.weight"] == (512 + 64, 5120)
    assert shapes["attention.kv_up.weight"] == (128 * (128 + 128), 512)
    assert shapes["attention.q_up.weight"] == (128 * (128 + 64), 1536)
    assert shapes["attention.out.weight"] == (5120, 128 * 128)
    assert prod(shapes["experts.down.weight"]) == 160 * 5120 * 1536


def test_the_interval_grows_by_what_imbalance_moves() -> None:
    model = Model.load("mixtral-8x7b").model_copy(update={"num_layers": 4})
    cluster = Cluster.load("hgx-h100-8")

    def played(**fields: object) -> Prediction:
        return predict(model, megatron(dp_shard=8, ep=8, seq_len=2048, **fields), cluster)

    known, busy, unsure = played(), played(expert_imbalance=1.3), played(expert_imbalance_sigma=0.3)
    assert unsure.step_s == known.step_s < busy.step_s
    moved = busy.step_s / known.step_s - 1
    before, after = (math.log(p.high_s / p.step_s) / 1.6449 for p in (known, unsure))
    assert after**2 - before**2 == pytest.approx(moved**2, rel=1e-3)


def kept(model: Model, *modules: str) -> tuple[int, int]:
    """(bytes that a layer keeps for its backward, FLOP that it runs again) under selective recomputation of `modules`."""
    plan = megatron(seq_len=5120, recompute="selective", recompute_modules=modules)
    block = build_blocks(model, STACK, plan).layer
    again = recompute_ops(block, plan, STACK)
    tape = record(block, again, gradients="accumulated")
    live = {slot: size for slot, size, _, _ in tape.forward.events if size >= 0}
    for slot, size, _, _ in tape.forward.events:
        if size < 0:
            live.pop(slot, None)
    return sum(live.values()), sum(kernel.flop for op in again for kernel in op.forward)


def test_recomputed_modules_are_not_kept() -> None:
    """Megatron's modules: what each makes goes, what it reads stays; the products it runs again are its own."""
    model, t = Model.load("deepseek-v2"), 5120  # 192 rows an expert
    plain, none = kept(model, "core_attn")
    assert none == 0
    rows = t * 6
    size, flop = kept(model, "moe_act")
    assert (plain - size, flop) == (rows * 1536 * 2, 0)
    oss = Model.load("gpt-oss-120b")  # whose gates are clamped before the activation
    assert kept(oss, "core_attn")[0] - kept(oss, "moe_act")[0] == t * 4 * (2880 + 2 * 2880) * 2
    size, flop = kept(model, "mla_up_proj")
    made = 2 * t * (2 * 128 * 192 + 128 * 128 + 1536 + 512) + 2 * 4 * t  # queries, keys, values; two norms, statistics
    assert (plain - size, flop) == (made, 2 * t * (1536 * 128 * 192 + 512 * 128 * 256))
    size, flop = kept(model, "moe")
    experts = 2 * rows * 3 * 5120 * 1536 + 2 * t * 3 * 5120 * 3072 + 2 * t * 5120 * 160
    assert flop == experts
    assert plain - size > 2 * rows * (5120 + 3 * 1536)


def test_an_all_gather_brings_every_token_to_every_rank() -> None:
    """Megatron-LM's MoEAllGatherTokenDispatcher: the group's tokens forward, their sums back; products as before."""
    model = Model.load("mixtral-8x7b")
    plans = [megatron(dp_shard=8, ep=8, seq_len=1024, dispatcher=d) for d in ("all_to_all", "all_gather")]
    swap, gather = (build_blocks(model, STACK, plan).layer for plan in plans)
    found = exchanges(gather, "ep")
    assert sorted(e.kind for e in found) == ["all_gather", "all_gather", "reduce_scatter", "reduce_scatter"]
    assert {e.num_bytes for e in found} == {8 * 1024 * model.d_model * 2}
    assert (gather.forward_flop, gather.backward_flop) == (swap.forward_flop, swap.backward_flop)


def test_deep_ep_sends_a_token_once_to_each_node() -> None:
    """k experts drawn evenly lie on n (1 − (1 − 1/n)^k) of n nodes: of 8 rows on 2 nodes, 2 (1 − 2⁻⁸) are left."""
    model, cluster = Model.load("qwen3-30b-a3b"), Cluster.load("hgx-h100-8").with_nodes(2)
    plan = megatron(dp_shard=16, ep=16, seq_len=1024, dispatcher="deep_ep")
    lowering = lower(model, plan, cluster, STACK, Calibration.for_device(cluster.device), default_curves())
    (first, *_) = exchanges(lowering.blocks.layer, "ep")
    assert first.num_bytes == 8 * 1024 * model.d_model * 2
    assert lowering.fabric.sent_bytes(first) == round(first.num_bytes * 2 * (1 - 2**-8) / 8)


@pytest.mark.parametrize(("ep", "replicas"), [(1, 8), (2, 4), (8, 1)])
def test_fsdp2_cuts_experts_over_their_replicas(ep: int, replicas: int) -> None:
    """torchtitan: experts form units of their own on what `ep` leaves of the shard group; 4 B a parameter, 8 B of Adam."""
    model = Model.load("qwen3-30b-a3b")
    plan = Plan(zero=3, data_parallel="fsdp2", dp_shard=8, ep=ep, seq_len=1024, optimizer_impl="foreach")
    share = shard_of(model, plan)
    experts = model.num_layers * (128 // ep) * 3 * 2048 * 768
    held = resident_tensors(share, plan)
    expected = (share.num_parameters - experts) / 8 + experts / replicas
    assert sum(held["parameters"]) == pytest.approx(4 * expected, rel=1e-3)  # rows are padded
    assert sum(held["optimizer_state"]) == pytest.approx(8 * expected, rel=1e-3)
    (layer,) = {c for c in communication(share, plan) if c.unit == "layer3"}
    assert (layer.experts is None) == (ep == 1)
    if layer.experts is not None:
        gathered = 2 * experts // model.num_layers if replicas > 1 else 0
        assert layer.experts.all_gather_forward_bytes == gathered


def test_what_to_try_where_tokens_wait_on_their_way() -> None:
    model = Model.load("qwen3-30b-a3b").model_copy(update={"num_layers": 4})
    plan = megatron(dp_shard=16, ep=16, seq_len=4096)
    across = predict(model, plan, Cluster.load("hgx-h100-8").with_nodes(2)).suggestion
    assert "past the NVLink of 8 GPUs: ep = 8 stays inside it" in across
    rack = Cluster.load("gb200-nvl72").with_nodes(32)
    straddling = predict(model, megatron(dp_shard=128, ep=64, seq_len=4096), rack).suggestion
    assert "groups of 64 straddle NVLink domains of 72; jobs on 64 GPUs of each keep inside" in straddling
