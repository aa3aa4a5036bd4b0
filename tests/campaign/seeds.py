"""Valid inputs: a command line and the files that it reads, one for each reader. Each is predicted as it stands before it is mutated."""

from __future__ import annotations

import gzip
import json
import sqlite3
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from simulator.base.wire import block, integer, member, packed
from simulator.formats.writers.chakra import framed
from tests.captures import data

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES, PLANS = ROOT / "docs" / "examples", ROOT / "tests" / "data" / "plans"
SHARED = ROOT.parent / "shared" / "data"


SLOW = frozenset(
    {
        "plan bloom-like.sh",
        "serving table",
        "prices",
        "plan gpt-175b.sh",
        "search",
        "learn",
        "sensitivity",
        "published runs",
        "megatron plan",
    }
)


@dataclass(frozen=True, kw_only=True)
class Seed:
    """A command line, run where its files lie; `mutable`: those of them that are mutated (all unless said)."""

    name: str
    argv: tuple[str, ...]
    files: dict[str, bytes] = field(default_factory=dict)
    mutable: tuple[str, ...] = ()

    @property
    def slow(self) -> bool:
        return self.name in SLOW

    @property
    def targets(self) -> tuple[str, ...]:
        return self.mutable or tuple(self.files)


def _example(name: str) -> bytes:
    return (EXAMPLES / name).read_bytes()


def _of(name: str, command: str, *examples: str, mutable: tuple[str, ...] = (), **files: bytes) -> Seed:
    found = {one: _example(one) for one in examples} | files
    return Seed(name=name, argv=tuple(command.split()), files=found, mutable=mutable)


def _cut(data: bytes, lines: int) -> bytes:
    return b"\n".join(data.splitlines()[:lines]) + b"\n"


def _shared_csv(name: str, lines: int) -> bytes | None:
    path = SHARED / name
    return _cut(path.read_bytes(), lines) if path.is_file() else None


_ASKED = b"""model = "gpt2"
cluster = "hgx-h100-8"
nodes = 1
[plan]
zero = 0
dp_replicate = 8
seq_len = 512
data_parallel = "deepspeed"
[plan.deepspeed.one_bit]
kind = "zero_one"
freeze_step = 500
interval = 4
run_steps = 2000
[data]
decode_s = "2ms"
decode_variation = 0.5
sample_bytes = "1MB"
storage_bytes_per_s = "2GB/s"
workers = 2
batches = 400
[energy]
pue = 1.2
tokens = "1B"
co2_g_per_kwh = 300
caps_w = [500, 400]
"""
_STUDY = b"""model = "llama3.2-1b"
cluster = "hgx-h100-8"
nodes = 1
[plan]
zero = 3
dp_shard = 8
data_parallel = "fsdp2"
seq_len = 2048
micro_batch_size = 1
[plan.offload]
optimizer = "host"
parameters = "host"
"""
_PLANS = b"""{"schema_version": 2, "inputs": {"model": "llama3-8b", "cluster": "hgx-h100-8", "global_batch": 64, "seq_len": 2048},
"plans": [{"rank": 1, "nodes": 1, "num_devices": 8, "plan": {"dp_shard": 8, "zero": 2}, "verdict": "fits", "step_s": 0.32,
"low_s": 0.29, "high_s": 0.36, "tokens_per_s": 404784.4, "mfu": 0.39, "used_bytes": 68169502272, "capacity_bytes": 84932558848},
{"rank": 2, "nodes": 2, "num_devices": 16, "plan": {"dp_shard": 16, "recompute": "full"}, "verdict": "tight", "step_s": 0.2,
"low_s": 0.19, "high_s": 0.26, "tokens_per_s": 604784.4, "mfu": 0.3, "used_bytes": 78169502272, "capacity_bytes": 84932558848}]}
"""
_CLUSTER = b"""name = "mine"
device = "h100"
gpus_per_node = 4
num_nodes = 2
host_factor = 1.1
[intra]
kind = "nvlink4"
shape = "switch"
bytes_per_s = "450GB/s"
latency_s = "0.6us"
[host]
kind = "pcie5"
bytes_per_s = "63GB/s"
[inter]
kind = "infiniband"
num_nics = 4
nic_bytes_per_s = "400Gb/s"
latency_s = "2.7us"
[fabric]
kind = "fat_tree"
oversubscription = 1.5
nodes_per_leaf = 32
[fabric.measured]
all_reduce = { 1 = "300GB/s", 2 = "140GB/s" }
[[exceptions]]
nodes = "1"
speed = 0.9
[sources]
intra = "sheet"
"""
_RANKS = "".join(
    f"#  Rank {r:2} Group  0 Pid {6899 + r} on node-a device {r:2} [0000:0{r}:00] NVIDIA H100 80GB HBM3\n"
    for r in range(8)
)
_NCCL_LOG = f"""# Collective test starting: all_reduce_perf
# nThread 1 nGpus 8 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20
# NCCL version 2.21.5+cuda12.4
{_RANKS}#
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
     1048576        262144     float     sum      -1    56.31   18.62   32.59      0    55.10   19.03   33.30      0
     4194304       1048576     float     sum      -1    80.00   52.43   91.75      0    79.00   53.09   92.91      0
    33554432       8388608     float     sum      -1   243.0   138.1   241.7      0   242.0   138.7   242.7      0
   134217728      33554432     float     sum      -1   720.2   186.4   326.1      0   718.9   186.7   326.7      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 200.1
""".encode()
_ARRIVALS = b"arrival_s,prompt_tokens,output_tokens\n0.0,128,16\n0.5,256,32\n1.0,64,8\n"

