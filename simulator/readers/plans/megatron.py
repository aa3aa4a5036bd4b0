"""Megatron-LM's arguments: a shell script, a line of one, or a plain list; as of core 0.14 (megatron/training/arguments.py).

World size = tp × cp × pp × dp. The distributed optimizer is ZeRO's stage 1; gradients are summed in fp32 with bf16 unless
--grad-reduce-in-bf16; without --sequence-parallel the tokens between tensor-parallel regions are on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from simulator.readers.plans.draft import Degree, Draft
from simulator.readers.plans.launch_line import LaunchLine, read_launch_line
from simulator.readers.plans.megatron_flags import FLAGS
from simulator.readers.plans.megatron_hybrid import with_layers_counted
from simulator.readers.plans.megatron_model import MODEL_NAMES, read_model
from simulator.readers.plans.megatron_options import NO_EFFECT, OFF
from simulator.readers.plans.megatron_pipeline import PIPELINE_NAMES, read_pipeline
from simulator.readers.plans.reading import UNSET, Reading

SOFTWARE: Final = "Megatron-LM core 0.14"
_LAUNCHER: Final = ("--nnodes", "--nproc_per_node", "--nproc-per-node", "--nodes", "--num_gpus", "--num_nodes")
_ABBREVIATED: Final = 4  # characters below which an abbreviation is not looked for


def read_megatron(text: str, file: str, given: Collection[str] = (), define: Mapping[str, str] | None = None) -> Draft:
    """The plan, and the model as far as the arguments state one. Raises PlanError where no arguments are found."""
    line = read_launch_line(text, file, define or {})
    entries = {_full(name): entry for name, entry in line.options.items() if name not in _LAUNCHER}
    unset = {_full(name): ", ".join(u.what for u in found) for name, found in line.unknown.items()}
    entries = with_layers_counted(entries)
    r = Reading(entries, file, given, unset=unset, auto=UNSET, faults=line.faults)
    fields: dict[str, Any] = {"data_parallel": "megatron", "optimizer_impl": "fused"}
    stack: dict[str, tuple[object, str]] = {}
    _batch(r, fields)
    _parallel(r, fields, stack)
    _experts(r, fields)
    _precision(r, fields)
    _optimizer(r, fields)
    _recompute(r, fields)
    _graphs(r, fields)
    model = read_model(r, fields)
    read_pipeline(r, fields)
    leftover = _data_parallel(r, fields, stack)
    preset, why = _stack(r, stack)
    total = r.integer("--global-batch-size")
    r.sort_rest({name for name in entries if NO_EFFECT.match(name[2:])}, OFF, KNOWN)
    return Draft(
        format="megatron",
        software=SOFTWARE,
        file=file,
        fields=fields,
        places=_places(r, line),
        leftover=leftover,
        model=model,
        num_devices=line.num_devices,
        devices_fault=line.world_fault,
        global_batch_size=total,
        stack=preset,
        stack_why=why,
        stack_changes=stack,
        settings=(*r.settings(), *line.settings),
        faults=tuple(r.faults),
    )


_FIELD_NAMES: Final = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "micro_batch_size": "--micro-batch-size",
    "seq_len": "--seq-length",
    "dp_replicate": "--num-distributed-optimizer-instances",
    "expert_overlap": "--overlap-moe-expert-parallel-comm",
}


_TP_KINDS: Final = {"all_gather": "ag", "reduce_scatter": "rs"}


def _full(name: str) -> str:
    """The option that an abbreviation stands for, as argparse takes it; older names as today's."""
    name = {"--encoder-seq-length": "--seq-length", "--model-parallel-size": "--tensor-model-parallel-size"}.get(
        name, name
    )
    if name in KNOWN or name in FLAGS or name in OFF or len(name) <= _ABBREVIATED:
        return name
    found = [known for known in (*KNOWN, *FLAGS) if known.startswith(name)]
    return found[0] if len(set(found)) == 1 else name


def _places(r: Reading, line: LaunchLine) -> dict[str, str]:
    places = {field: r.place(name) for field, name in _FIELD_NAMES.items() if name in r}
    if "--global-batch-size" in r:
        places["global_batch_size"] = r.place("--global-batch-size")
    return places | ({"num_devices": line.world_place} if line.num_devices else {})


