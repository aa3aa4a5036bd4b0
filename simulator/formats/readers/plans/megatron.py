"""Megatron-LM's arguments: a shell script, a line of one, or a plain list; as of core 0.14 (megatron/training/arguments.py).

World size = tp × cp × pp × dp. The distributed optimizer is ZeRO's stage 1; gradients are summed in fp32 with bf16 unless
--grad-reduce-in-bf16; without --sequence-parallel the tokens between tensor-parallel regions are on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from simulator.base.errors import PlanError
from simulator.base.files import ordinary
from simulator.formats.readers.plans.draft import Degree, Draft
from simulator.formats.readers.plans.launch_line import LaunchLine, read_launch_line
from simulator.formats.readers.plans.megatron_data_parallel import read_data_parallel
from simulator.formats.readers.plans.megatron_hybrid import with_layers_counted
from simulator.formats.readers.plans.megatron_model import read_model
from simulator.formats.readers.plans.megatron_pipeline import read_pipeline
from simulator.formats.readers.plans.megatron_precision import read_optimizer, read_precision
from simulator.formats.readers.plans.options import megatron_arguments, table_of
from simulator.formats.readers.plans.reading import MAX_SETTINGS, UNSET, Entry, Reading
from simulator.formats.readers.yaml_document import MAX_BYTES, read_yaml
from simulator.spec.model import Model

SOFTWARE: Final = "Megatron-LM core 0.14"
_LAUNCHER: Final = ("--nnodes", "--nproc_per_node", "--nproc-per-node", "--nodes", "--num_gpus", "--num_nodes")
_ABBREVIATED: Final = 4  # characters below which an abbreviation is not looked for


def read_megatron(text: str, file: str, given: Collection[str] = (), define: Mapping[str, str] | None = None) -> Draft:
    """The plan, and the model as far as the arguments state one. Raises PlanError where no arguments are found."""
    line = read_launch_line(text, file, define or {})
    entries = {_full(name): entry for name, entry in _modern(line.options).items() if name not in _LAUNCHER}
    unset = {_full(name): ", ".join(u.what for u in found) for name, found in line.unknown.items()}
    cures = {_full(name): flags for name, flags in line.cures.items()}
    entries = with_layers_counted(with_yaml(entries, file))
    r = Reading(entries, file, given, unset=unset, auto=UNSET, faults=line.faults, cures=cures)
    fields: dict[str, Any] = {"data_parallel": "megatron", "optimizer_impl": "fused"}
    fields |= {"alloc_conf": line.around.allocator.value} if line.around.allocator else {}
    stack = dict(line.around.changes)
    model, leftover = read_arguments(r, fields, stack)
    preset, why = read_stack(r, stack)
    total = r.integer("--global-batch-size")
    r.sort_rest(megatron_arguments().among(entries), typos=True)
    return Draft(
        format="megatron",
        software=SOFTWARE,
        file=file,
        fields=fields,
        places=_places(r, line),
        leftover=leftover,
        model=model,
        num_devices=line.world.num_devices,
        num_nodes=line.world.num_nodes,
        devices_fault=line.world.fault,
        global_batch_size=total,
        stack=preset,
        stack_why=why,
        stack_changes=stack,
        settings=(*r.settings(), *line.settings),
        faults=line.gathered(r.faults),
    )


def read_arguments(
    r: Reading, fields: dict[str, Any], stack: dict[str, tuple[object, str]], *, named: bool = False
) -> tuple[Model | None, Degree]:
    """The plan's fields; the model that the arguments describe, unless another setting names it; who takes the remaining ranks."""
    _batch(r, fields)
    _parallel(r, fields, stack)
    _experts(r, fields)
    read_precision(r, fields)
    read_optimizer(r, fields)
    _recompute(r, fields)
    _graphs(r, fields)
    model = None if named else read_model(r, fields)
    read_pipeline(r, fields)
    leftover = read_data_parallel(r, fields, stack)
    return model, leftover


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
    """The full option of an abbreviation, as argparse resolves it; options of other releases under their current names."""
    name = table_of("megatron")["renamed"].get(name.removeprefix("--"), name)
    arguments = megatron_arguments()
    every = arguments.known | arguments.flags
    if name in every or name in arguments.off or len(name) <= _ABBREVIATED:
        return name
    found = [known for known in every if known.startswith(name)]
    return found[0] if len(found) == 1 else name


def _modern(options: Mapping[str, Entry]) -> dict[str, Entry]:
    """The options, and what some of older releases say besides; what is stated itself comes later and holds."""
    implied = {
        f"--{name}": Entry(name=f"--{name}", value=value, place=options[f"--{old}"].place)
        for old, others in table_of("megatron")["implies"].items()
        if f"--{old}" in options and not (old == "checkpoint-activations" and "--deepspeed" in options)
        for name, value in others.items()
    }
    return {**implied, **options}


