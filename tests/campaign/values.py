"""Values that options take, by the option's name and by its metavar; and commands of many options at once."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

import click

from simulator.formats.editor_schema import stack_schema, study_schema
from simulator.spec.cluster.device import Device
from simulator.spec.plan import Plan

_OF_FIELDS: Final = ("0", "1", "2", "3", "8", "1000000", "1e15", "1e-9", "0.5", "true", "full", "none", "host", "bf16", "fp8", "a,b", "[1,2]", "{}")  # fmt: skip
_NUMBERS: Final = ("0", "1", "2", "3", "4", "8", "16", "64")
_MODELS: Final = ("llama3.2-1b", "gpt2", "olmoe-1b-7b", "deepseek-v2-lite", "nemotron-h-8b", "llama3-8b", "qwen3-0.6b", "mixtral-8x7b")  # fmt: skip
_CLUSTERS: Final = ("hgx-h100-8", "pcie-rtx4090-4", "gb200-nvl72", "mi300x-8", "gh200-1", "dgx-a100-80-8", "hgx-b200-8")
_TIMES: Final = ("0s", "1us", "10ms", "1s", "30min", "6h", "90d", "1e-9s", "100y", "1e6s")
_SHARES: Final = ("0", "0.1", "0.5", "0.99", "1", "1.5", "1e-9")
_STACKS: Final = ("torch-2.11-compiled", "torch-2.6-eager", "megatron-core-2025", "deepspeed-0.14", "nanotron-2025", "vllm-2026", "sglang-2025")  # fmt: skip
_BY_METAVAR: Final[Mapping[str, Sequence[str]]] = {
    "NAME|FILE": (*_MODELS, *_CLUSTERS, "ideal", "h100-sxm", "torch-2.6-eager"),
    "NAME|FILE[,...]": (*_STACKS, "torch-2.6-eager,megatron-core-2025"),
    "SIZE": ("1MB", "4GiB", "512B", "0.5GB"), "SIZE[:SIZE]": ("1MB", "8B:8GB", "1KB:1MB", "1GB:1MB"), "FILE": ("nothing.toml", "out.json"), "NUMBER": ("0", "0.5", "1", "1.5", "4"),
    "KEY=VALUE": ("plan.tp=2", "plan.pp=2", "plan.zero=0", "link.inter.bytes_per_s=50Gb/s", "plan.moe.ep=2", "device.memory_bytes=8GB", "model.num_layers=3", "cluster.num_nodes=2", "stack.host.operator_s=1ms", "run.host_mtbf_s=1h", "workload.rate=3", "inference.tp=2"),
    "KEY=VALUE[,KEY=VALUE...]": ("plan.tp=2", "plan.zero=0,plan.tp=4", "cluster.num_nodes=2", "model=gpt2"),
    "KEY=V,V[,V...]": ("plan.tp=1,2", "plan.zero=0,1,2,3", "plan.seq_len=1,2", "cluster.num_nodes=1,2"),
    "KEY=LOW..HIGH": ("link.inter.bytes_per_s=50Gb/s..400Gb/s", "device.memory_bytes=1GB..80GB", "model.num_layers=1..4"),
    "FIELD=V[,V...]": ("tp=1,2", "weights=bf16,fp8", "zero=0", "pp=1", "stack=torch-2.6-eager", "seq_len=1"),
    "NAME=VALUE": ("NCCL_ALGO=Tree", "NCCL_PROTO=LL", "NCCL_BUFFSIZE=4096", "TP=2"), "COUNTxGPU": ("8xh100", "2xb200", "1xa100", "72xgb200", "4xl4", "3xh100", "1xh100:3g.40gb", "8xmi300x"),
    "HOSTLIST": ("node[1-2]", "a,b", "node[01-16]", "n[1-3,5]"), "N[,N...]": ("1,2", "8", "0,1", "3,2,1"), "[PXX=]TIME[,...]": ("1s", "p99=2s", "p50=1s,p99=3s", "p0=1s", "mean=1s"),
    "TIME": _TIMES, "TIME|optimal": (*_TIMES, "optimal"), "TIME|TABLE": (*_TIMES, '{distribution="lognormal",median="1s",sigma=1}'), "FRACTION": _SHARES, "SHARE": _SHARES, "FRACTION|TABLE": (*_SHARES, '{distribution="uniform",low=0.1,high=0.5}'),
    "INTEGER": (*_NUMBERS, "100", "4096", "1000000"), "N": (*_NUMBERS, "1e9", "1M", "15T"), "COUNT": ("1", "1000", "1e9", "1T"), "X": ("0.5", "1", "2", "1000"), "K": _NUMBERS, "DOLLARS": ("0.1", "2", "1e9"),
    "FAMILY": ("llama", "gpt", "llama3-8b", "mixtral-8x7b"), "SIGMA": ("0", "0.5", "3", "20"), "NUMBERS|FILE": ("100us,50GB/s", "1,2", "fabric.toml"), "REGEX=N": (".*=2", "gemm=0.5", "(=1"), "VERSION": ("2.18", "2.27.3", "9", "2.x"),
    "NAME": (*_STACKS, "tp-cp-ep-dp-pp", "q_proj", "attn"), "VALUE": ("{kind=adam}", "kind=powersgd", "optimizer=host", "true", "1,2"), "SECONDS|TRACE": ("1.5", "0", "step.json.gz"), "FILE|lognormal:MEDIAN,SIGMA": ("lognormal:512,1", "lognormal:0,0", "lognormal:1e9,50"),
    "FILE.csv|.json|.parquet": ("x.csv", "x.json", "x.parquet"), "FILE.png|.svg": ("x.png", "x.svg"), "DIR": ("kit", "."),
}  # fmt: skip
# Of `serve`, whose plan's options all have the metavar VALUE
_OF_SERVERS: Final[Mapping[str, Sequence[str]]] = {
    "weights": ("bf16", "fp8", "int4", "nvfp4"), "dtype": ("bf16", "fp16"), "kv-cache": ("auto", "fp8"), "stack": ("vllm-2025", "sglang", "tensorrt-llm-2025", "tgi", "lmdeploy-2024"), "cuda-graphs": ("true", "false", "full", "piecewise"),
    "gpu-memory-utilization": ("0.1", "0.9", "1"), "experts": ("tp", "ep"), "attention-dp": ("true", "false"), "prefix-caching": ("true", "false"), "chunked-prefill": ("true", "false"), "mixed-steps": ("true", "false"), "host-cache": ("10GB", "1TB"), "prefix-store": ("10GB", "1GB/s"),
    "cache-of": ("heads", "latent"), "expert-imbalance": ("1", "4"), "window-part": ("0.5", "0"), "state-part": ("0.5", "1"), "max-model-len": ("128", "8192", "1000000"), "speculative": ("draft", "ngram", "mtp", "eagle"), "acceptance": ("0", "0.7", "1"), "prompt": ("1", "512", "100000"), "output": ("1", "128", "100000"),
}  # fmt: skip
_VERBS: Final = (
    "predict --plain", "predict --json", "predict --brief", "predict --json --trace t.json.gz --snapshot s.pickle", "predict --largest-batch --json", "predict --energy --json", "predict --json --html page.html --links l.svg --memory m.png",
    "goodput --tokens 1B --json", "sensitivity --json --no-errors --samples 4 --jobs 1", "place --json", "export --to toml", "compare --no-ablations --json --what-if plan.zero=2", "explore --json --jobs 1 --vary plan.micro_batch_size=1,2",
)  # fmt: skip
# What goes together in many plans, and in many servers: words of a command line
_PLANS: Final = (
    "--data-parallel ddp --zero 0", "--data-parallel fsdp1 --zero 3", "--data-parallel fsdp2 --zero 2", "--data-parallel zero_redundancy --zero 1", "--data-parallel deepspeed --zero 3", "--data-parallel deepspeed --zero 2", "--data-parallel megatron --zero 1", "--data-parallel nanotron --zero 1", "--data-parallel internevo --zero 1",
    "--tp 2", "--tp 2 --sequence-parallel true", "--tp 4 --vocab-parallel false", "--pp 2 --num-micro-batches 4", "--pp 4 --num-micro-batches 9 --schedule gpipe", "--pp 4 --num-micro-batches 8 --schedule zb_h1", "--pp 2 --num-micro-batches 8 --schedule interleaved --virtual-stages 2", "--pp 4 --num-micro-batches 8 --schedule dualpipe", "--pp 2 --num-micro-batches 4 --schedule dualpipe_v", "--pp 2 --num-micro-batches 2 --first-stage-layers 3",
    "--cp 2", "--cp 4 --cp-exchange all_to_all", "--ep 2", "--ep 8 --dispatcher deep_ep", "--ep 4 --expert-imbalance 3 --expert-capacity-factor 1.2", "--document-len 100", "--seq-len 131072", "--seq-len 1", "--micro-batch-size 64", "--num-micro-batches 1000",
    "--precision fp8 --fp8-recipe mxfp8", "--precision fp8 --fp8-recipe tensorwise --fp8-all-gather true", "--precision nvfp4 --first-layers-bf16 1", "--precision fp32", "--precision fp16", "--precision tf32", "--master-dtype bf16 --reduce-dtype bf16",
    "--optimizer muon", "--optimizer adafactor", "--optimizer galore --galore-rank 8", "--optimizer lamb", "--optimizer adam8bit", "--optimizer paged_lion8bit", "--optimizer sgd", "--optimizer-impl loop", "--optimizer-in-backward true", "--optimizer adam4bit",
    "--recompute full", "--recompute selective --recompute-modules mlp", "--recompute every_k --recompute-every 3", "--cuda-graphs attn", "--cuda-graphs full_iteration",
    "--peft lora --lora-rank 4", "--peft qlora --base-weights nf4_double", "--peft dora --lora-targets q_proj", "--peft ia3", "--peft prefix --prefix-tokens 30", "--peft lora --lora-dropout 0.5 --upcast-frozen true", "--freeze-modules embedding",
    "--offload {optimizer=host}", "--offload {optimizer=nvme,parameters=host}", "--offload {activations=host}", "--comm-hook {kind=powersgd,rank=4}", "--zeropp {weights=true,gradients=true}", "--one-bit {kind=adam}", "--sync-every-steps 16 --outer-optimizer nesterov", "--hierarchical-gather true",
    "--reshard-after-forward false", "--reshard-after-forward 2", "--forward-prefetch 3 --backward-prefetch 2", "--limit-all-gathers false", "--bucket-bytes 1MB", "--bucket-bytes 1B", "--reduce-bucket-numel 1", "--param-persistence-numel 1e9", "--shard-sizes by_memory", "--gradient-as-bucket-view true",
    "--memory-policy expandable", "--memory-policy slab", "--memory-policy defrag", "--memory-policy fixed --pool-block-bytes 2MiB", "--memory-policy tiered --pool-evict belady", "--memory-policy unified", "--memory-policy overcommit", "--memory-policy checkpoint_buffer", "--memory-fraction 0.1", "--alloc-conf max_split_size_mb:64", "--alloc-conf expandable_segments:True,garbage_collection_threshold:0.8",
    "--rank-order dp-tp-pp", "--stack torch-2.11-compiled", "--stack megatron-core-2025 --data-parallel megatron --zero 1", "--stack deepspeed-0.14 --data-parallel deepspeed", "--stack jax-2023", "--stack torch-2.13-cpu", "--calibration ideal", "--set link.inter.latency_s=1s", "--set device.memory_bytes=3GB", "--set cluster.fabric.oversubscription=8", "--set model.num_layers=1", "--set model.vocab_size=7", "--set stack.host.operator_s=1ms",
)  # fmt: skip
_SERVERS: Final = (
    "--tp 2", "--tp 4 --pp 2", "--dp 2", "--dp 4 --experts dealt", "--dcp 2 --tp 4", "--pcp 2", "--disaggregated --prefill-tp 2 --tp 2", "--disaggregated --prefill-dp 2", "--weights fp8", "--weights int4 --kv-cache fp8", "--weights nvfp4", "--host-cache 100GB --prefix-caching true", "--prefix-tokens 400 --prefix-caching true", "--turns 4 --turn-gap-s 20s", "--turns 8 --cache-hits 0.5", "--block-size 1", "--gpu-memory-utilization 0.05",
    "--max-model-len 64", "--max-batched-tokens 1", "--max-batched-tokens 64 --chunked-prefill true", "--max-sequences 1", "--chunked-prefill false", "--mixed-steps false", "--speculative ngram --draft-tokens 3 --acceptance 0.5", "--lora-adapters 8 --lora-rank 16", "--cuda-graphs false", "--expert-imbalance 5", "--replicate true", "--attention-dp true --tp 4", "--burstiness 0.01", "--burstiness 100", "--ramp-s 10s", "--seed 4294967296", "--warmup 0.9",
    "--prompt 1 --output 1", "--prompt 100000 --output 1", "--prompt 1 --output 30000", "--prompt lognormal:512,3 --output lognormal:64,2", "--slo-ttft 1us --highest-rate", "--slo-ttft p99=1s --slo-tpot 50ms --highest-rate", "--slo-latency p50=1s,p99=9s", "--interval", "--stack sglang", "--stack tensorrt-llm-2025", "--stack lmdeploy-2024", "--stack tgi", "--stack fastertransformer-2022", "--stack vllm-2024", "--set device.memory_bytes=3GB", "--set model.num_layers=1",
)  # fmt: skip


# Ends of what fields take, and beyond: a leaf of a study with one of them is legal, or refused in a line
_ENDS: Final = ("0", "-0.0", "5e-324", "1e-9", "0.5", "1", "2147483647", "1e15", "1e300", "0s", "1e-15s", "1e9s", "0B", "1B", "1e15B", "1e-300B/s", "1B/s", "1e18B/s", "[]", "{}")  # fmt: skip


@cache
def leaves() -> tuple[str, ...]:
    """Every key of a study that --set may give, by the schemas that editors get."""
    of_device = Device.model_json_schema(ref_template="#/definitions/{model}")
    tables = {"": study_schema(), "stack.": stack_schema(), "device.": of_device | {"definitions": of_device["$defs"]}}
    return tuple(key for root, schema in tables.items() for key in _below(root, schema, schema["definitions"]))


def _below(place: str, schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[str]:
    for key, value in schema.get("properties", {}).items():
        inner = definitions.get(value.get("$ref", "").rpartition("/")[2], value)
        yield from _below(f"{place}{key}.", inner, definitions) if "properties" in inner else [f"{place}{key}"]


def plausible(option: click.Option, rng: random.Random) -> str:
    """A value of the kind that the option takes; it may still not go with the others."""
    if isinstance(option.type, click.Choice):
        return str(rng.choice(list(option.type.choices)))
    metavar, name = option.metavar or "", option.opts[-1].removeprefix("--")
    known = _OF_SERVERS.get(name, ()) if metavar == "VALUE" else ()
    if metavar == "KEY=VALUE" and rng.random() < 0.4:
        return f"{rng.choice(leaves())}={rng.choice(_ENDS)}"
    if metavar == "KEY=VALUE" and rng.random() < 0.5:
        return f"plan.{rng.choice(tuple(Plan.flat_fields()))}={rng.choice(_OF_FIELDS)}"
    if metavar.count("|") and metavar == metavar.lower():
        known = metavar.split("|")
    elif metavar.startswith("OUT."):
        known = metavar.split("|")[:1]
    elif metavar != "VALUE" or rng.random() < 0.3:
        known = known or _BY_METAVAR.get(metavar, ())
    return rng.choice(known or _NUMBERS)


def drawn_command(rng: random.Random) -> list[str]:
    """A model on a cluster under a plan, or served, with some of what goes together in many; most can be answered."""
    if rng.random() < 0.3:
        load = rng.choice(("--rate 0.1", "--rate 4", "--rate 1000", "--concurrency 1", "--concurrency 64"))
        many = rng.choice(("1", "20", "200"))
        words, parts = f"serve --model {rng.choice(_MODELS)} {_on(rng)} --requests {many} {load} --json", _SERVERS
    else:
        words, parts = f"{rng.choice(_VERBS)} --model {rng.choice(_MODELS)} {_on(rng)} --seq-len 512", _PLANS
    return " ".join((words, *rng.sample(parts, rng.choice((0, 1, 1, 2, 2, 3))))).split()


def _on(rng: random.Random) -> str:
    return f"--cluster {rng.choice(_CLUSTERS)} --nodes {rng.choice(('1', '1', '2', '3', '16', '512'))}"