def _batch(r: Reading, fields: dict[str, Any]) -> None:
    for name, field in (("--micro-batch-size", "micro_batch_size"), ("--seq-length", "seq_len")):
        value = r.integer(name, plan_field=field)
        if value is not None:
            fields[field] = value
            r.note(name, f"{field} = {value}")
        elif name not in r and field not in r.given:
            r.fault(
                name, "is required and missing", f"{name} N in the file, or --{field.replace('_', '-')} N beside it"
            )
    if "--global-batch-size" not in r:
        fields.setdefault("num_micro_batches", 1)


def _parallel(r: Reading, fields: dict[str, Any], stack: dict[str, tuple[object, str]]) -> None:
    for field in ("tp", "pp", "cp", "ep"):
        value = r.integer(_FIELD_NAMES[field], plan_field=field)
        if value is not None:
            fields[field] = value
    tp = fields.get("tp", 1)
    parallel = bool(r.flag("--sequence-parallel"))
    fields["sequence_parallel"] = parallel
    if parallel and tp == 1 and "tp" not in r.given:
        why = "tokens are split over tensor-parallel ranks, and there is one: Megatron-LM switches it off"
        r.overruled("--sequence-parallel", f"{why}; drop it, or --tensor-model-parallel-size 2 or more")
        fields["sequence_parallel"] = False
    overlap = bool(r.flag("--tp-comm-overlap"))
    if overlap and not parallel:
        r.fault("--tp-comm-overlap", "works with --sequence-parallel only", "add --sequence-parallel")
    if tp > 1:
        where = r.place("--tp-comm-overlap") if overlap else f"{r.file}: no --tp-comm-overlap"
        stack["tp_overlap"] = ("userbuffers" if overlap else "backward", where)
    kept = {kind: r.flag(f"--disable-tp-comm-overlap-{word}") for kind, word in _TP_KINDS.items()}
    if overlap and tp > 1 and any(kept.values()):
        places = ", ".join(
            r.place(f"--disable-tp-comm-overlap-{word}") for kind, word in _TP_KINDS.items() if kept[kind]
        )
        stack["tp_whole"] = ([kind for kind, is_whole in kept.items() if is_whole], places)
    kinds = {"p2p": "ring", "a2a": "all_to_all"}
    kind = r.text("--cp-comm-type")
    if kind is not None and kind in kinds:
        fields["cp_exchange"] = kinds[kind]
    elif kind is not None:
        r.unmodelled("--cp-comm-type", f"{kind}: keys and values are taken to pass round a ring")


def _experts(r: Reading, fields: dict[str, Any]) -> None:
    """How experts are split, how many rows they take, and where pipeline stages stand in the order of ranks."""
    etp = r.integer("--expert-tensor-parallel-size", plan_field="etp")
    if "--num-experts" in r:
        fields["etp"] = etp or fields.get("tp", 1)
    capacity = r.number("--moe-expert-capacity-factor")
    if capacity is not None:
        fields["expert_capacity_factor"] = capacity
    kind = r.choice("--moe-token-dispatcher-type", tuple(DISPATCHERS))
    deep = bool(r.flag("--moe-enable-deepep"))
    if "--num-experts" in r:
        fields["dispatcher"] = DISPATCHERS["flex" if deep else kind or "allgather"]
    if r.flag("--overlap-moe-expert-parallel-comm"):
        fields["expert_overlap"] = True
    if r.flag("--use-tp-pp-dp-mapping"):
        fields["rank_order"] = "tp-cp-ep-pp-dp"


