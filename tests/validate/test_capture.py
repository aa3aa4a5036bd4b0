"""Capturing programs: the step of a user's own script on fake CUDA tensors, and its prediction."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.formats.readers.capture import read_capture
from simulator.work.captured.capture import HOST, Capture, Kind, Phase
from simulator.work.captured.script import captured_script
from simulator.work.script.instructions import Communicate, Launch

pytestmark = pytest.mark.usefixtures("warm_captures")

SCRIPT = Path(__file__).resolve().parents[1] / "data" / "capture" / "llama.py"
SIZES = ["2", "2048", "32768", "2048"]  # layers, width, vocabulary, sequence
WIDTH, HIDDEN, VOCAB, SEQ, LAYERS = 2048, 7168, 32768, 2048, 2  # rows divide by 512 ranks: no padding
LAYER = WIDTH * (WIDTH + 2 * 512 + WIDTH) + 3 * WIDTH * HIDDEN  # elements of a layer's matrices
ENDS = 2 * VOCAB * WIDTH
MODEL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": WIDTH, "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": VOCAB,
    "tie_word_embeddings": False, "max_position_embeddings": SEQ, "rope_theta": 10000.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Captures of this file."""
    return tmp_path_factory.mktemp("capture")


def captured(folder: Path, name: str, *arguments: str, script: Path = SCRIPT) -> Path:
    out = folder / f"{name}.capture.gz"
    if not out.exists():
        flags = [one for one in arguments if one.startswith("--")]
        words = [one for one in arguments if not one.startswith("--")]
        assert main(["capture", str(script), "-o", str(out), *flags, "--", *words]) == ExitCode.OK
    return out