def _places(r: Reading, line: LaunchLine) -> dict[str, str]:
    places = {field: r.place(name) for field, name in _FIELD_NAMES.items() if name in r}
    if "--global-batch-size" in r:
        places["global_batch_size"] = r.place("--global-batch-size")
    places |= {"alloc_conf": line.around.allocator.place} if line.around.allocator else {}
    return places | ({"num_devices": line.world.place} if line.world.num_devices else {})


def _batch(r: Reading, fields: dict[str, Any]) -> None:
    for name, field in (("--micro-batch-size", "micro_batch_size"), ("--seq-length", "seq_len")):
        value = r.integer(name, plan_field=field)
        if value is not None:
            fields[field] = value
            r.note(name, f"{field} = {value}")
        elif name not in r and field not in r.given:
            flag = f"--{field.replace('_', '-')}"
            example = table_of("megatron")["examples"].get(name.removeprefix("--"), "1")
            remedy = f"{name} N in the file, or {flag} N beside it"
            r.fault(name, "is required and missing", remedy, ((flag, example),))
    if "--global-batch-size" not in r:
        fields.setdefault("num_micro_batches", 1)


def _parallel(r: Reading, fields: dict[str, Any], stack: dict[str, tuple[object, str]]) -> None:
    fields |= r.integers({field: _FIELD_NAMES[field] for field in ("tp", "pp", "cp", "ep")})
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
    disabled = {kind: r.flag(f"--disable-tp-comm-overlap-{word}") for kind, word in _TP_KINDS.items()}
    if overlap and tp > 1 and any(disabled.values()):
        places = ", ".join(
            r.place(f"--disable-tp-comm-overlap-{word}") for kind, word in _TP_KINDS.items() if disabled[kind]
        )
        stack["tp_whole"] = ([kind for kind, is_whole in disabled.items() if is_whole], places)
    kinds = {"p2p": "ring", "a2a": "all_to_all"}
    kind = r.text("--cp-comm-type")
    if kind is not None and kind in kinds:
        fields["cp_exchange"] = kinds[kind]
    elif kind is not None:
        r.unmodelled("--cp-comm-type", f"{kind}: keys and values are taken to pass round a ring")


def _experts(r: Reading, fields: dict[str, Any]) -> None:
    """Expert parallelism, expert capacity, and the position of pipeline stages in the rank order."""
    etp = r.integer("--expert-tensor-parallel-size", plan_field="etp")
    if "--num-experts" in r:
        fields["etp"] = etp or fields.get("tp", 1)
    capacity = r.number("--moe-expert-capacity-factor")
    if capacity is not None:
        fields["expert_capacity_factor"] = capacity
    kind = r.choice("--moe-token-dispatcher-type", tuple(DISPATCHERS))
    deep = bool(r.flag("--moe-enable-deepep"))
    drops = not r.flag("--disable-moe-token-dropping")
    if "--num-experts" in r and "--deepspeed" in r:
        if capacity is None and drops:
            fields["expert_capacity_factor"] = 1.0
    elif "--num-experts" in r:
        fields["dispatcher"] = DISPATCHERS["flex" if deep else kind or "allgather"]
    if r.flag("--overlap-moe-expert-parallel-comm"):
        fields["expert_overlap"] = True
    if r.flag("--use-tp-pp-dp-mapping"):
        fields["rank_order"] = "tp-cp-ep-pp-dp"


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
    r.flag("--checkpoint-activations")


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


_UNFUSED: Final = (
    ("--no-bias-swiglu-fusion", "gated_activation", "operators"),
    ("--no-rope-fusion", "rope", "unfused"),
)


def read_stack(r: Reading, changes: dict[str, tuple[object, str]]) -> tuple[str, str]:
    """The software's preset, with changes from the arguments."""
    local = r.choice("--transformer-impl", ("local", "transformer_engine")) == "local"
    flash, backend = bool(r.flag("--use-flash-attn")), r.text("--attention-backend")
    dropouts = [r.number(name) for name in ("--attention-dropout", "--hidden-dropout")]
    fused = bool(r.flag("--cross-entropy-loss-fusion"))
    r.text("--cross-entropy-fusion-impl")
    unfused_gradients = bool(r.flag("--no-gradient-accumulation-fusion"))
    deepspeed = "--deepspeed" in r
    core = bool(r.flag("--use-mcore-models"))
    old = (local and not flash and not core) or deepspeed
    _beside(r, changes, extension=not local and not old)
    by_deepspeed = "deepspeed-moe-2022" if "--num-experts" in r else "megatron-deepspeed-2022"
    preset = by_deepspeed if deepspeed else "megatron-2021" if old else "megatron-core-2025"
    drops = any(rate is None or rate > 0 for rate in dropouts)
    if drops != old:
        which = "--attention-dropout, --hidden-dropout"
        changes["dropout"] = (drops, f"{r.file}: {which} {'are 0.1 unless given' if drops else '0'}")
    if local or old or backend not in (None, "auto"):
        changes.pop("attention.kernel", None)  # of Transformer Engine's, by the environment
    if old:
        changes.pop("tp_overlap", None)
        changes.pop("tp_whole", None)
        return (
            preset,
            "--deepspeed"
            if deepspeed
            else "--transformer-impl local without flash attention or --use-mcore-models: kernels of 2021",
        )
    if not fused:
        changes["loss"] = ("fp32_in_place", f"{r.file}: no --cross-entropy-loss-fusion")
    if unfused_gradients:
        changes["weight_gradients"] = ("added", r.place("--no-gradient-accumulation-fusion"))
    for flag, name, value in _UNFUSED:
        if r.flag(flag):
            changes[name] = (value, r.place(flag))
    if "--num-experts" in r and not r.flag("--moe-grouped-gemm"):
        changes["grouped_gemm"] = ("modules", f"{r.file}: no --moe-grouped-gemm")
    kernel = {"flash": "flash2", "fused": "cudnn", "unfused": "math", "local": "math"}.get(backend or "")
    kernel = kernel or (("flash2" if flash else "math") if local else None)
    if kernel not in (None, "cudnn"):
        where = "--attention-backend" if backend else "--use-flash-attn" if flash else "--transformer-impl"
        changes["attention.kernel"] = (kernel, r.place(where))
    return preset, "Megatron's arguments do not state a version; Megatron-Core with Transformer Engine is taken"


