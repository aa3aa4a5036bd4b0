"""torch.compile in captures: what Inductor fuses and what AOTAutograd saves, without a GPU and without Triton."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.formats.readers.capture import read_capture
from simulator.predict.program import predict_program
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.captured.capture import Capture, Kind, Phase
from simulator.work.captured.changed import forwards
from simulator.work.ops import build_blocks
from validate.compare.borders import step_events

pytestmark = pytest.mark.usefixtures("warm_captures")

SCRIPT = Path(__file__).resolve().parents[1] / "data" / "capture" / "llama.py"
LAYERS, WIDTH, VOCAB, SEQ = 2, 2048, 32768, 2048
MODEL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": WIDTH, "intermediate_size": 7168,
    "num_hidden_layers": LAYERS, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": VOCAB,
    "tie_word_embeddings": False, "max_position_embeddings": SEQ, "rope_theta": 10000.0,
}  # fmt: skip
BLOCK = """
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self, d=512, f=1408):
        super().__init__()
        self.n = nn.Parameter(torch.ones(d))
        self.g, self.u, self.d = nn.Linear(d, f, bias=False), nn.Linear(d, f, bias=False), nn.Linear(f, d, bias=False)

    def forward(self, x):
        y = F.rms_norm(x, (x.shape[-1],), self.n, 1e-5)
        return x + self.d(F.silu(self.g(y)) * self.u(y))

model = Block().to("cuda", torch.bfloat16)
model = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
while True:
    x = torch.randn(8, 256, 512, device="cuda", dtype=torch.bfloat16)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CHECKPOINTED = BLOCK.replace(
    "model = torch.compile(model)",
    """
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
model = checkpoint_wrapper(model, preserve_rng_state=False)
model.compile()
""",
)
ATTENDING = """
import torch
from torch.nn import functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.out = torch.nn.Linear(256, 768, bias=False), torch.nn.Linear(256, 256, bias=False)

    def forward(self, x):
        q, k, v = self.w(x).view(2, 128, 3, 4, 64).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        return F.dropout(self.out(y.transpose(1, 2).reshape(2, 128, 256)), 0.1)

model = checkpoint_wrapper(Block().to("cuda", torch.bfloat16))
model.compile()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
while True:
    model(torch.randn(2, 128, 256, device="cuda", dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
FLEX = """
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

flex = torch.compile(flex_attention)

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Linear(256, 768, bias=False)

    def forward(self, x, mask=None):
        q, k, v = self.w(x).view(2, 256, 3, 4, 64).permute(2, 0, 3, 1, 4)
        return flex(q, k, v, block_mask=mask).transpose(1, 2).reshape(2, 256, 256)

