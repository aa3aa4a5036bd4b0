"""Files that commands read, as small as they can be: what docs/examples and tests/data do not hold."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import pickle
import sqlite3
import tempfile
import tomllib
from functools import cache
from pathlib import Path

from simulator.base.wire import block, integer, member, packed
from simulator.formats.writers.chakra import framed
from tests.captures import data

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "experiments" / "measured" / "cpu-loop-2026-11-21"
EXAMPLES, CALIBRATIONS = ROOT / "docs" / "examples", ROOT / "topologies" / "calibrations"

ASKED = b"""model = "gpt2"
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
STUDY = b"""model = "llama3.2-1b"
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
PLANS = b"""{"schema_version": 2, "inputs": {"model": "llama3-8b", "cluster": "hgx-h100-8", "global_batch": 64, "seq_len": 2048},
"plans": [{"rank": 1, "nodes": 1, "num_devices": 8, "plan": {"dp_shard": 8, "zero": 2}, "verdict": "fits", "step_s": 0.32,
"low_s": 0.29, "high_s": 0.36, "tokens_per_s": 404784.4, "mfu": 0.39, "used_bytes": 68169502272, "capacity_bytes": 84932558848},
{"rank": 2, "nodes": 2, "num_devices": 16, "plan": {"dp_shard": 16, "recompute": "full"}, "verdict": "tight", "step_s": 0.2,
"low_s": 0.19, "high_s": 0.26, "tokens_per_s": 604784.4, "mfu": 0.3, "used_bytes": 78169502272, "capacity_bytes": 84932558848}]}
"""
CLUSTER = b"""name = "mine"
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
RANKS = "".join(
    f"#  Rank {r:2} Group  0 Pid {6899 + r} on node-a device {r:2} [0000:0{r}:00] NVIDIA H100 80GB HBM3\n"
    for r in range(8)
)
NCCL_LOG = f"""# Collective test starting: all_reduce_perf
# nThread 1 nGpus 8 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20
# NCCL version 2.21.5+cuda12.4
{RANKS}#
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
     1048576        262144     float     sum      -1    56.31   18.62   32.59      0    55.10   19.03   33.30      0
     4194304       1048576     float     sum      -1    80.00   52.43   91.75      0    79.00   53.09   92.91      0
    33554432       8388608     float     sum      -1   243.0   138.1   241.7      0   242.0   138.7   242.7      0
   134217728      33554432     float     sum      -1   720.2   186.4   326.1      0   718.9   186.7   326.7      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 200.1
""".encode()
ARRIVALS = b"arrival_s,prompt_tokens,output_tokens\n0.0,128,16\n0.5,256,32\n1.0,64,8\n"

TENSORS = b"name,gpu,bytes,uses_s\nw,0,5GB,0 1 2\nx,0,4GB,0.5 1.5\ny,1,1GB,0 2\n"
CHAKRA = framed(
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


def nsight() -> bytes:
    """The smallest export: two tables, one kernel."""
    with sqlite3.connect(":memory:") as db:
        db.executescript(
            "CREATE TABLE StringIds (id, value); INSERT INTO StringIds VALUES (1, 'gemm');"
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, streamId, correlationId, globalPid, demangledName);"
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1000, 2000, 0, 7, 1, 16777216, 1);"
        )
        return db.serialize()


@cache
def capture(layers: int = 3, ranks: int = 8) -> bytes:
    return gzip.compress(json.dumps(data(layers) | {"world_size": ranks}).encode(), mtime=0)


@cache
def journal(command: str) -> bytes:
    """The database that a command leaves behind `--journal found.journal`."""
    from simulator.cli import main

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.journal")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            main([*command.split(), "--json", "--journal", str(path)])
        return path.read_bytes()


@cache
def samples(slower: float = 1.0, host: str = "vm") -> bytes:
    """What `calibrate run` has written on a small machine, some parts of it and two links; times so many times as long."""
    lines = gzip.decompress((MEASURED / "samples-1.jsonl.gz").read_bytes()).splitlines()
    rows = [json.loads(line) for line in [lines[0], *lines[1::12]]]
    rows[0]["hostname"] = host
    sent = {"size_bytes": 2**20, "num_nodes": 1, "rank": 0, "time_s": 1e-4}
    rows += [{"kind": "pair", "source": 0, "target": 1, **sent}, {"kind": "rail", **sent}]
    for one in rows[1:]:
        one.update({key: one[key] * slower for key in ("time_s", "p10_s", "p90_s") if key in one})
    return b"".join(json.dumps(one).encode() + b"\n" for one in rows)


