"""Captures of parts of torch that some programs use: lazy modules, inverse spectrograms, TorchScript, loops until all are done."""

from __future__ import annotations

import pickle
from pathlib import Path
from subprocess import CalledProcessError

import pytest

from simulator.work.captured.capture import Kind, Phase
from simulator.work.captured.script import captured_script
from tests.validate.test_capture_scripts import captured, operators
from validate.capture import child
from validate.capture.log import Log

pytestmark = pytest.mark.usefixtures("warm_captures")

PARTS = """
import torch
from torch import nn

lazy = nn.Sequential(nn.LazyConv1d(5, 3), nn.LazyBatchNorm1d(), nn.Flatten(), nn.LazyLinear(32), nn.LazyLinear(32, device="cuda"))
lazy.cuda()
torch.cuda.memory.set_per_process_memory_fraction(0.9)
assert not torch.cuda.memory.memory_summary()
scripted = torch.jit.script(nn.Linear(32, 32)).cuda()
encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 1).cuda().eval()
window = torch.hann_window(16, device="cuda")
lazy(torch.randn(4, 3, 8, device="cuda"))
optimizer = torch.optim.SGD([*lazy.parameters(), *scripted.parameters()], 0.1)
rollouts = 0
while True:
    hidden = scripted(lazy(torch.randn(4, 3, 8, device="cuda")))
    rollouts += 1
    for _ in range(8 if rollouts % 2 else 0):
        with torch.no_grad():
            padding = torch.zeros(4, 6, dtype=torch.bool, device="cuda")
            encoder(torch.randn(4, 6, 32, device="cuda"), src_key_padding_mask=padding)
    spectrum = torch.stft(hidden.reshape(1, 128), 16, 4, window=window, return_complex=True)
    sound = torch.istft(spectrum, 16, 4, window=window)
    far = torch.pdist(hidden).sum() + torch.cdist(hidden, sound.reshape(4, -1), p=1).sum()
    far.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_parts_of_torch_that_some_programs_use(tmp_path: Path) -> None:
    """Parameters get their shape where they were moved; kernels of a layer, a mask and a module of TorchScript run one by one.

    Gradients of distances take a share of each coordinate of each pair: 4 × 4 pairs of 32, and 4 × 3 of one set, 4 bytes each.
    """
    capture = captured(tmp_path, PARTS)
    assert sum(size == 4 * 32 * 32 for size in capture.resident().values()) >= 2  # lazy weights among them
    forward = operators(capture, Phase.FORWARD)
    assert not any("nested" in name or "encoder" in name or "multi_head" in name for name in forward)
    assert forward["aten._scaled_dot_product_efficient_attention.default"] == 8  # in fp32, with a mask
    assert any(one.startswith("the fast path of nn.Transformer") for one in capture.answers)
    assert any(one.startswith("torch.jit.script") for one in capture.answers)
    assert any(one.startswith("steps differ") for one in capture.answers)
    begun = [one[2] for one in capture.events[capture.steady :] if one[0] == Kind.ALLOCATE]
    assert {4 * 16 * 32, 4 * 12 * 32} <= set(begun)


LOOPS = """
import torch
from torch import nn

model, side = nn.Linear(16, 16).cuda(), torch.cuda.Stream()


def closure():
    optimizer.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    return loss


optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=12, line_search_fn="strong_wolfe")
while True:
    x, turns = torch.randn(8, 16).cuda(), 0
    done, running = torch.zeros(8, dtype=torch.bool, device="cuda"), torch.ones(8, dtype=torch.bool, device="cuda")
    while not done.all() and running.any() and turns < 7:
        ended = model(x).argmax(-1) == 0
        done, running, turns = done | ended, running & ~ended, turns + 1
    assert turns == 7 and running.all()  # which is no such loop
    while turns and not (model(x).argmax(-1, keepdim=True) == 2).all():
        turns -= 1
    assert not turns
    with torch.cuda.stream(side):
        beside = model(x)
    beside.sum().backward()
    optimizer.step(closure)
"""


def test_loops_until_values_say_so_take_all_their_turns(tmp_path: Path) -> None:
    """A product a turn of two loops, one on another stream, as its backward is; of LBFGS one evaluation and one an iteration, each with a product back."""
    capture = captured(tmp_path, LOOPS)
    assert operators(capture, Phase.FORWARD)["aten.addmm.default"] == 7 + 7 + 1
    inside = operators(capture, Phase.OPTIMIZER)
    assert inside["aten.addmm.default"] == inside["aten.mm.default"] == 1 + 4
    step = capture.events[capture.steady :]
    back = [at for at, one in enumerate(step) if one[0] == Kind.OPERATOR and one[2]]
    side, names = {step[at][2] for at in back}, [capture.signatures[step[at][1]][0] for at in back]
    assert len(side) == 1
    assert names[0] == "aten.addmm.default"
    own = ["aten.add_.Tensor"] * 2  # the leaves' own nodes, to the gradients that are there
    assert sorted(names[1:]) == [*own, "aten.mm.default", "aten.sum.dim_IntList"]
    # autograd's engine lets it wait for the gradient, and the default stream for what it leaves (torch 2.13, engine.cpp)
    waits = [one[1] for one in step[back[0] : back[-1] + 8] if one[0] == Kind.WAIT_EVENT]
    assert waits == [*side, 0]
    assert {one.partition(":")[0] for one in capture.answers} >= {
        "whether all of a loop's elements are done",
        "whether LBFGS has converged",
        "LBFGS with a part of its history",
    }
    pairs = [size for size in capture.resident().values() if size == 4 * (16 * 16 + 16)]
    assert len(pairs) >= 2 * (
        2 * 4 - 1
    )  # directions and differences: none of the first iteration, which has none before


REDUCED = """
import os, torch
from torch import distributed, nn