model = Block().to("cuda", torch.bfloat16)
model.compile()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
document = torch.zeros(256, dtype=torch.long, device="cuda")
causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cuda")
documents = create_block_mask(lambda b, h, q, k: document[q] == document[k], None, None, 256, 256, device="cuda")
while True:
    x = torch.randn(2, 256, 256, device="cuda", dtype=torch.bfloat16)
    model(model(model(x, causal), documents)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CLOSED_OVER = """
import sys, torch
from torch.nn import functional as F

model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)

@torch.compile
def loss_of(x, y):
    return F.mse_loss(model(x), y)

@torch.compile
def step(x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()

while True:
    x, y = (torch.randn(64, 256, device="cuda") for _ in range(2))
    if sys.argv[1:]:
        step(x, y)
    else:
        loss_of(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
TIED = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(1024, 64), torch.nn.Linear(64, 1024, bias=False)
        self.table.weight = self.head.weight

    def forward(self, ids):
        return self.head(torch.nn.functional.dropout(self.table(ids), 0.1))

model = torch.compile(Model().cuda())
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
while True:
    model(torch.randint(1024, (4, 32), device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
UNTRACEABLE = (
    BLOCK.replace("return x +", "print(float(y.sum())); return x +")
    .replace(
        "    optimizer.step()",
        """
    from torch.distributed._functional_collectives import all_reduce
    total = all_reduce(x.detach(), "sum", group)  # on its way when the region begins, which waits for it
    torch.compile(lambda one: all_reduce(one * 2, "sum", group) + one)(total)
    optimizer.step()""",
    )
    .replace(
        "while True:",
        "torch.distributed.init_process_group('nccl')\ngroup = torch.distributed.group.WORLD\nwhile True:",
    )
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


def captured(script: Path, out: Path, *flags: str, words: tuple[str, ...] = ()) -> Capture:
    assert main(["capture", str(script), "-o", str(out), *flags, "--", *words]) == ExitCode.OK
    return read_capture(out)


def forward(capture: Capture) -> list[tuple[str, int]]:
    """Kernels of the forward inside modules: name, and the bytes of those that Inductor made."""
    found = []
    for event in capture.events[capture.steady :]:
        if event[0] == Kind.OPERATOR and event[4] == Phase.FORWARD:
            name = capture.signatures[event[1]][0].split(".")[1]
            found.append((name, capture.costs[event[1]].bytes if event[1] in capture.costs else 0))
    return found


def test_a_block_becomes_the_kernels_that_inductor_would_launch(folder: Path) -> None:
    """Norm in one, three products, silu and product in one, the residual in one; bytes by hand."""
    (folder / "block.py").write_text(BLOCK)
    capture = captured(folder / "block.py", folder / "block.capture.gz", "--ranks=1")
    x, hidden, rows = 8 * 256 * 512 * 2, 8 * 256 * 1408 * 2, 8 * 256
    norm = 2 * x + 2 * 512 + 4 * rows  # x in, y out; the weight; the inverse root that the backward needs
    kernels = [one for one in forward(capture) if one[0] in ("fused", "mm")]
    assert kernels == [("fused", norm), ("mm", 0), ("mm", 0), ("fused", 3 * hidden), ("mm", 0), ("fused", 3 * x)]
    assert any("Inductor's kernels" in what for what in capture.answers)


def test_a_checkpoint_inside_a_region_is_the_partitioner_s(folder: Path) -> None:
    """Between forward and backward nothing wide is kept; back, two products again, not the last, and two of each gradient."""
    (folder / "checkpointed.py").write_text(CHECKPOINTED)
    capture = captured(folder / "checkpointed.py", folder / "checkpointed.capture.gz", "--ranks=1")
    alive, products, hidden = capture.resident(), list[str](), 8 * 256 * 1408 * 2
    for event in capture.events[capture.steady :]:
        if event[0] == Kind.OPERATOR and event[4] == Phase.BACKWARD:
            products.append(capture.signatures[event[1]][0])
        elif event[0] == Kind.ALLOCATE and not products:
            alive[event[1]] = event[2]
        elif event[0] == Kind.FREE and not products:
            del alive[event[1]]
    assert hidden not in alive.values()
    assert products.count("aten.mm.default") == 2 + 2 * 3
    assert not any("not compiled" in one for one in capture.answers)


def test_a_checkpoint_draws_its_random_numbers_again(folder: Path) -> None:
    """Attention, which may drop, is made again by the kernel of the forward, and its own backward follows."""
    (folder / "attending.py").write_text(ATTENDING)
    capture = captured(folder / "attending.py", folder / "attending.capture.gz", "--ranks=1")
    assert [what for what in capture.answers if what.startswith("torch.compile")] == [
        "torch.compile: Inductor's kernels, one graph a region"
    ]
    named = [
        (capture.signatures[one[1]][0], one[4]) for one in capture.events[capture.steady :] if one[0] == Kind.OPERATOR
    ]
    flash = "aten._scaled_dot_product_flash_attention"
    attention = [(name.removeprefix(flash), phase) for name, phase in named if name.startswith(flash)]
    assert attention == [
        (".default", Phase.FORWARD),
        (".default", Phase.BACKWARD),
        ("_backward.default", Phase.BACKWARD),
    ]


def test_a_region_that_cannot_be_traced_runs_as_it_is_written(folder: Path) -> None:
    (folder / "value.py").write_text(UNTRACEABLE)
    capture = captured(folder / "value.py", folder / "value.capture.gz", "--ranks=8")
    assert ("silu", 0) in forward(capture)
    assert any(what.startswith("torch.compile: not compiled") for what in capture.answers)
    step = [event for event in capture.events[capture.steady :] if event[0] in (Kind.COLLECTIVE, Kind.WAIT_WORK)]
    begun = [event[1] for event in step if event[0] == Kind.COLLECTIVE]
    assert [event[4] for event in step if event[0] == Kind.COLLECTIVE] == [8 * 256 * 512 * 2] * 2  # one in the region
    assert [event[2] for event in step if event[0] == Kind.WAIT_WORK] == begun  # each waited for once, in its order


def test_a_compiled_llama_is_the_described_compiled_stack(folder: Path) -> None:
    """Saved bytes of a block equal to the last one; the step within 5 %, whose products are the same."""
    words = (*map(str, (LAYERS, WIDTH, VOCAB, SEQ)), "compile")
    capture = captured(SCRIPT, folder / "llama.capture.gz", words=words)
    (folder / "config.json").write_text(json.dumps(MODEL))
    model, stack = Model.load(str(folder / "config.json")), Stack.load("torch-2.11-compiled")
    plan = Plan(dp_shard=8, zero=3, seq_len=SEQ, stack=stack.name)
    blocks = build_blocks(model, stack, plan)
    alive: dict[int, int] = {}
    for event in step_events(model, plan, stack, blocks):
        if event.moment[0] == "backward":
            break
        if event.kind == "free":
            alive.pop(event.storage, None)
        elif event.tag == "activations" and event.moment[2] == "layer1":
            alive[event.storage] = event.num_bytes
    one = forwards(capture)[1]
    result = WIDTH * SEQ * 2
    assert one.saved_bytes + result == sum(alive.values())
    cluster = Cluster.load("hgx-h100-8")
    from simulator.predict import predict

    ours, theirs = predict_program(capture, cluster, stack=stack), predict(model, plan, cluster, stack=stack)
    assert ours.hardware_flop_per_step == theirs.hardware_flop_per_step
    assert ours.step_s == pytest.approx(theirs.step_s, rel=0.05)


def test_tied_weights_and_dropout_are_compiled(tmp_path: Path) -> None:
    """A small language model's; dropout's numbers are drawn inside of the kernels that use them, so none stands alone."""
    (tmp_path / "tied.py").write_text(TIED)
    out = tmp_path / "tied.capture.gz"
    assert main(["capture", str(tmp_path / "tied.py"), "-o", str(out), "--ranks=1"]) == ExitCode.OK
    capture = read_capture(out)
    assert "torch.compile: Inductor's kernels, one graph a region" in capture.answers
    assert not any("not compiled" in one for one in capture.answers)
    assert not any("dropout" in name for name, _, _ in capture.signatures)


@pytest.mark.parametrize(("words", "eager"), [([], set()), (["step"], {"aten.mse_loss.default"})])
def test_a_function_s_modules_get_gradients(words: list[str], eager: set[str], tmp_path: Path) -> None:
    """One that only calls modules is a region with them; where it steps an optimizer, its modules are regions, and no more."""
    (tmp_path / "script.py").write_text(CLOSED_OVER)
    out = tmp_path / "script.capture.gz"
    assert main(["capture", str(tmp_path / "script.py"), "-o", str(out), "--ranks=1", "--", *words]) == ExitCode.OK
    capture = read_capture(out)
    ran = [event for event in capture.events[capture.steady :] if event[0] == Kind.OPERATOR]
    names = {phase: [capture.signatures[one[1]][0] for one in ran if one[4] == phase] for phase in Phase}
    assert sum(name.endswith("mm.default") for name in names[Phase.FORWARD]) == 1
    assert names[Phase.BACKWARD].count("aten.mm.default") == 1  # the weight's gradient; nobody asks for the input's
    assert {name for name in names[Phase.FORWARD] if "mse" in name} == eager
    assert names[Phase.OPTIMIZER]


def test_flex_attention_is_a_flash_kernel_of_what_its_mask_surely_leaves_out(tmp_path: Path) -> None:
    """Causal, of unknown documents, and without a mask: forward each once, within compiled blocks."""
    (tmp_path / "script.py").write_text(FLEX)
    out = tmp_path / "script.capture.gz"
    assert main(["capture", str(tmp_path / "script.py"), "-o", str(out), "--ranks=1"]) == ExitCode.OK
    capture = read_capture(out)
    ran = [capture.signatures[event[1]] for event in capture.events[capture.steady :] if event[0] == Kind.OPERATOR]
    forward = [args[0] for name, args, _ in ran if name == "aten._scaled_dot_product_flash_attention.default"]
    assert [one[4] if len(one) > 4 else False for one in forward] == [True, False, False]
    assert sum(name == "aten._scaled_dot_product_flash_attention_backward.default" for name, *_ in ran) == 3
    assert "torch.compile: Inductor's kernels, one graph a region" in capture.answers