SERVING = b"""model = "llama3.2-1b"
cluster = "hgx-h100-8"
[inference]
tp = 2
max_sequences = 64
[workload]
rate = 4.0
num_requests = 20
prompt_tokens = { distribution = "lognormal", median = 400, sigma = 0.8, high = 1500 }
output_tokens = { distribution = "uniform", low = 20, high = 60 }
[slo]
ttft = "500ms"
tpot = "50ms"
"""
MODEL = b"""like = "llama3.2-1b"
num_layers = 4
d_model = 512
num_heads = 8
d_ff = 1408
"""
RANKS = b"rank\tnode\tgpu\n" + b"".join(b"%d\t%d\t%d\n" % (r, r // 8, r % 8) for r in range(16))
TUNER = b"# collective,min,max,algorithm,protocol,channels,nodes,ranks\nallreduce,0,65536,tree,ll,2,2,16\nallreduce,65537,1073741824,ring,simple,8,-1,-1\n"
MEGATRON_YAML = b"""language_model:
  num_layers: 4
  hidden_size: 512
  num_attention_heads: 8
  activation_func: swiglu
model_parallel:
  tensor_model_parallel_size: 2
seq_length: 1024
max_position_embeddings: 1024
micro_batch_size: 1
global_batch_size: 8
bf16: true
"""
BRIDGE = b"""train:
  global_batch_size: 8
  micro_batch_size: 2
mixed_precision: bf16_with_fp8_current_scaling_mixed
peft:
  dim: 8
  target_modules: [linear_qkv, "*.layers.0.*.linear_proj"]
model:
  recompute_granularity: full
  recompute_method: uniform
"""
TUNE = b"""#!/bin/bash
#SBATCH --nodes=1
MODEL=${MODEL:-meta-llama/Llama-3.2-1B}
accelerate launch --num_processes 1 --mixed_precision bf16 -m axolotl.cli.train axolotl.yml \\
  --base-model $MODEL --micro-batch-size=2 --lora-r 16 --learning-rate $LR
"""
TITAN = b"""[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 2048
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
SPOT_STUDY = b"""model = "gpt2"
cluster = "hgx-h100-8"
nodes = 2
[plan]
zero = 2
seq_len = 512
[run]
tokens = "5B"
checkpoint_interval_s = "30min"
"""
PLAYED = b"""model = "gpt2"
cluster = "hgx-h100-8"
nodes = 1
[plan]
zero = 0
dp_replicate = 2
seq_len = 64
"""
SCRIPT = b"""import torch
model = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(8):
    model(torch.zeros(4, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
NCCL_JSON = json.dumps(
    {
        "version": 1,
        "args": ["./all_reduce_perf"],
        "config": {"nthreads": 1, "ngpus": 8, "devices": [{"hostname": "node-a", "rank": 0}]},
        "results": [
            {"size": size, "out_of_place": {"time": us, "alg_bw": 1.0, "bus_bw": 1.0}, "in_place": {"time": us}}
            for size, us in ((1048576, 56.3), (4194304, 80.0), (33554432, 243.0), (134217728, 720.2))
        ],
    }
).encode()


@cache
def pickled() -> bytes:
    """The snapshot of the examples as torch dumps it."""
    text = gzip.decompress((ROOT / "docs" / "examples" / "snapshot.json.gz").read_bytes())
    return pickle.dumps(json.loads(text), protocol=4)


@cache
def shaped() -> bytes:
    """The trace of the examples as record_shapes=True writes it, of products alone."""
    trace = json.loads(gzip.decompress((ROOT / "docs" / "examples" / "step.json.gz").read_bytes()))
    for event in trace["traceEvents"]:
        if event.get("cat") == "cpu_op":
            event.setdefault("args", {}).update(
                {"Input Dims": [[64, 64], [64, 64]], "Input type": ["c10::BFloat16"] * 2}
            )
    return gzip.compress(json.dumps(trace).encode(), mtime=0)


LEARNED = json.dumps(
    {
        "format_version": 1, "name": "mine", "runs": ["1", "2"], "scatter": 0.05, "reach": 2.0, "covariance": [[0.01, 0.0], [0.0, 0.02]],
        "coefficients": [{"name": name, "value": 0.1, "prior_sigma": 0.3, "sigma": 0.1} for name in ("products", "network")],
    }
).encode()  # fmt: skip


def configs() -> dict[str, bytes]:
    """A config.json of each architecture's kind: attention, experts, state spaces, images in tiles."""
    with (ROOT / "tests" / "data" / "configs" / "families.toml").open("rb") as file:
        every = [one["keys"] for one in tomllib.load(file)["config"]]
    # TOML has no null
    by_type = {keys["model_type"]: json.dumps(keys).replace('"null"', "null").encode() for keys in every}
    towers = json.loads((ROOT / "tests" / "data" / "configs" / "towers.json").read_text(encoding="utf-8"))
    by_type |= {one["config"]["model_type"]: json.dumps(one["config"]).encode() for one in towers}
    return {
        name: by_type[name]
        for name in ("mixtral", "deepseek_v2", "gpt2", "gemma3_text", "nemotron_h", "llava_next", "smolvlm")
        if name in by_type
    }