def predicted(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    capsys.readouterr()
    assert main(["predict", *arguments, "--json"]) == ExitCode.OK
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def collectives(capture: Capture) -> Counter[tuple[str, int]]:
    return Counter((one.kind, one.size_bytes) for one in captured_script(capture).step if isinstance(one, Communicate))


def test_a_script_is_predicted_like_the_described_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same model, described and captured: equal FLOP, and a step of 11 ms within one hook of FSDP2 (0.5 ms).

    But for views and nodes, which a described model does not have.
    """
    alone = [word for name in ("view_s", "node_s") for word in ("--set", f"stack.host.{name}=0s")]
    program = predicted(capsys, "--program", str(captured(folder, "fsdp", *SIZES)), *alone)
    (folder / "config.json").write_text(json.dumps(MODEL))
    plan = ["--zero", "3", "--seq-len", str(SEQ), "--stack", "torch-2.11-eager"]
    described = predicted(capsys, "--model", str(folder / "config.json"), *plan)
    assert program["hardware_flop_per_step"] == described["hardware_flop_per_step"]
    assert program["step_s"] == pytest.approx(described["step_s"], rel=0.05)
    whole = predicted(capsys, "--program", str(captured(folder, "fsdp", *SIZES)))
    assert program["step_s"] < whole["step_s"] < 1.1 * described["step_s"]


@pytest.mark.parametrize("words", [["lora"], ["lora", "dropout"], ["dora"]])
def test_peft_s_steps_are_the_described_ones(
    folder: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """FLOP, and the peak in bytes, beside those of the same model trained whole, whose tables the stack lays out otherwise."""
    from tests.programs import with_torchvision  # noqa: F401  transformers asks for it

    pytest.importorskip("peft", reason="peft is in the extra programs")
    (folder / "config.json").write_text(json.dumps(MODEL))
    plan = {"peft": words[0], **({"lora-dropout": "0.1"} if "dropout" in words else {})}
    found = []
    for asked, said in (({}, []), (plan, words)):
        name = "-".join(["alone", *said])
        path = str(captured(folder, name, "--ranks=1", *SIZES, "alone", *said))
        program = predicted(capsys, "--program", path, "--cluster", "1xh100")
        flags = {"model": str(folder / "config.json"), "gpus": "1xh100", "seq-len": str(SEQ), "zero": "0", "data-parallel": "ddp",
                 "master-dtype": "bf16", "optimizer-dtype": "bf16", "optimizer-impl": "fused", "stack": "torch-2.11-eager"}  # fmt: skip
        described = predicted(
            capsys, *(word for flag, value in {**flags, **asked}.items() for word in (f"--{flag}", value))
        )
        assert program["hardware_flop_per_step"] == described["hardware_flop_per_step"]
        found.append(program["memory"]["peak_allocated_bytes"] - described["memory"]["peak_allocated_bytes"])  # type: ignore[index]
    assert found[0] == found[1]


TOWER = """
[tower]
num_layers = 4
d_model = 1024
num_heads = 16
d_ff = 4096
patch_size = 14
patch_bias = false
class_token = true
max_positions = 257
pre_norm = true
image_size = 224
projector = [0, 0]
"""


def test_a_model_that_reads_images_is_the_described_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FLOP, and the peak in bytes, beside those of its language model alone, whose tables the stack lays out otherwise.

    The program holds numbers of positions, 257 of 8 bytes, and each of nine LayerNorms two tensors of 257 numbers where one is
    described: a block of 512 bytes more of each.
    """
    keys = {"num_hidden_layers": "num_layers", "hidden_size": "d_model", "num_attention_heads": "num_heads",
            "num_key_value_heads": "num_kv_heads", "head_dim": "head_dim", "intermediate_size": "d_ff", "vocab_size": "vocab_size"}  # fmt: skip
    text = "\n".join(f"{ours} = {MODEL[theirs]}" for theirs, ours in keys.items())
    found = []
    for said in ([], ["images"]):
        (folder / "seeing.toml").write_text(text + TOWER * len(said))
        path = str(captured(folder, "-".join(["alone", *said]), "--ranks=1", *SIZES, "alone", *said))
        program = predicted(capsys, "--program", path, "--cluster", "1xh100")
        flags = {"model": str(folder / "seeing.toml"), "gpus": "1xh100", "seq-len": str(SEQ), "zero": "0", "data-parallel": "ddp",
                 "master-dtype": "bf16", "optimizer-dtype": "bf16", "optimizer-impl": "fused", "stack": "torch-2.11-eager"}  # fmt: skip
        described = predicted(capsys, *(word for flag, value in flags.items() for word in (f"--{flag}", value)))
        assert program["hardware_flop_per_step"] == described["hardware_flop_per_step"]
        found.append(program["memory"]["peak_allocated_bytes"] - described["memory"]["peak_allocated_bytes"])  # type: ignore[index]
    assert found[1] - found[0] == 2560 + 9 * 512


def test_collectives_are_those_of_fsdp2(folder: Path) -> None:
    """By hand: a layer is gathered for both passes and reduced once; the root stays from forward to backward."""
    norms = 2 * WIDTH
    found = collectives(read_capture(captured(folder, "fsdp", *SIZES)))
    assert found == {
        ("all_gather", 2 * (LAYER + norms)): 2 * LAYERS,
        ("all_gather", 2 * (ENDS + WIDTH)): 1,
        ("reduce_scatter", 4 * (LAYER + norms)): LAYERS,
        ("reduce_scatter", 4 * (ENDS + WIDTH)): 1,
    }


def test_the_first_product_of_a_forward_and_of_a_backward_is_kept(folder: Path) -> None:
    """Of the operators before the recorded step."""
    capture = read_capture(captured(folder, "fsdp", *SIZES))
    first = [event for event in capture.events[: capture.steady] if event[0] == Kind.OPERATOR]
    assert [Phase(event[4]) for event in first] == [Phase.FORWARD, Phase.BACKWARD]
    assert {capture.signatures[event[1]][0] for event in first} == {"aten.mm.default"}
    forward, backward = captured_script(capture).products
    assert 0 < forward < backward


def test_what_stays_is_the_shard_and_its_state(folder: Path) -> None:
    """Parameters, and Adam's two moments, in fp32 over 8 ranks; gradients go before the next forward."""
    capture = read_capture(captured(folder, "fsdp", *SIZES))
    sizes = {event[1]: event[2] for event in capture.events if event[0] == Kind.ALLOCATE}
    freed = {event[1] for event in capture.events if event[0] == Kind.FREE}
    held: Counter[str] = Counter()
    for storage in sizes.keys() - freed:
        held[capture.categories[storage]] += sizes[storage]
    shard = (LAYERS * (LAYER + 2 * WIDTH) + ENDS + WIDTH) // 8
    assert held["parameters"] == 4 * shard
    assert held["optimizer_state"] == pytest.approx(8 * shard, abs=4 * 40)  # a step count for each tensor


def test_more_ranks_move_the_same_bytes_and_hold_less(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = captured(folder, "wide", "--nodes=64", *SIZES)
    assert collectives(read_capture(wide)) == collectives(read_capture(captured(folder, "fsdp", *SIZES)))
    found = predicted(capsys, "--program", str(wide), "--nodes", "64", "--tokens-per-step", str(512 * SEQ))
    assert found["num_devices"] == 512
    assert found["tokens_per_s"] == pytest.approx(512 * SEQ / found["step_s"])  # type: ignore[operator]


def test_ddp_reduces_every_gradient_once(folder: Path) -> None:
    found = collectives(read_capture(captured(folder, "ddp", *SIZES, "ddp")))
    assert {kind for kind, _ in found} == {"all_reduce"}
    total = sum(size * count for (_, size), count in found.items())
    assert total == 2 * (LAYERS * (LAYER + 2 * WIDTH) + ENDS + WIDTH)


VISION = """
import torch
from torch import nn

body = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, batch_first=True), 2).cuda()
patches = nn.Conv2d(3, 512, 16, 16).cuda()
optimizer = torch.optim.SGD([*body.parameters(), *patches.parameters()], lr=0.1, momentum=0.9)
while True:
    image = torch.randn(32, 3, 224, 224, device="cuda")
    loss = body(patches(image).flatten(2).transpose(1, 2)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_one_gpu_and_a_model_of_torch_itself(folder: Path) -> None:
    """Layers that torch copies and moves; patches of 3 x 16 x 16 numbers become 512 channels at 14 x 14 places."""
    (folder / "vision.py").write_text(VISION)
    capture = read_capture(captured(folder, "vision", "--ranks=1", script=folder / "vision.py"))
    products = [
        one for one in captured_script(capture).step if isinstance(one, Launch) and "convolution #" in one.label
    ]
    assert [kernel.flop for one in products for kernel in one.kernels] == [2 * (32 * 14 * 14) * 512 * (3 * 16 * 16)]
    assert not collectives(capture)


HOST_COUNTS = """
import sys
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

distributed.init_process_group("nccl")
mesh = init_device_mesh("cuda", (distributed.get_world_size(),))
weight = torch.nn.Parameter(torch.ones(64, 64, device="cuda"))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(4):
    rows = DTensor.from_local(weight.t().view(64, 64), mesh, [Shard(0)], run_check=False)
    whole = (rows * rows).redistribute(mesh, [Replicate()]).to_local()
    whole.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert all(weight.is_cuda and weight.device.type == "cuda" for _ in sys.argv[1:])
"""


def test_what_the_host_does_without_a_launch_is_counted(folder: Path) -> None:
    """By hand: a tensor that becomes rows, one product of rows, one change of layout, and a tensor again.

    Nodes: of the sum, the product, the view, the transposition, and the leaf's.
    """
    (folder / "counts.py").write_text(HOST_COUNTS)
    host = read_capture(captured(folder, "counts", "--ranks=2", script=folder / "counts.py")).host
    forward, backward = (dict(zip(HOST, host[phase], strict=True)) for phase in (Phase.FORWARD, Phase.BACKWARD))
    assert (forward["wraps"], backward["wraps"]) == (2, 2)
    assert (forward["layouts"], backward["layouts"]) == (1, 1)
    assert (forward["nodes"], backward["nodes"]) == (0, 5)
    assert forward["dispatches"] >= 1
    assert forward["views"] >= 2
    asks = captured(folder, "asks", "--ranks=2", *["where", "it", "is"], script=folder / "counts.py")
    assert read_capture(asks).host == host  # attributes of a tensor are no operators


def test_the_same_program_gives_the_same_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked as in the other tests, and in a process that starts as a user's does."""
    first = captured(folder, "fsdp", *SIZES).read_bytes()
    monkeypatch.setattr("validate.supervise.processes.subprocess", subprocess)
    assert captured(folder, "again", *SIZES).read_bytes() == first


def test_files_of_a_program(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        flag: folder / name for flag, name in (("--trace", "t.json.gz"), ("--memory", "m.svg"), ("--snapshot", "s"))
    }
    flags = [str(part) for pair in files.items() for part in pair]
    predicted(capsys, "--program", str(captured(folder, "fsdp", *SIZES)), *flags)
    assert all(path.stat().st_size > 1000 for path in files.values())


def test_what_a_program_decides_itself_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = str(captured(folder, "fsdp", *SIZES))
    flags = ["--tp", "2", "--model", "gpt2", "--set", "plan.zero=1", "--links", "l.png"]
    assert main(["predict", "--program", program, *flags]) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    assert "4 faults" in told
    assert all(place in told for place in ("--tp", "--model", "--set plan.zero=1", "--links"))
    assert main(["predict", "--program", program, "--nodes", "2"]) == ExitCode.BAD_INPUT
    assert "captured for 8 ranks, and hgx-h100-8 has 16 GPUs" in capsys.readouterr().err


BAD = {
    "raises": ("raise KeyError('loss')", "raised KeyError: 'loss'"),
    "no_step": ("import torch; torch.ones(3, device='cuda') + 1", "ended without an optimizer's step"),
    "empty": (
        """import torch
for _ in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(0, 4)), 2):
    pass""",
        "step: a data loader over TensorDataset has nothing to load",
    ),
    "exits": ("import sys; sys.exit(3)", "ended with exit code 3"),
    "values": (
        "import torch; torch.bincount(torch.randint(9, (9,), device='cuda'))",
        "gives a result whose shape depends on values",
    ),
    "network": ("import socket; socket.create_connection(('192.0.2.1', 80), 5)", "no network in a capture"),
    "package": ("import nosuch_package", "install nosuch_package beside shardwise"),
    "command": (
        "import subprocess; subprocess.run(['nvidia-smi-nosuch'])",
        "No such file or directory: 'nvidia-smi-nosuch'; a command that is not here",
    ),
    "checkpoint": (
        """from torch import distributed
import torch.distributed.checkpoint as dcp
distributed.init_process_group("nccl")
dcp.load({}, checkpoint_id="nosuch")""",
        ".metadata'; a capture reads your data",
    ),
    "data": ("open('nosuch/train.bin')", "No such file or directory: 'nosuch/train.bin'; a capture reads your data"),
    "forks": ("import os; os.fork()", "the program starts processes of its own"),
    "processes": (
        "import multiprocessing as mp; mp.Process(target=print).start()",
        "capture what one of them runs, as a script for torchrun",
    ),
    "property": ("import torch; torch.cuda.get_device_properties(0).uuid", "asks for the GPU's uuid"),
    "sensor": ("import torch; torch.cuda.temperature()", "asks torch.cuda.temperature() of the GPU"),
    "operator": (
        """import torch
@torch.library.custom_op("own::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2
twice(torch.ones(3, device="cuda"))""",
        "torch.library.register_fake",
    ),
    "wrapped": (  # as torch's pipelines raise anew what a stage raises
        """import torch
try:
    torch.cuda.temperature()
except Exception as exc:
    raise RuntimeError("stage 0 failed") from exc""",
        "asks torch.cuda.temperature() of the GPU",
    ),
    "sparse": (
        """import torch
edges = torch.zeros(2, 30, dtype=torch.long, device="cuda")
torch.sparse_coo_tensor(edges, torch.ones(30, device="cuda"), (10, 10))""",
        "sparse matrices are not captured",
    ),
    "sparse_moved": (
        """import torch
torch.eye(10).to_sparse_coo().cuda() @ torch.ones(10, 1, device="cuda")""",
        "sparse matrices are not captured",
    ),
    "data_parallel": (
        """import torch
torch.nn.DataParallel(torch.nn.Linear(4, 4), device_ids=[0, 1])(torch.ones(2, 4, device="cuda"))""",
        "nn.DataParallel drives several GPUs from one process",
    ),
    "calls": (
        "import torch.distributed.rpc as rpc; rpc.init_rpc('worker0', rank=0, world_size=2)",
        "torch.distributed.rpc calls other processes",
    ),
    "thread": (
        """import queue, threading, torch
batches = queue.Queue()
threading.Timer(0.2, lambda: batches.put(torch.ones(2).cuda())).start()
batches.get()  # waits by then""",
        "a capture follows one thread",
    ),
    "others_memory": (
        """import torch
from torch import distributed
distributed.init_process_group("nccl")
torch.ops.symm_mem.one_shot_all_reduce(torch.ones(8, device="cuda"), "sum", distributed.group.WORLD.group_name)""",
        "memory of other GPUs is not captured",
    ),
    "own_tensor": (
        """import torch
class Own(torch.Tensor):
    pass
torch.ones(2, device="cuda").as_subclass(Own)""",
        "a class of tensors of your own holds plain ones",
    ),
    "no_optimizer": (
        """import torch
p = torch.nn.Linear(4, 4, device="cuda")
for _ in range(4):
    p(torch.ones(2, 4, device="cuda")).sum().backward()""",
        "ended without an optimizer's step",
    ),
    "one_step": (
        """import torch
p = torch.nn.Linear(4, 4, device="cuda")
o = torch.optim.SGD(p.parameters(), 1)
p(torch.ones(2, 4, device="cuda")).sum().backward()
o.step()""",
        "ended after 1 optimizer steps, and the one behind 2 of warm-up is recorded",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_programs_that_cannot_be_captured(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, problem = BAD[name]
    (tmp_path / "bad.py").write_text(source)
    out = tmp_path / "bad.capture.gz"
    assert main(["capture", str(tmp_path / "bad.py"), "-o", str(out)]) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    assert problem in told
    assert "1 fault in the program" in told
    assert not out.exists()
    if name == "raises":
        assert 'bad.py", line 1' in told  # its own traceback, before ours


UNEVEN = """
import torch

p = torch.nn.Linear(4, 4, device="cuda")
optimizer = torch.optim.SGD(p.parameters(), 1)
chosen = torch.randn(64, 8, device="cuda").topk(2).indices  # 128 choices of 64 tokens
counts = torch.bincount(chosen.view(-1), minlength=8)
assert counts.tolist() == [48, 12, 12, 12, 11, 11, 11, 11]  # 3 x 16, and the rest
assert torch.bincount(chosen.view(-1) // 4, minlength=2).tolist() == [64, 64]  # no token chooses an expert twice
assert torch.bincount(torch.randint(0, 4, (10,), device="cuda"), minlength=4).tolist() == [8, 1, 1, 0]
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    (p(torch.ones(2, 4, device="cuda")) ** 2).sum().backward()
for _ in range(3):
    graph.replay()
    graph.replay()
    optimizer.step()
"""


def test_a_router_as_uneven_as_stated_and_a_graph_that_is_replayed(tmp_path: Path) -> None:
    (tmp_path / "uneven.py").write_text(UNEVEN)
    out = tmp_path / "uneven.capture.gz"
    flags = ["--ranks", "1", "--expert-imbalance", "3"]
    assert main(["capture", str(tmp_path / "uneven.py"), "-o", str(out), *flags]) == ExitCode.OK
    found = read_capture(out)
    assert "how many of 128 choices fall on each of 8, as tokens on experts: 48, then 11 or 12" in found.answers
    # a graph runs where it is replayed, on the stream that replays it, and takes the host no operators
    step = [event for event in found.events[found.steady :] if event[0] == Kind.OPERATOR]
    products = [event[2] for event in step if found.signatures[event[1]][0] == "aten.addmm.default"]
    assert products == [0, 0]
    assert not any(found.host.get(phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
    # its pool keeps what it freed: p(ones), its square and what the backward made of them, 32 bytes each
    assert sum(size for one, size in found.resident().items() if found.categories[one] == "temporaries") >= 2 * 32


def test_a_program_that_does_not_end_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop.py").write_text("while True: pass")
    flags = ["-o", str(tmp_path / "loop.capture.gz"), "--minutes", "0.02"]
    assert main(["capture", str(tmp_path / "loop.py"), *flags]) == ExitCode.BAD_INPUT
    assert "--minutes gives it more" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["loop.py"]


VALUES = """
import torch

p = torch.nn.Linear(4, 4, device="cuda")
optimizer = torch.optim.SGD(p.parameters(), 1)
sent = torch.tensor([3, 5], device="cuda")
assert sent.tolist() == [3, 5] and int(sent[1]) == 5
torch.distributed.init_process_group("nccl")
torch.distributed.broadcast(sent, 0)
assert sent.tolist() == [3, 5]  # rank 0 has what it sends
copy = sent.clone()
copy[:1].add_(1)
assert copy.tolist() == [4, 5]
assert torch.repeat_interleave(copy, copy - 3).tolist() == [4, 5, 5]  # of whole numbers that are known
assert torch.unique_consecutive(copy // 4).tolist() == [1]

chosen = torch.randn(64, 8, device="cuda").topk(2).indices  # whose values nobody knows: 128 in 8 equal parts
counts = torch.histc(chosen.view(-1), bins=8, min=0, max=8)
assert counts.tolist() == torch.bincount(chosen.view(-1), minlength=8).tolist() == [16] * 8
assert torch.histc(torch.arange(6, device="cuda") % 4, bins=4, min=0, max=3).sum().item() == 6
parts = torch.empty_like(counts)
torch.distributed.all_to_all_single(parts, counts)
assert parts.cumsum(0)[-1].item() == 128
mask = torch.nn.functional.one_hot(chosen, 8)
assert mask.sum((0, 1)).tolist() == [16] * 8 and (mask.sum((0, 1)) > 0).nonzero().shape == (8, 1)
places, tokens = torch.where(mask.permute(2, 1, 0)[0])
some = torch.randn(9, 4, device="cuda")
assert some[some.sum(1) > 0].shape == (9, 4) and some.masked_select((some > 0)[:, :1]).shape == (36,)  # all of them
assert [one.shape for one in torch.unique(some, return_counts=True)] == [(36,), (36,)]
assert tokens.shape == (16,) and torch.randn(64, 2, 8, device="cuda")[mask.bool()].shape == (128,)
import triton
import triton.language as tl

@triton.autotune(configs=[triton.Config({"BLOCK": 64})], key=["n"])
@triton.jit
def fill(into, n, BLOCK: tl.constexpr):
    tl.store(into + tl.arange(0, BLOCK), 0)

assert triton.cdiv(7, 2) == triton.next_power_of_2(3) == 4
assert not torch.utils._triton.has_triton_package() or torch.cuda.is_available()
torch.cuda.set_device("cuda:3")
assert (torch.empty(2, device="cuda:3") + torch.ones(2, device="cuda")).shape == (2,)  # a rank has one GPU
noted = torch.nn.Parameter(torch.ones(3))
noted.mine = 1
both = torch.nn.ParameterList([noted, noted])
assert both[0] is both[1] and both.to("cuda", torch.bfloat16)[0].mine == 1  # one parameter, with its notes
moved = torch.nn.Linear(3, 3).weight
moved.data = moved.data.to("cuda")
assert moved.device.type == "cuda"
for _ in range(3):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        x = torch.nn.functional.scaled_dot_product_attention(*[p(torch.ones(1, 1, 8, 4, device="cuda"))] * 3)
    x.sum().backward()
    fill[(1,)](sent, 2, BLOCK=64)
    optimizer.step()
assert not sent.tolist()[0]  # the kernel may have written
"""


def test_values_and_places_that_the_host_gave(tmp_path: Path) -> None:
    """What was put on the GPU comes back; `.data =` moves; a chosen kernel of attention is taken.

    What a router chooses falls on all experts alike, and the report says so. A kernel of Triton's is launched without it.
    """
    (tmp_path / "values.py").write_text(VALUES)
    out = tmp_path / "values.capture.gz"
    assert main(["capture", str(tmp_path / "values.py"), "-o", str(out), "--ranks", "1"]) == ExitCode.OK
    found = read_capture(out)
    assert found.answers["how many of 128 choices fall on each of 8, as tokens on experts: 16"] == 4
    names = {name for name, *_ in found.signatures}
    assert "triton.fill.default" in names
    assert "aten._softmax.default" in names or "aten._safe_softmax.default" in names
    assert not [name for name in names if "efficient" in name or "flash" in name]


def test_a_config_without_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every fault of a config.json and its recipe, before anything runs."""
    config, out = tmp_path / "config.json", tmp_path / "x.capture.gz"
    for text, flags, problem in (
        ("{}", [], "says no recipe"),
        ("{}", ["--recipe", "ddp"], "has no model_type"),
        ("{", ["--recipe", "fsdp2"], "no config.json"),
        ("{}", ["--recipe", "ddp", "--", "--lr", "1"], "a recipe takes no arguments"),
        ("{}", ["--recipe", "ddp", "--adapter", str(config)], "its peft_type is not LORA"),
    ):
        config.write_text(text)
        assert main(["capture", str(config), "-o", str(out), *flags]) == ExitCode.BAD_INPUT
        assert problem in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("recipe", ["fsdp2", "ddp", "zero3"])
def test_a_config_is_trained_by_a_recipe(recipe: str, folder: Path) -> None:
    """Bytes that a step moves: weights twice and gradients once under ZeRO-3, gradients once under DDP."""
    pytest.importorskip("transformers")
    if recipe == "zero3":
        pytest.importorskip("deepspeed")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False}
    (folder / "small.json").write_text(json.dumps({"model_type": "llama", **sizes, **heads}))
    out = folder / f"{recipe}.capture.gz"
    flags = ["--recipe", recipe, "--seq-len", "128", "-o", str(out)]
    assert main(["capture", str(folder / "small.json"), *flags]) == ExitCode.OK
    matrices = 2 * (4 * 256 * 256 + 3 * 256 * 512) + 2 * 1024 * 256
    weights = matrices + 5 * 256
    moved: Counter[str] = Counter()
    for (kind, size), times in collectives(read_capture(out)).items():
        moved[kind] += size * times
    match recipe:
        case "ddp":
            assert moved["all_reduce"] == 4 * weights
        case "fsdp2":
            assert moved["reduce_scatter"] == 4 * weights
            blocks = matrices - 2 * 1024 * 256 + 4 * 256
            assert moved["all_gather"] == 2 * (weights + blocks)  # the root stays from forward to backward
        case _:
            assert moved["all_gather"] >= 2 * matrices


def test_targets_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "x.capture.gz")
    for target, problem in (
        (str(tmp_path / "nosuch.py"), "no such file"),
        ("train", "neither a script nor a function"),
    ):
        assert main(["capture", target, "-o", out, "--rank", "9"]) == ExitCode.BAD_INPUT
        told = capsys.readouterr().err
        assert problem in told
        assert "there are 8 ranks" in told
