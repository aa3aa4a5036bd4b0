"""Captures of what scripts do every day: default optimizers, checks and prints of values, hooks of DDP, experts by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from simulator.base.exit_codes import ExitCode
from simulator.base.kernels import Gemm, Stated
from simulator.cli import main
from simulator.formats.readers.capture import read_capture
from simulator.work.captured.capture import Capture, Kind, Phase
from simulator.work.captured.script import captured_script
from simulator.work.script.instructions import Launch

pytestmark = pytest.mark.usefixtures("warm_captures")

EVERY_DAY = """
import torch
from torch.distributions import Categorical

layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(40))).cuda()
recurrent = torch.nn.GRU(64, 64).cuda()
recurrent.register_buffer("seen", torch.zeros(1024, device="cuda"))
optimizer = torch.optim.AdamW(layers.parameters())
Tensor = torch.cuda.FloatTensor
assert Tensor(2, 3).shape == (2, 3) and isinstance(torch.ones(3).type(Tensor), Tensor)
assert torch.allclose(Tensor([1, 2]), Tensor([1, 2])) and int(torch.version.cuda.split(".")[0]) > 0
profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
while True:
    torch.cuda.cudart().cudaProfilerStart()
    profiler.step()
    logits = layers(recurrent(torch.randn(1, 16, 64, device="cuda"))[0][0])
    chosen = Categorical(logits=logits)
    loss = chosen.log_prob(chosen.sample()).mean()
    assert torch.isfinite(loss) and not torch.isnan(loss)
    assert not (torch.randint(0, 9, (8,), device="cuda").view(2, 4) == -100).view(-1).all()  # of labels, none ignored
    assert torch.isfinite(logits).all() and not torch.isinf(logits).any()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"{loss:.3f} {norm:8.2e}")
"""
HOOK = """
import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer

distributed.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1024, 1024, bias=False).cuda())
model.register_comm_hook(None, default_hooks.bf16_compress_hook)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
while True:
    model(torch.randn(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
EXPERTS = """
import torch

router, experts = torch.nn.Linear(64, 8).cuda(), torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(8)).cuda()
optimizer = torch.optim.SGD([*router.parameters(), *experts.parameters()], 0.1)
while True:
    x = torch.randn(1024, 64, device="cuda")
    weights, chosen = torch.topk(router(x).softmax(-1), 2)
    y = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        if "any" in __import__("sys").argv:
            tokens, scale = (chosen == number).any(-1).nonzero().squeeze(-1), 1
        else:
            tokens, slot = torch.where(chosen == number)
            scale = weights[tokens, slot, None]
        y.index_add_(0, tokens, expert(x[tokens]) * scale)
    (y.sum() + weights.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""

SYNCHRONISED = """
import torch
from torch import distributed, nn

distributed.init_process_group("nccl")
model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
while True:
    with torch.autocast("cuda", dtype=torch.float16):
        y = model(torch.randn(4, 3, 10, 10, device="cuda"))
    y.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

ON_CPU = """
import torch

with torch.device("meta"):
    model = torch.nn.Linear(1024, 1024, bias=False)
model.to_empty(device="cpu")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
kept = torch.empty(1024, 1024, pin_memory=True)
while True:
    weight = model.weight.to("cuda", non_blocking=True)
    kept.copy_(weight.detach())
    (weight * weight).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

TENSOR_CORES = """
import sys, torch

torch.set_float32_matmul_precision(sys.argv[1])
model = torch.nn.Sequential(torch.nn.Conv2d(16, 16, 1), torch.nn.Flatten(), torch.nn.Linear(1024, 64)).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
while True:
    model(torch.randn(8, 16, 8, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

CHECKPOINTS = """
import sys, torch
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

distributed.init_process_group("nccl")
model = torch.nn.Linear(64, 64).cuda()
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpoint.save({"model": get_model_state_dict(model)}, checkpoint_id=sys.argv[1])
    checkpoint.async_save({"model": get_model_state_dict(model)}, checkpoint_id=sys.argv[1]).result()
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    torch.save(whole, sys.argv[1])
"""

SPAWNED = """
import os, torch
from torch import distributed, multiprocessing as mp, nn

def train(rank, world):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
    distributed.init_process_group("nccl", rank=rank, world_size=world)
    torch.cuda.memory._record_memory_history()
    generator = torch.Generator(device="cuda").manual_seed(rank)
    assert isinstance(generator, torch.Generator) and generator.device.type == "cuda"
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 8).to(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    while True:
        x = torch.randn(4, 3, 64, device="cuda", generator=generator)
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 3, 2, 1]), batch_first=True)
        assert packed.batch_sizes.tolist() == [4, 3, 2] and packed.data.shape == (9, 64)
        model(packed.data).unsqueeze_(0).squeeze_(0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode():
            accuracy = (model(x).argmax(-1) == 0).float().mean().item()

if __name__ == "__main__":
    mp.spawn(train, args=(2,), nprocs=2)
"""
MESHED = """
import torch
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cuda", (2,))  # which starts the process group
half = fsdp.MixedPrecision(torch.bfloat16)
with torch.device("meta"):
    layers = torch.nn.Sequential(*(fsdp.FullyShardedDataParallel(
        torch.nn.Linear(512, 512, device="cuda"), device_mesh=mesh, mixed_precision=half) for _ in range(2)))
model = fsdp.FullyShardedDataParallel(layers, device_mesh=mesh, mixed_precision=half)
first, unused = (torch.optim.SGD(one.parameters(), 0.1) for one in (model, torch.nn.Linear(4, 4).cuda()))
while True:
    with torch.no_grad():
        reward = model(torch.randn(8, 512, device="cuda")).float().cpu().numpy()
    assert reward.shape == (8, 512) and not reward.any()
    model(torch.randn(8, 512, device="cuda")).sum().backward()
    first.step()
    first.zero_grad()
"""
CUT = """
import os, torch
from torch import distributed
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

distributed.init_process_group("nccl")
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 256))
pipe = pipeline(model, mb_args=(torch.randn(4, 256),), split_spec={"1": SplitPoint.BEGINNING})
stage = pipe.build_stage(distributed.get_rank(), torch.device("cuda"))
schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, _: y.sum())
optimizer = torch.optim.SGD(stage.submod.parameters(), 0.1)
x = torch.randn(8, 256).cuda()
while True:
    schedule.step(x) if distributed.get_rank() == 0 else schedule.step(target=x)
    optimizer.step()
    optimizer.zero_grad()
"""
GRAPHED = """
import torch

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x, side = torch.randn(8, 64, device="cuda"), torch.cuda.Stream()

def step():
    model(x).sum().backward()
    optimizer.step()

with torch.cuda.stream(side):
    for _ in range(3):
        step()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    step()
while True:
    x.fill_(1)
    graph.replay()
"""


SPEECH = """
import torch
from torch import nn

lstm, gru, head = nn.LSTM(40, 64, 2, bidirectional=True), nn.GRU(128, 64), nn.Linear(64, 12)
model = nn.ModuleList([lstm, gru, head]).cuda()
optimizer = torch.optim.Adam(model.parameters())
labels, lengths, steps = torch.randint(1, 12, (4, 9)), torch.tensor([9, 5, 7, 3]), torch.full((4,), 30)
while True:
    out, _ = lstm(torch.randn(30, 4, 40, device="cuda"))
    packed, _ = gru(nn.utils.rnn.pack_padded_sequence(out, [30, 30, 20, 10]))
    out, _ = nn.utils.rnn.pad_packed_sequence(packed)
    scores = head(out).unsqueeze(0).squeeze_((0,)).log_softmax(-1)
    loss = nn.functional.ctc_loss(scores, labels.cuda(), steps, lengths)
    loss = loss + nn.functional.ctc_loss(scores, labels.cuda(), steps.cuda(), lengths.cuda())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

CURVATURE = """
import torch
from torch import nn
from torch.func import functional_call, hessian, vmap

net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).cuda()
optimizer = torch.optim.Adam(net.parameters())
points = torch.rand(16, 2, device="cuda")


def of(parameters, point):
    return functional_call(net, parameters, (point,)).squeeze(-1)


while True:
    optimizer.zero_grad()
    vmap(hessian(of, 1), (None, 0))(dict(net.named_parameters()), points).pow(2).mean().backward()
    optimizer.step()
"""

BEYOND = """
import torch
from torch.nn import functional as F

w = torch.nn.Parameter(torch.randn(64, 64, device="cuda"))
optimizer = torch.optim.SGD([w], 0.1)
while True:
    ragged = torch.nested.nested_tensor([torch.randn(n, 64) for n in (8, 24)], layout=torch.jagged, device="cuda")
    heads = F.linear(ragged.bfloat16(), w.bfloat16()).unflatten(-1, (4, 16)).transpose(1, 2)
    attended = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(-2).values().float()
    assert attended.shape == (32, 64)
    fitted, left, *_ = torch.linalg.lstsq(attended, torch.ones(32, 3, device="cuda"), driver="gels")
    a, b = torch.linalg.lstsq(w[:, :8], torch.ones(64, 3, device="cuda"))[:2]
    assert a.shape == (8, 3) and b.shape == (3,) and fitted.shape == (64, 3) and left.numel() == 0
    scale, zero = torch.ones(64, device="cuda"), torch.zeros(64, dtype=torch.int32, device="cuda")
    coarse = torch.fake_quantize_per_channel_affine(w, scale, zero, 0, -128, 127)
    solved = torch.cholesky_solve(a, torch.linalg.cholesky(w[:8, :8]))
    loss = F.multi_margin_loss(coarse, torch.zeros(64, dtype=torch.long, device="cuda")) + solved.sum() + attended.sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

SPARSE = """
import torch

tables = [torch.nn.Embedding(1000, 16, sparse=True).cuda() for _ in range(3)]
kinds = torch.optim.SparseAdam, torch.optim.Adagrad, torch.optim.SGD
optimizers = [kind(table.parameters(), 0.1) for kind, table in zip(kinds, tables)]
while True:
    for _ in range(2):
        sum(table(torch.randint(0, 1000, (64,), device="cuda")).sum() for table in tables).backward()
    assert tables[0].weight.grad.is_sparse
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in reversed(optimizers):
        optimizer.zero_grad()
"""


def captured(folder: Path, text: str, *words: str, ranks: int = 1) -> Capture:
    (folder / "script.py").write_text(text)
    out = folder / "script.capture.gz"
    asked = ["capture", str(folder / "script.py"), "-o", str(out), f"--ranks={ranks}", "--", *words]
    assert main(asked) == ExitCode.OK
    return read_capture(out)


def held(capture: Capture) -> Counter[str]:
    """Bytes of each category between two steps."""
    found = Counter[str]()
    for storage, size in capture.resident().items():
        found[capture.categories[storage]] += size
    return found


def operators(capture: Capture, phase: Phase) -> Counter[str]:
    """Of the recorded step, by name."""
    events = (one for one in capture.events[capture.steady :] if one[0] == Kind.OPERATOR and one[4] == phase)
    return Counter(capture.signatures[one[1]][0] for one in events)


def test_an_optimizer_takes_parameters_together_unless_told_otherwise(tmp_path: Path) -> None:
    """torch's default on a GPU (`_default_to_fused_or_foreach`): of 80 parameters no kernel each. Nor of their norms.

    Losses are finite, arguments valid, and a loss can be printed.
    """
    capture = captured(tmp_path, EVERY_DAY)
    assert {name.partition(".")[2][:9] for name in operators(capture, Phase.OPTIMIZER)} == {"_foreach_"}
    assert not any(
        "linalg_vector_norm" in name and count > 2 for name, count in operators(capture, Phase.FORWARD).items()
    )
    assert operators(capture, Phase.FORWARD)["aten._cudnn_rnn.default"] == 1  # its GRU
    assert "whether all of 16 values are true, which nobody knows: True" in capture.answers
    assert held(capture)["parameters"] == 4 * (
        40 * (64 * 64 + 64) + 3 * 64 * (64 + 64 + 2)
    )  # the GRU's, which no optimizer has
    assert held(capture)["buffers"] == 4 * 1024


def test_speech_is_cudnn_s_layers_and_ctc_s_kernels(tmp_path: Path) -> None:
    """A call each way, whatever the number of steps; lengths on the CPU are read there, those on the GPU have no values."""
    capture = captured(tmp_path, SPEECH)
    forward, backward = (operators(capture, phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
    assert (forward["aten._cudnn_rnn.default"], backward["aten._cudnn_rnn_backward.default"]) == (2, 2)
    assert (forward["aten._ctc_loss.default"], forward["aten._ctc_loss.Tensor"]) == (1, 1)
    assert sum(count for name, count in backward.items() if name.startswith("aten._ctc_loss_backward")) == 2
    (places,) = [one[2][1][2] for one in capture.signatures if one[0] == "aten._ctc_loss.default"]
    assert places == [4, 30, 2 * 9 + 1]  # batch, steps, the longest label with blanks around
    assert not any("cell" in name or "squeeze_" in name for name in forward)


def test_ragged_batches_solvers_and_operators_whose_shapes_torch_knows_by_running_them(tmp_path: Path) -> None:
    """Sequences end to end are one flash kernel; what no device has a kernel for is what it is made of."""
    capture = captured(tmp_path, BEYOND)
    forward, backward = (operators(capture, phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
    assert forward["aten._flash_attention_forward.default"] == 1
    assert forward["aten.fake_quantize_per_channel_affine_cachemask.default"] == 1
    assert forward["aten._cholesky_solve_helper.default"] == 1
    assert backward["aten._flash_attention_backward.default"] == 1
    assert backward["aten.multi_margin_loss_backward.default"] == 1
    assert not {"aten.matmul.default", "aten.linear.default", "aten.cholesky_solve.default"} & forward.keys()


def test_derivatives_of_both_modes(tmp_path: Path) -> None:
    """Forward over reverse, mapped over a batch: zeros that torch makes without a storage are no reason to fail."""
    capture = captured(tmp_path, CURVATURE)
    assert any(one.startswith("zeros without a storage") for one in capture.answers)
    assert operators(capture, Phase.BACKWARD)


def test_a_hook_of_the_program_s_own_reduces_what_it_sends(tmp_path: Path) -> None:
    """bf16: half of the bytes; what it does behind that runs on another stream, which the optimizer's waits for.

    One parameter: ZeroRedundancyOptimizer gives it to the first rank, which broadcasts it.
    """
    capture = captured(tmp_path, HOOK, ranks=2)
    step = capture.events[capture.steady :]
    sent = {(capture.names[one[2]], one[4]): one[1] for one in step if one[0] == Kind.COLLECTIVE}
    assert sent.keys() == {("all_reduce", 2 * 1024**2), ("broadcast", 4 * 1024**2)}
    number = sent["all_reduce", 2 * 1024**2]
    (beside,) = {one[1] for one in step if one[0] == Kind.WAIT_WORK and one[2] == number}
    copies = [one for one in step if one[0] == Kind.OPERATOR and one[2] == beside]
    assert [capture.signatures[one[1]][0] for one in copies] == ["aten.copy_.default"]
    assert [Kind.WAIT_STREAM, 0, beside] in step[step.index(copies[0]) :]
    assert beside != 0
    assert held(capture)["optimizer_state"] == 4 * 1024**2  # momentum, of the optimizer within the optimizer


@pytest.mark.parametrize("words", [[], ["any"]])
def test_experts_by_hand_take_equal_parts(words: list[str], tmp_path: Path) -> None:
    """By hand: two experts a token, whichever; forward and weights' gradients alone, as nobody asks for the input's."""
    capture = captured(tmp_path, EXPERTS, *words)
    assert captured_script(capture).flop == 1024 * 2 * 64 * (2 * 8 + 2 * (2 * 64))
    assert any("256 are chosen" in one for one in capture.answers)


def test_batch_norm_over_all_ranks_exchanges_its_statistics(tmp_path: Path) -> None:
    """In fp32: mean, deviation and count of 16 channels from each of two ranks; backward two sums of each channel.

    Each of its kernels reads and writes 4 x 16 x 8 x 8 numbers of 2 bytes once: statistics read, the result is read and written,
    backward both sums read two of them and the gradient three.
    """
    capture = captured(tmp_path, SYNCHRONISED, ranks=2)
    step = capture.events[capture.steady :]
    sent = [(capture.names[one[2]], one[4]) for one in step if one[0] == Kind.COLLECTIVE]
    assert sent == [("all_gather", 2 * (2 * 16 + 1) * 4), ("all_reduce", 2 * 16 * 4)]
    script = captured_script(capture)
    assert not script.unpriced
    moved = [one.kernels[0].num_bytes for one in script.step if isinstance(one, Launch) and one.category == "norm"]
    large = 2 * 4 * 16 * 8 * 8
    assert [size // large for size in moved] == [1, 2, 2, 3]


LOADED = """
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

data = TensorDataset(torch.zeros(64, 256))
batches = BatchSampler(RandomSampler(data), 16, True)
model = torch.nn.Linear(256, 8, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, in DataLoader(data, 1, None, None, batches, 2, None, pin_memory=True):
    model(x.cuda()).sum().backward()
    optimizer.step()
"""


def test_a_loader_keeps_its_sampler_and_pins_its_batches(tmp_path: Path) -> None:
    """Batches of 16 rows of 256 numbers come at the speed of pinned memory; workers are none, wherever their number stands."""
    capture = captured(tmp_path, LOADED)
    kernels = [one.kernels[0] for one in captured_script(capture).step if isinstance(one, Launch) and one.kernels]
    assert [(one.num_bytes, one.over) for one in kernels if isinstance(one, Stated) and one.over] == [
        (4 * 16 * 256, "h2d")
    ]
    assert "DataLoader(num_workers=2): 0" in capture.answers


def test_what_stays_on_the_cpu_takes_its_time(tmp_path: Path) -> None:
    """A weight of 4 MiB comes over PCIe, its gradient goes back while the host waits, as a copy into pinned memory does, and the CPU reads both and writes one."""
    script = captured_script(captured(tmp_path, ON_CPU))
    whole = 4 * 1024**2
    passed = [(one.kernels[0], one.waits) for one in script.step if isinstance(one, Launch) and one.kernels]
    moved = [
        (kernel.num_bytes, kernel.over, waits) for kernel, waits in passed if isinstance(kernel, Stated) and kernel.over
    ]
    assert moved == [(whole, "h2d", False), (whole, "d2h", True), (whole, "pageable", True), (3 * whole, "cpu", True)]


@pytest.mark.parametrize(("said", "linear"), [("highest", "fp32"), ("high", "tf32")])
def test_products_in_fp32_run_on_tensor_cores_where_torch_lets_them(said: str, linear: str, tmp_path: Path) -> None:
    """`torch.backends`: cuDNN's convolutions may by default, products where the program says so."""
    script = captured_script(captured(tmp_path, TENSOR_CORES, said))
    products = {(one.label.partition(": ")[2].split()[0], kernel.dtype) for one in script.step if isinstance(one, Launch)
                for kernel in one.kernels if isinstance(kernel, Gemm)}  # fmt: skip
    assert products == {("convolution", "tf32"), ("convolution_backward", "tf32"), ("addmm", linear), ("mm", linear)}


def test_no_checkpoint_is_written(tmp_path: Path) -> None:
    """But what gathers a whole state for one is part of the step: weight and bias, from each of two ranks."""
    capture = captured(tmp_path, CHECKPOINTS, str(tmp_path / "saved"), ranks=2)
    assert not (tmp_path / "saved").exists()
    gathered = [one[4] for one in capture.events[capture.steady :] if one[:1] == [Kind.COLLECTIVE]]
    assert {4 * 64 * 64, 4 * 64} <= set(gathered)


SAVED = """
import sys
import torch

sys.path.insert(0, sys.argv[1])
from safetensors.torch import save_file

model = torch.nn.Linear(256, 8, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
while True:
    model(torch.ones(2, 256, device="cuda")).sum().backward()
    optimizer.step()
    save_file(model.state_dict(), sys.argv[1] + "/weights.safetensors")
"""


def test_other_packages_write_no_weights_either(tmp_path: Path) -> None:
    """A package of that name stands in for the real one: what it would do with the bytes of a weight fails."""
    (tmp_path / "safetensors").mkdir()
    (tmp_path / "safetensors" / "__init__.py").touch()
    (tmp_path / "safetensors" / "torch.py").write_text(
        "def save_model(model, name): ...\n"
        "def save_file(tensors, name):\n"
        "    open(name, 'wb').write(next(iter(tensors.values())).numpy().tobytes())\n"
    )
    assert captured(tmp_path, SAVED, str(tmp_path)).events
    assert not (tmp_path / "weights.safetensors").exists()


def test_a_mesh_starts_the_group_and_what_fsdp_has_freed_is_used_on_no_stream(tmp_path: Path) -> None:
    """Also: values as an array, and an optimizer that does not step."""
    capture = captured(tmp_path, MESHED, ranks=2)
    gathered = [one[4] for one in capture.events[capture.steady :] if one[0] == Kind.COLLECTIVE]
    assert gathered.count(2 * (512 * 512 + 512)) == 8  # in bf16, of each layer: forwards twice, backward, gradients
    assert "4,096 values of a tensor as a NumPy array: 0" in capture.answers
    assert "a step ends with the first optimizer's: 1 of others did not step within it" in capture.answers


def test_a_model_is_cut_into_stages_by_torch_export(tmp_path: Path) -> None:
    """Two micro-batches there, and their gradients back; backward a product each, as nobody asks for the input's gradient."""
    capture = captured(tmp_path, CUT, ranks=2)
    step = capture.events[capture.steady :]
    assert [one[5] for one in step if one[0] == Kind.MESSAGE] == 4 * [4 * 4 * 512]
    assert operators(capture, Phase.BACKWARD)["aten.mm.default"] == 2


def test_steps_that_warm_up_for_a_graph_are_none(tmp_path: Path) -> None:
    """The recorded one is a replay: with the copy into the graph's input, and on the default stream."""
    capture = captured(tmp_path, GRAPHED)
    ran = [one for one in capture.events[capture.steady :] if one[0] == Kind.OPERATOR]
    assert capture.signatures[ran[0][1]][0] == "aten.fill_.Scalar"
    assert {one[2] for one in ran} == {0}
    assert not any("did not step" in one for one in capture.answers)


def test_spawn_runs_the_captured_rank(tmp_path: Path) -> None:
    """Also: generators on the GPU, packed sequences, evaluation without autograd, which takes operators apart as otherwise."""
    capture = captured(tmp_path, SPAWNED, ranks=2)
    ran = operators(capture, Phase.FORWARD)
    assert ran["aten.addmm.default"] == 2  # in training and in evaluation
    assert not {"aten.linear.default", "aten.squeeze_.dim", "aten.item.default"} & set(ran)
    assert "torch.multiprocessing.spawn(nprocs=2): the captured rank's process alone" in capture.answers


def test_sparse_gradients_are_their_rows(tmp_path: Path) -> None:
    """Of a table of 1,000 rows of 16 the 64 that were picked, twice over two backwards; each optimizer takes what it takes of them.

    An index is 8 bytes, a value 4. SparseAdam and Adagrad add up equal rows first, which sorts them.
    """
    capture = captured(tmp_path, SPARSE)
    assert held(capture)["gradients"] == 3 * 2 * 64 * (8 + 16 * 4)
    update = operators(capture, Phase.OPTIMIZER)
    assert update["aten.sort.default"] == 2
    assert update["aten.index_add_.default"] == 3 + 2 + 1  # averages and tables
    assert "which of 128 rows of a sparse gradient differ: all of them" in capture.answers
    assert not any("sparse" in name for name, _, _ in capture.signatures)


OWN_NAMES = {
    "validate.py": "import simulator.deep\n\n\ndef evaluate():\n    return simulator.deep.WORTH + simulator.WORTH\n",
    "simulator/__init__.py": "WORTH = 1\n",
    "simulator/deep.py": "WORTH = 2\n",
    "selectors.py": "raise SystemExit('not mine')\n",  # python -m would find it before the library's
    "train.py": """
import torch
from torch.distributed.fsdp import fully_shard
import validate

torch.distributed.init_process_group("nccl")
model = torch.nn.Linear(64, 64, device="cuda")
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.zeros(4, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    import simulator

    assert validate.evaluate() == 3 and simulator.WORTH == 1
""",
}


def collectives_alone(folder: Path, script: str, **variables: str) -> int:
    """Of the step of a script that is captured in a process of its own, as from a shell."""
    command = [sys.executable, "-P", "-m", "simulator.cli", "capture", script, "--ranks", "2", "-o", "step.capture.gz"]
    ended = subprocess.run(command, cwd=folder, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert ended.returncode == ExitCode.OK, ended.stderr
    found = read_capture(folder / "step.capture.gz")
    return sum(one[0] == Kind.COLLECTIVE for one in found.events[found.steady :])


def test_a_repository_may_have_modules_of_our_names(tmp_path: Path) -> None:
    """What the program imports is its own, what this project imports stays this project's."""
    for name, text in OWN_NAMES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert collectives_alone(tmp_path, "train.py") == 2  # one unit is gathered once, its gradients reduced once


def test_a_validate_of_ones_own_may_lie_on_the_path(tmp_path: Path) -> None:
    """There a script in a folder of its own finds it."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "validate.py").write_text("def evaluate():\n    return 3\n")
    text = OWN_NAMES["train.py"].replace("    import simulator\n\n", "").replace(" and simulator.WORTH == 1", "")
    (tmp_path / "scripts" / "train.py").write_text(text)
    assert collectives_alone(tmp_path, "scripts/train.py", PYTHONPATH=str(tmp_path)) == 2


def test_a_process_that_ends_itself_before_the_step_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ends.py").write_text("import os\nos._exit(0)\n")
    assert main(["capture", str(tmp_path / "ends.py"), "-o", str(tmp_path / "x.capture.gz")]) == ExitCode.BAD_INPUT
    assert "its process ended with exit code 0 before its recorded step did" in capsys.readouterr().err
    assert not (tmp_path / "x.capture.gz").exists()