def _data_parallel(r: Reading, fields: dict[str, Any], stack: dict[str, tuple[object, str]]) -> Degree:
    """Whose data parallelism runs, and which degree takes the ranks that the others leave."""
    if r.flag("--deepspeed"):
        return _megatron_deepspeed(r, fields, stack)
    distributed = bool(r.flag("--use-distributed-optimizer"))
    torch_fsdp, own_fsdp = bool(r.flag("--use-torch-fsdp2")), bool(r.flag("--use-megatron-fsdp"))
    strategy = r.choice("--data-parallel-sharding-strategy", ("no_shard", "optim", "optim_grads", "optim_grads_params"))
    if torch_fsdp:
        _torch_fsdp_faults(r, fields, distributed=distributed, own_fsdp=own_fsdp)
        fields |= {"data_parallel": "fsdp2", "zero": 3}
        if r.flag("--torch-fsdp2-no-reshard-after-forward"):
            fields["reshard_after_forward"] = False
        return "dp_shard"
    if own_fsdp:
        stage = {None: 0, "no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}[strategy]
        fields |= {"zero": stage, "data_parallel": "fsdp2" if stage == 2 else "megatron"}
        if stage < 3:
            taken = "FSDP2's stage 2" if stage == 2 else "the distributed optimizer"
            r.unmodelled("--data-parallel-sharding-strategy", f"{strategy} of Megatron-FSDP is taken as {taken}")
    else:
        fields["zero"] = 1 if distributed else 0
        if strategy not in (None, "no_shard"):
            r.fault("--data-parallel-sharding-strategy", f"{strategy} needs Megatron-FSDP", "--use-megatron-fsdp")
    _overlap(r, fields, stack, sharded=distributed or own_fsdp)
    instances = r.integer("--num-distributed-optimizer-instances")
    if fields["zero"] == 0:
        if instances is not None and instances > 1:
            r.fault("--num-distributed-optimizer-instances", "shards nothing", "--use-distributed-optimizer")
        return "dp_replicate"
    if instances is not None:
        fields["dp_replicate"] = instances
    return "dp_shard"


def _megatron_deepspeed(r: Reading, fields: dict[str, Any], stack: dict[str, tuple[object, str]]) -> Degree:
    """Megatron-DeepSpeed's own arguments (BigScience, Microsoft): ZeRO's stage, and checkpoints as they were called."""
    stage = r.integer("--zero-stage", least=0, plan_field="zero")
    if stage is None and "zero" not in r.given:
        r.fault("--deepspeed", "the stage stands in DeepSpeed's own file", "--zero-stage N in the file, or --zero N")
    elif stage is not None and stage > 3:
        r.fault("--zero-stage", f"there is no stage {stage}", "0, 1, 2 or 3")
    zero = stage if stage is not None and stage <= 3 else 0
    if zero == 0 and fields.get("precision") == "bf16":
        zero = 1
        r.note("--zero-stage", "with bf16 DeepSpeed's own optimizer shards its states: zero = 1")
    fields |= {"data_parallel": "deepspeed", "zero": zero}
    if r.flag("--use-distributed-optimizer"):
        r.fault("--use-distributed-optimizer", "contradicts --deepspeed", "keep one")
    if r.flag("--checkpoint-activations"):
        fields["recompute"] = "full"
    for name in ("tp_overlap", "tp_whole", "overlap", "late_parameters", "loss", "weight_gradients"):
        stack.pop(name, None)  # its kernels are those of Megatron-LM 2021
    return "dp_shard" if zero else "dp_replicate"


def _torch_fsdp_faults(r: Reading, fields: Mapping[str, Any], *, distributed: bool, own_fsdp: bool) -> None:
    """What validate_args refuses beside --use-torch-fsdp2."""
    against = {
        "--use-distributed-optimizer": distributed,
        "--use-megatron-fsdp": own_fsdp,
        "--pipeline-model-parallel-size": fields.get("pp", 1) > 1,
        "--expert-model-parallel-size": fields.get("ep", 1) > 1,
        "--fp16": "--fp16" in r,
    }
    for name, wrong in against.items():
        if wrong:
            r.fault(name, "contradicts --use-torch-fsdp2", f"drop {name} or --use-torch-fsdp2")
    for name in ("--untie-embeddings-and-output-weights", "--no-gradient-accumulation-fusion"):
        if name not in r:
            r.fault("--use-torch-fsdp2", f"needs {name}", f"add {name}")


def _overlap(r: Reading, fields: Mapping[str, Any], stack: dict[str, tuple[object, str]], *, sharded: bool) -> None:
    """Whether gradients and parameters travel beside compute: the stack's, which knows all traffic or none."""
    reduces, gathers = bool(r.flag("--overlap-grad-reduce")), bool(r.flag("--overlap-param-gather"))
    if gathers and not sharded:
        r.fault("--overlap-param-gather", "gathers nothing", "--use-distributed-optimizer")
    if gathers and not reduces:
        r.fault("--overlap-param-gather", "needs --overlap-grad-reduce", "add --overlap-grad-reduce")
    if not reduces and fields.get("tp", 1) * fields.get("pp", 1) > 1:
        r.default_unmodelled("--overlap-grad-reduce", "false", "gradients are reduced beside the backward here")
    elif not reduces:
        stack["overlap"] = (False, f"{r.file}: no --overlap-grad-reduce")
    elif sharded and not gathers:
        stack["late_parameters"] = (True, f"{r.file}: no --overlap-param-gather")


def _fp8(r: Reading, fields: dict[str, Any]) -> None:
    recipe = r.text("--fp8-recipe") or "delayed"
    fields["fp8_recipe"] = recipe if recipe in ("delayed", "tensorwise", "blockwise", "mxfp8") else "tensorwise"
    if fields["fp8_recipe"] != recipe:
        r.unmodelled("--fp8-recipe", "another recipe's casts and speed are not known: taken as scaled by tensor")
    if not r.flag("--fp8-param-gather"):
        return
    if r.flag("--use-distributed-optimizer") and recipe in ("delayed", "tensorwise"):
        fields["fp8_all_gather"] = True
    else:
        r.unmodelled("--fp8-param-gather", "weights are gathered in bf16 here")


def _fp4(r: Reading, *, bf16: bool, fp8: bool) -> bool:
    """Products of layers run in NVFP4."""
    on = r.choice("--fp4-format", ("e2m1",)) is not None
    recipe = r.text("--fp4-recipe") or "nvfp4"
    if on and fp8:
        r.fault("--fp4-format", "contradicts --fp8-format", "keep one")
    if on and not bf16:
        r.fault("--fp4-format", "needs bf16 activations", "add --bf16")
    if on and recipe != "nvfp4":
        r.unmodelled("--fp4-recipe", "another recipe's casts and speed are not known: taken as nvfp4")
    if r.flag("--fp4-param-gather"):
        r.unmodelled("--fp4-param-gather", "weights are gathered in bf16 here")
    return on


def _ends_in_bf16(r: Reading, fields: dict[str, Any], *, narrow: bool) -> None:
    """Layers at the ends whose products stay in bf16: one each unless their numbers are given (arguments.py)."""
    on = bool(r.flag("--first-last-layers-bf16"))
    names = {"first_layers_bf16": "--num-layers-at-start-in-bf16", "last_layers_bf16": "--num-layers-at-end-in-bf16"}
    counts = {field: r.integer(name, least=0) for field, name in names.items()}
    if not on:
        for field, name in names.items():
            if counts[field] not in (None, 1):
                r.overruled(name, "without --first-last-layers-bf16 no layer stays in bf16")
        return
    if not narrow:
        r.overruled("--first-last-layers-bf16", "all layers are in bf16 or wider")
        return
    fields |= {field: 1 if count is None else count for field, count in counts.items()}


def _precision(r: Reading, fields: dict[str, Any]) -> None:
    bf16, fp16 = bool(r.flag("--bf16")), bool(r.flag("--fp16"))
    fp8 = r.choice("--fp8-format", ("e4m3", "hybrid"))
    if bf16 and fp16:
        r.fault("--fp16", "contradicts --bf16", "keep one")
    if fp8 is not None and not bf16:
        r.fault("--fp8-format", "needs bf16 activations", "add --bf16")
    if fp8 is not None:
        _fp8(r, fields)
    fp4 = _fp4(r, bf16=bf16, fp8=fp8 is not None)
    _ends_in_bf16(r, fields, narrow=fp4 or fp8 is not None)
    fields["precision"] = (
        "nvfp4" if fp4 else "fp8" if fp8 is not None else "bf16" if bf16 else "fp16" if fp16 else "fp32"
    )
    wide, narrow = bool(r.flag("--accumulate-allreduce-grads-in-fp32")), bool(r.flag("--grad-reduce-in-bf16"))
    main = r.choice("--main-grads-dtype", ("fp32", "bf16"))
    if wide and narrow:
        r.fault("--grad-reduce-in-bf16", "contradicts --accumulate-allreduce-grads-in-fp32", "keep one")
    if bf16:
        fields["reduce_dtype"] = "bf16" if narrow or main == "bf16" else "fp32"
    elif fp16:
        fields["reduce_dtype"] = "fp32" if wide else "fp16"


def _optimizer(r: Reading, fields: dict[str, Any]) -> None:
    name = r.choice("--optimizer", ("adam", "sgd")) or "adam"
    momentum = r.number("--sgd-momentum")
    fields["optimizer"] = "adamw" if name == "adam" else "sgd" if momentum == 0 else "sgd_momentum"
    aware = bool(r.flag("--use-precision-aware-optimizer"))
    first, second = r.text("--exp-avg-dtype"), r.text("--exp-avg-sq-dtype")
    master = r.choice("--main-params-dtype", ("fp32", "fp16"))
    for option, dtype in (("--exp-avg-dtype", first), ("--exp-avg-sq-dtype", second), ("--main-params-dtype", master)):
        if dtype not in (None, "fp32") and not aware:
            r.fault(option, f"{dtype} needs --use-precision-aware-optimizer", "add it, or fp32")
    if master is not None:
        fields["master_dtype"] = master
    if (first or "fp32", second or "fp32") == ("bf16", "bf16"):
        fields["optimizer_dtype"] = "bf16"
    elif {first, second} - {None, "fp32"}:
        narrow = "--exp-avg-dtype" if first not in (None, "fp32") else "--exp-avg-sq-dtype"
        r.unmodelled(narrow, "both moments are taken as fp32")


def _recompute(r: Reading, fields: dict[str, Any]) -> None:
    """How much of the activations is computed again. `block` counts layers of a stage: judged beside the pipeline."""
    simple = bool(r.flag("--recompute-activations"))
    grain = r.choice("--recompute-granularity", ("full", "selective"))
    method = r.choice("--recompute-method", ("uniform", "block"))
    modules = r.raw("--recompute-modules")
    if simple and grain == "full":
        r.fault("--recompute-activations", "means selective, --recompute-granularity says full", "keep one")
    grain = "selective" if simple else grain
    if grain == "full" and method is None:
        r.fault("--recompute-granularity", "full needs --recompute-method", "--recompute-method uniform")
    if grain == "selective" and method is not None:
        r.fault("--recompute-method", "is for full recomputation", "drop it")
    fields["recompute"] = grain or "none"
    if modules is not None and grain == "selective":
        fields["recompute_modules"] = modules.split() if isinstance(modules, str) else modules
    if "--checkpoint-activations" in r and "--deepspeed" not in r:
        r.fault("--checkpoint-activations", "is no longer an option", "--recompute-granularity full")


# Without --cuda-graph-modules a graph holds the whole layer
_LAYER: Final = ("attn", "mamba", "mlp", "moe")


def _graphs(r: Reading, fields: dict[str, Any]) -> None:
    """What is launched from CUDA graphs, in today's options and in those of before (core 0.14: --cuda-graph-scope)."""
    kind = r.choice("--cuda-graph-impl", ("none", "local", "transformer_engine", "full_iteration"))
    older = bool(r.flag("--enable-cuda-graph")), bool(r.flag("--external-cuda-graph"))
    modules, scope = r.raw("--cuda-graph-modules"), r.raw("--cuda-graph-scope")
    modules = scope if modules is None else modules
    if kind in (None, "none") and not any(older):
        return
    words = modules.split() if isinstance(modules, str) else list(modules or ())
    if kind == "full_iteration" or "full_iteration" in words:
        fields["cuda_graphs"] = ("full_iteration",)
    else:
        fields["cuda_graphs"] = tuple(words) if words not in ([], ["full"]) else _LAYER


def _stack(r: Reading, changes: dict[str, tuple[object, str]]) -> tuple[str, str]:
    """The software's preset, and what the arguments say of it otherwise."""
    local = r.choice("--transformer-impl", ("local", "transformer_engine")) == "local"
    flash, backend = bool(r.flag("--use-flash-attn")), r.text("--attention-backend")
    dropouts = [r.number(name) for name in ("--attention-dropout", "--hidden-dropout")]
    fused = bool(r.flag("--cross-entropy-loss-fusion"))
    r.text("--cross-entropy-fusion-impl")
    unfused_gradients = bool(r.flag("--no-gradient-accumulation-fusion"))
    deepspeed = "--deepspeed" in r
    old = (local and not flash) or deepspeed
    preset = "megatron-deepspeed-2022" if deepspeed else "megatron-2021" if old else "megatron-core-2025"
    drops = any(rate is None or rate > 0 for rate in dropouts)
    if drops != old:
        which = "--attention-dropout, --hidden-dropout"
        changes["dropout"] = (drops, f"{r.file}: {which} {'are 0.1 unless given' if drops else '0'}")
    if old:
        changes.pop("tp_overlap", None)
        changes.pop("tp_whole", None)
        return (
            preset,
            "--deepspeed" if deepspeed else "--transformer-impl local without flash attention: kernels of 2021",
        )
    if not fused:
        changes["loss"] = ("fp32_in_place", f"{r.file}: no --cross-entropy-loss-fusion")
    if unfused_gradients:
        changes["weight_gradients"] = ("added", r.place("--no-gradient-accumulation-fusion"))
    if "--num-experts" in r and not r.flag("--moe-grouped-gemm"):
        changes["grouped_gemm"] = ("modules", f"{r.file}: no --moe-grouped-gemm")
    kernel = {"flash": "flash2", "fused": "cudnn", "unfused": "math", "local": "math"}.get(backend or "")
    kernel = kernel or ("flash2" if flash and local else None)
    if kernel not in (None, "cudnn"):
        changes["attention.kernel"] = (kernel, r.place("--attention-backend" if backend else "--use-flash-attn"))
    return preset, "Megatron's arguments do not state a version; Megatron-Core with Transformer Engine is taken"


# flex: DeepEP or HybridEP
DISPATCHERS: Final = {"alltoall": "all_to_all", "allgather": "all_gather", "flex": "deep_ep"}

KNOWN: Final = frozenset(
    (
        *MODEL_NAMES,
        *PIPELINE_NAMES,
        *_FIELD_NAMES.values(),
        "--deepspeed", "--zero-stage", "--checkpoint-activations",
        "--global-batch-size", "--sequence-parallel", "--tp-comm-overlap", "--disable-tp-comm-overlap-ag", "--disable-tp-comm-overlap-rs", "--cp-comm-type",
        "--expert-tensor-parallel-size", "--moe-expert-capacity-factor", "--moe-token-dispatcher-type", "--moe-enable-deepep", "--overlap-moe-expert-parallel-comm", "--use-tp-pp-dp-mapping", "--use-distributed-optimizer", "--use-torch-fsdp2", "--use-megatron-fsdp",
        "--data-parallel-sharding-strategy", "--torch-fsdp2-no-reshard-after-forward", "--overlap-grad-reduce",
        "--overlap-param-gather", "--bf16", "--fp16", "--fp8-format", "--fp8-recipe", "--fp8-param-gather", "--fp4-format", "--fp4-recipe", "--fp4-param-gather", "--first-last-layers-bf16", "--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16",
        "--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16", "--main-grads-dtype", "--optimizer",
        "--sgd-momentum", "--use-precision-aware-optimizer", "--exp-avg-dtype", "--exp-avg-sq-dtype",
        "--main-params-dtype", "--recompute-activations", "--recompute-granularity", "--recompute-method",
        "--recompute-num-layers", "--recompute-modules", "--transformer-impl", "--use-flash-attn",
        "--attention-backend", "--attention-dropout", "--hidden-dropout", "--cross-entropy-loss-fusion",
        "--cross-entropy-fusion-impl", "--no-gradient-accumulation-fusion", "--moe-grouped-gemm",
        "--cuda-graph-impl", "--cuda-graph-modules", "--cuda-graph-scope", "--enable-cuda-graph", "--external-cuda-graph",
    )
)  # fmt: skip