_TENSORS = b"name,gpu,bytes,uses_s\nw,0,5GB,0 1 2\nx,0,4GB,0.5 1.5\ny,1,1GB,0 2\n"
_CHAKRA = framed(
    [
        block(1, "0.0.4"),
        integer(1, 1) + block(2, "product") + integer(3, 4) + integer(7, 30),
        integer(1, 2)
        + integer(3, 7)
        + packed(5, [1])
        + integer(7, 9)
        + block(10, block(1, "comm_type") + member(9, 7)),
    ]
)


def _nsight() -> bytes:
    """The smallest export: two tables, one kernel."""
    with sqlite3.connect(":memory:") as db:
        db.executescript(
            "CREATE TABLE StringIds (id, value); INSERT INTO StringIds VALUES (1, 'gemm');"
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, streamId, correlationId, globalPid, demangledName);"
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1000, 2000, 0, 7, 1, 16777216, 1);"
        )
        return db.serialize()


@cache
def seeds() -> tuple[Seed, ...]:
    """Every reader at least once. What lies in ../shared takes part where it is there."""
    predict = "predict --plain --model llama3.2-1b --cluster hgx-h100-8"
    found = [
        _of("study", "predict study.toml --json", **{"study.toml": _STUDY}),
        _of("example study", "predict study.toml --plain", "study.toml"),
        _of("cluster file", "predict --model llama3.2-1b --cluster mine.toml --json", **{"mine.toml": _CLUSTER}),
        _of("config.json", "predict --model config.json --cluster hgx-h100-8 --plain", "config.json"),
        _of(
            "adapter",
            "predict --recipe adapter_config.json --model llama3.2-1b --gpus 1xa100 --plain",
            "adapter_config.json",
        ),
        _of(
            "deepspeed plan",
            "predict --plan zero3.json --model llama3.2-1b --cluster hgx-h100-8 --seq-len 1024 --plain",
            "zero3.json",
        ),
        _of("megatron plan", "predict --plan train.sh --cluster dgx-h100-8 --plain", "train.sh"),
        *map(_plan, sorted(PLANS.iterdir())),
        _of("fabric log", f"{predict} --nodes 2 --fabric log.txt", **{"log.txt": _NCCL_LOG}),
        _of(
            "capture",
            "predict --program step.capture.gz --cluster hgx-h100-8 --plain",
            **{"step.capture.gz": _capture()},
        ),
        _of("compare", "compare fsdp.toml megatron.toml --plain", "fsdp.toml", "megatron.toml"),
        _of("spot offers", "goodput ndr.toml --spot offers.csv --replicas 20 --plain", "ndr.toml", "offers.csv"),
        _of("tables of a study", "predict asked.toml --telemetry --step-jitter 0.01 --json", **{"asked.toml": _ASKED}),
        _of("one failure", "sensitivity --failures study.toml --json", **{"study.toml": _STUDY}),
        _of("explored", "explore study.toml --vary plan.tp=1,2 --jobs 1 --json", **{"study.toml": _STUDY}),
        _of("plans of a search", "explore plans.json --json --html what-if.html", **{"plans.json": _PLANS}),
        _of("prices", "goodput long-run.toml --prices prices.toml --plain", "long-run.toml", "prices.toml"),
        _of("runs table", "backtest runs.csv --json", "runs.csv"),
        _of("learn", "calibrate learn measured.csv -o mine", "measured.csv"),
        _of("snapshot", "replay snapshot.json.gz --plain", "snapshot.json.gz"),
        _of("trace", "import step.json.gz --json", "step.json.gz"),
        _of("recorded", "predict --program step.json.gz --plain", "step.json.gz"),
        _of("chakra", "predict --program a.0.et --plain", **{"a.0.et": _CHAKRA}),
        _of("nsight", "predict --program a.sqlite --plain", **{"a.sqlite": _nsight()}),
        _of("tensors", "place --tensors t.csv --cluster hgx-h100-8 --room 8GB --plain", **{"t.csv": _TENSORS}),
        _of("results", "validate compare runs.jsonl --json", "runs.jsonl"),
        _of("matrix", "topo matrix.txt --device a100 --plain", "matrix.txt"),
        _of("topology xml", "topo node.xml --plain", "node.xml"),
        _of("slurm", "topo topology.conf --plain", "topology.conf"),
        _of(
            "placement", "place study.toml --topology node.xml --plain", "study.toml", "node.xml", mutable=("node.xml",)
        ),
        _of(
            "nccl fit",
            "calibrate fit all_reduce.txt --cluster hgx-h100-8 -o mine.calibration.json",
            **{"all_reduce.txt": _NCCL_LOG},
        ),
        _of(
            "arrivals",
            "serve --model llama3.2-1b --cluster hgx-h100-8 --trace arrivals.csv --plain",
            **{"arrivals.csv": _ARRIVALS},
        ),
        _of("rollout", "predict --model llama3.2-1b --gpus 8xh100 --rollout grpo.toml --plain", "grpo.toml"),
        _of("lengths", f"{predict} --lengths lengths.txt", **{"lengths.txt": b"120\n500\n2048\n70\n"}),
        _of(
            "serving launch",
            "serve --model llama3.2-1b --cluster hgx-h100-8 --tp 2 --rate 4 --requests 20 --export launch --plain",
        ),
        _of("export", "export study.toml --to megatron", "study.toml"),
        _of("launch kit", "export study.toml --to launch-kit --hosts node[01-02] -o kit", "study.toml"),
        _of("sensitivity", "sensitivity ndr.toml --what-if link.inter.bytes_per_s=200Gb/s --plain", "ndr.toml"),
        Seed(
            name="collective",
            argv=("collective", "all_reduce", "--nodes", "2", "--size", "1MB:64MB", "--nccl", "2.21", "--plain"),
        ),
        Seed(
            name="serve",
            argv=(
                "serve",
                "--model",
                "llama3.2-1b",
                "--cluster",
                "hgx-h100-8",
                "--tp",
                "2",
                "--rate",
                "4",
                "--requests",
                "50",
                "--plain",
            ),
        ),
        Seed(
            name="search",
            argv=(
                "search",
                "--model",
                "llama3.2-1b",
                "--cluster",
                "hgx-h100-8",
                "--nodes",
                "1",
                "--global-batch",
                "8",
                "--seq-len",
                "1024",
                "--fix",
                "tp=1",
                "--fix",
                "pp=1",
                "--plain",
                "--jobs",
                "1",
            ),
        ),
        Seed(
            name="predict",
            argv=tuple(f"{predict} --tp 2 --micro-batch-size 2 --recompute full --set plan.zero=1".split()),
        ),
    ]
    for name, table, command in (
        ("serving table", "serving.csv", "backtest serving.csv --json"),
        ("memory table", "memory.csv", "backtest memory.csv --json"),
        ("collectives table", "collectives.csv", "backtest collectives.csv --json"),
        ("published runs", "runs.csv", "backtest runs.csv --json"),
    ):
        if (data := _shared_csv(table, 4)) is not None:
            found.append(_of(name, command, **{table: data}))
    return tuple(found)


def _plan(path: Path) -> Seed:
    """Megatron's scripts bring their model; other files do not. Files beside it that it names come along."""
    model = "" if path.suffix in (".sh", ".args") else "--model llama3.2-1b --seq-len 1024"
    cluster = "dgx-a100-80-8 --nodes 48" if path.suffix == ".sh" else "hgx-h100-8"
    command, data = f"predict --plan {path.name} --cluster {cluster} {model} --plain", path.read_bytes()
    named = {one.name: one.read_bytes() for one in PLANS.iterdir() if one.name.encode() in data}
    return _of(f"plan {path.name}", command, **{path.name: data, **named})


@cache
def _capture() -> bytes:
    """A small capture."""
    return gzip.compress(json.dumps(data(3)).encode(), mtime=0)