os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
distributed.init_process_group("nccl")
hosts = distributed.new_group(backend="gloo")
model, name = nn.Linear(64, 64).cuda(), distributed.group.WORLD.group_name
optimizer, part, ops = torch.optim.SGD(model.parameters(), 0.1), torch.empty(32, device="cuda"), torch.ops._c10d_functional
for rows in (8, 8, 512):
    model(torch.randn(rows, 64, device="cuda")).sum().backward()
    ops.wait_tensor(ops.reduce_scatter_tensor_out(torch.ones(64, device="cuda"), "sum", 2, name, out=part))
    for one in ops.all_reduce_coalesced_([each.grad for each in model.parameters()], "sum", name):
        ops.wait_tensor(one)
    for group in (hosts, None):
        distributed.all_gather_object(found := [None, None], "loss", group=group)
        assert found == ["loss", "loss"]
    torch.cuda.empty_cache()
    optimizer.step()
"""


def test_collectives_into_tensors_that_are_there_and_of_objects(tmp_path: Path) -> None:
    """NCCL's groups send the length of each rank's object, then its bytes; gloo's do it beside the GPU."""
    capture = captured(tmp_path, REDUCED, ranks=2)
    found = [one for one in capture.events[capture.steady :] if one[0] == Kind.COLLECTIVE]
    assert [(capture.names[one[2]], one[4]) for one in found] == [
        ("reduce_scatter", 4 * 64),
        ("all_reduce", 4 * (64 * 64 + 64)),
        ("all_gather", 2 * 8),
        ("all_gather", 2 * len(pickle.dumps("loss"))),
    ]
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True: predict takes it as --alloc-conf" in capture.answers
    assert any(one.startswith("torch.cuda.empty_cache") for one in capture.answers)
    assert any(one.startswith("steps differ") for one in capture.answers)  # in bytes, as often as before


PACKED = """
import torch
from torch.nn.attention.varlen import varlen_attn

w = torch.nn.Parameter(torch.ones(96, 3, 4, 16, device="cuda", dtype=torch.bfloat16))
begins, optimizer = torch.tensor([0, 24, 96], dtype=torch.int32, device="cuda"), torch.optim.SGD([w], 0.1)
while True:
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        varlen_attn(*w.unbind(1), begins, begins, 72, 72, window_size=(-1, 0)).sum().backward()
    optimizer.step()
    chosen = torch.rand(32, device="cuda") > 0.5
    assert int(chosen.sum()) == len(chosen.nonzero()) == 32 and chosen.view(8, 4).sum(1).tolist() == [4] * 8
"""


def test_packed_sequences_attend_by_their_mean_length(tmp_path: Path) -> None:
    """Two sequences of 48 on average, causal: half of 2 x 2 x 48 x 48 x 16 for each of 4 heads, two and a half times back."""
    capture = captured(tmp_path, PACKED)
    script = captured_script(capture)
    assert not script.unpriced
    assert script.flop == 2 * 4 * (2 * 2 * 48 * 48 * 16 // 2) * 7 // 2


def test_many_answers_that_differ_in_numbers_are_one() -> None:
    log = Log()
    for places in range(991, 1001):
        log.answer(f"a mask of {places:,} places of 7: all")
    log.answer("a value of fp32: 0.0")
    assert log.as_json()["answers"] == {"a mask of 991 to 1,000 places of 7: all": 10, "a value of fp32: 0.0": 1}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (CalledProcessError(1, "g++", stderr=b"cc1plus: warning\nas: guard.o: File too large\n"), "as: guard.o: File too large"),
        (CalledProcessError(1, "g++", stderr=b"g++: fatal error: no cc1plus\ncompilation terminated.\n"), "g++: fatal error: no cc1plus"),
        (CalledProcessError(1, "g++", stderr=b""), "Command 'g++' returned non-zero exit status 1."),
        (BlockingIOError(11, "Resource temporarily unavailable"), "[Errno 11] Resource temporarily unavailable"),
    ],
)  # fmt: skip
def test_a_guard_that_cannot_be_built_is_no_fault_of_the_program(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Under `ulimit -u` and `-f`: "the program raised CalledProcessError", with a traceback of ours."""

    def failing(_: Path) -> None:
        raise error

    monkeypatch.setattr(child.guard, "needs_guard", lambda: True)
    monkeypatch.setattr(child.guard, "stand_in", failing)
    with pytest.raises(child.RefusedError) as raised:
        child._load()
    kind, text = child._explained(tmp_path, raised.value)
    assert (kind, text) == ("bad_plan", f"what stands for a GPU cannot be built here: {said}")
    assert not [*tmp_path.iterdir()]