# Calls for each parameter: an fp32 copy for the norm (training/utils, calc_params_l2_norm); the zeros' comparison, sum, difference
# and their addition (core/optimizer/clip_grads.py, count_zeros_fp32). Every iteration, whatever --log-interval is.
_LOGS: Final = {"--log-params-norm": 1, "--log-num-zeros-in-grad": 4}
# A prior of ± 50 %, in the time of an operator: where each iteration is logged, some 25 scalars go to TensorBoard (0.1 ms each),
# memory is asked for, a barrier stops the timer, and seven scalars are summed and read (training/training.py, training_log)
_LOGGED: Final = 270


def _beside(r: Reading, changes: dict[str, tuple[object, str]], *, extension: bool) -> None:
    """What the host does beside the layers: logs, and with Transformer Engine's layers (`extension`) fills of new tensors."""
    if r.flag("--deterministic-mode"):
        if extension:
            changes["fills_outputs"] = (True, r.place("--deterministic-mode"))
        r.unmodelled("--deterministic-mode", "deterministic kernels take as long as others here")
    asked = [name for name in _LOGS if r.flag(name)]
    if asked:
        changes["parameter_calls"] = (sum(_LOGS[name] for name in asked), ", ".join(map(r.place, asked)))
    if r.number("--clip-grad") == 0:
        changes["clips"] = ("", r.place("--clip-grad"))
    if r.integer("--log-interval") == 1 and r.text("--tensorboard-dir"):
        changes["step_calls"] = (_LOGGED, r.place("--log-interval"))


# flex: DeepEP or HybridEP
DISPATCHERS: Final = {"alltoall": "all_to_all", "allgather": "all_gather", "flex": "deep_ep"}


# Megatron-LM's --yaml-cfg: the arguments in a YAML file (megatron/training/yaml_arguments.py), read as options.
def with_yaml(entries: dict[str, Entry], file: str) -> dict[str, Entry]:
    """The options with those of the file that --yaml-cfg names, if it lies beside the script; the script's come first."""
    option = entries.get("--yaml-cfg")
    if option is None or not isinstance(option.value, str):
        return entries
    path = Path(file).parent / Path(option.value).name
    try:
        text = ordinary(path, MAX_BYTES).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as exc:
        problem = f"{option.value} is not beside the script, or cannot be read: {type(exc).__name__}"
        raise PlanError.at(option.place, problem, "put it there") from None
    found = {entry.name: entry for entry in _options(read_yaml(text, str(path)), str(path))}
    return {**found, **{name: entry for name, entry in entries.items() if name != "--yaml-cfg"}}


def _options(data: Mapping[str, Any], file: str, depth: int = 0) -> Iterator[Entry]:
    """The entries of a table and of the tables in it. What is null or false is not given."""
    table = table_of("megatron")["yaml"]
    for count, (key, value) in enumerate(data.items()):
        name = f"--{table['renamed'].get(key, key).replace('_', '-')}"
        if isinstance(value, Mapping) and depth < 3 and count < MAX_SETTINGS:
            yield from _options(value, file, depth + 1)
        elif key in table["inverted"]:
            if value is False:
                yield Entry(name=f"--{table['inverted'][key]}", value=True, place=f"{file}: {key}")
        elif value is not None and value is not False and name != "--":
            plain = value if value is True else [*map(str, value)] if isinstance(value, list) else str(value)
            yield Entry(name=name, value=plain, place=f"{file}: {key}")
        if value in ("swiglu", "squared_relu"):
            yield Entry(name=f"--{str(value).replace('_', '-')}", value=True, place=f"{file}: {key}")
