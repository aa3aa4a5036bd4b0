"""What files of Hugging Face's Trainer have in common (transformers 4.46 to 5, training_args.py; trl; peft 0.17; accelerate).

Readers of transformers' own arguments, of axolotl's and of LLaMA-Factory's files give each setting the name that
TrainingArguments, trl's SFTConfig and ModelConfig have for it; places keep the file's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from simulator.base.schema import nearest
from simulator.formats.readers.peft_words import is_pattern, matched, with_ranks
from simulator.formats.readers.plans import accelerate
from simulator.formats.readers.plans.draft import Degree, Draft
from simulator.formats.readers.plans.options import options_of, table_of
from simulator.formats.readers.plans.reading import Entry, Reading, ReadJson, Stated, flattened
from simulator.spec.model import Model
from simulator.spec.model.families import preset_of

_F: Final = "fsdp_config.fsdp_"
_DEEPSPEED: Final = "deepspeed_config.deepspeed_config_file"
DTYPES: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "auto": "bf16", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}  # fmt: skip
_ATTENTION: Final = {
    "eager": "math", "sdpa": "flash2", "flash_attention_2": "flash2", "flash_attention_3": "flash3", "auto": "flash2",
    "flex_attention": "flash2", "disabled": "math", "fa2": "flash2", "fa3": "flash3", "flash_attn": "flash2", "xformers": "flash2",
}  # fmt: skip
_WORDS: Final = {word.lower(): word for word in accelerate.STRATEGIES}  # of the setting `fsdp`
UNSLOTH: Final = {"adapters": "fused", "norm": "fused", "norm_dtype": "compute", "rope": "fused", "loss": "fused"}
LIGER: Final = {"loss": "fused_linear", "norm": "fused", "norm_dtype": "compute", "rope": "fused"}

Engine = Literal["ddp", "fsdp", "deepspeed"]


@dataclass
class Job:
    """A run as it is read: Plan's fields, settings of its software, and what only the model decides.

    devices: GPUs of the job, None: not known; its nodes. mixed: the dtype that products are cast to, "no" without; loaded: that of the weights as they come from the disk; by_gpu: bf16
    is meant where the GPU has it, else fp16.
    """

    r: Reading
    read_json: ReadJson
    fields: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, tuple[object, str]] = field(default_factory=dict)
    by_model: Mapping[str, Callable[[Model, Mapping[str, Any]], object]] = field(default_factory=dict)
    assumed: dict[str, tuple[object, str]] = field(default_factory=dict)
    engine: Engine = "ddp"
    mixed: str = "no"
    loaded: str = "fp32"
    by_gpu: bool = False
    leftover: Degree | None = "dp_replicate"
    devices: tuple[int | None, int] = (None, 1)
    reference_forwards: int = 0
    notes: tuple[str, ...] = ()

    def change(self, name: str, **settings: object) -> None:
        """Settings of the stack that the file's setting `name` implies."""
        self.changes |= {key: (value, self.r.place(name)) for key, value in settings.items()}

    def draft(self, form: str, software: str) -> Draft:
        """What was read, once everything is."""
        r, total = self.r, self.fields.pop("global_batch_size", None)
        model, unknown = _model(r)
        r.sort_rest(options_of(form), typos=True)
        stack = "torch-2.11-compiled" if self.fields.pop("compiled", False) else "transformers-2024"
        if form != "unsloth" and self.fields.get("lora_targets") == ("all",):  # Unsloth makes a module of each expert
            self.by_model = {**self.by_model, "lora_targets": _all_linear}
            del self.fields["lora_targets"]
        return Draft(
            format=form,
            software=software,
            file=r.file,
            fields=self.fields,
            places={name: r.place(key) for name, key in _PLACES.items() if key in r},
            leftover=self.leftover,
            model=model,
            model_unknown=unknown,
            global_batch_size=total,
            assumed={name: entry for name, entry in self.assumed.items() if name not in self.fields},
            by_model=self.by_model,
            half_by_gpu=self.by_gpu,
            stack=stack,
            stack_why="Hugging Face's Trainer; versions are not stated",
            stack_changes=self.changes,
            settings=r.settings(),
            faults=tuple(r.faults),
            reference_forwards=self.reference_forwards,
            notes=self.notes,
        )


def _all_linear(model: Model, _: object) -> tuple[str, ...]:
    """What peft finds as linear modules: experts with biases are parameters of one module (modeling_gpt_oss.py)."""
    return ("attention",) if model.experts is not None and model.experts.bias else ("all",)


_PLACES: Final = {
    "micro_batch_size": "per_device_train_batch_size", "num_micro_batches": "gradient_accumulation_steps", "seq_len": "max_length",
    "model": "model_name_or_path", "optimizer": "optim", "lora_rank": "lora_r", "lora_dropout": "lora_dropout",
    "lora_targets": "lora_target_modules", "train_modules": "lora_modules_to_save", "data_parallel": "fsdp",
}  # fmt: skip


def begin(stated: Stated, form: str) -> Job:
    """The settings under common names, as the format's table has them."""
    names = table_of(form)["names"]
    unset = {names.get(name, name): entry for name, entry in stated.unset.items()}
    cures = {names.get(name, name): flags for name, flags in stated.cures.items()}
    r = Reading(_entries(stated, names), stated.file, stated.given, unset=unset, auto=stated.auto, cures=cures)
    return Job(r, stated.read_json, devices=(stated.num_devices, stated.num_nodes or 1))


def _entries(stated: Stated, names: Mapping[str, str]) -> dict[str, Entry]:
    """FSDP's words become accelerate's settings, a DeepSpeed file or table the one that accelerate's plugin would name."""
    found: dict[str, Entry] = {}
    leaves = "deepspeed", "lora_rank_pattern"
    for name, entry in flattened(stated.data, stated.file, leaves, stated.places).items():
        if name.startswith("fsdp_config."):
            key = name.removeprefix("fsdp_config.").removeprefix("fsdp_")
            found[f"{_F}{ {'cpu_offload': 'offload_params'}.get(key, key) }"] = entry
        else:
            found[names.get(name, name)] = entry
    fsdp = found.get("fsdp")
    words = fsdp.value if fsdp is not None else None
    listed = words.replace(",", " ").split() if isinstance(words, str) else words if isinstance(words, list) else []
    for word in map(str, listed):
        key, value = ("sharding_strategy", _WORDS.get(word)) if word in _WORDS else _OTHER.get(word, ("", None))
        of_one = key == "sharding_strategy" and str(getattr(found.get(f"{_F}version"), "value", "")) == "2"
        if of_one:  # of FSDP2 the words say only what stays gathered
            key, value = "reshard_after_forward", None if word == "full_shard" else word != "shard_grad_op"
        if fsdp is not None and value is not None:
            found.setdefault(f"{_F}{key}", replace(fsdp, value=value))
    if words is True or "auto_wrap" in listed:  # training_args.py; without it the model is one unit
        policy = Entry(name="fsdp", value="TRANSFORMER_BASED_WRAP", place=f"{stated.file}: fsdp")
        found.setdefault(f"{_F}auto_wrap_policy", policy)
    return found


_OTHER: Final = {"offload": ("offload_params", True)}


def precision(job: Job, default: object = None) -> None:
    """Mixed precision: bf16, fp16, tf32. default: of bf16."""
    r, flags = job.r, {}
    for name in ("bf16", "fp16"):
        value = r.raw(name)
        flags[name] = (
            (default if name == "bf16" else None) if value is None else value in ("auto", "full") or r.flag(name)
        )
    if flags["bf16"] and flags["fp16"]:
        r.fault("fp16", "contradicts bf16", "one of the two")
    job.mixed = "bf16" if flags["bf16"] else "fp16" if flags["fp16"] else "no"
    job.by_gpu = r.raw("bf16") == "auto"
    plain = "tf32" if r.raw("tf32") != "auto" and r.flag("tf32") else "fp32"
    job.fields["precision"] = job.mixed if job.mixed != "no" else plain


def batch(job: Job, micro: int, accumulation: int = 1) -> None:
    """Sequences a GPU and micro-batch, and micro-batches a step; where the file does not say, the framework's defaults."""
    r, fields = job.r, job.fields
    for name, key, default in (
        ("micro_batch_size", "per_device_train_batch_size", micro),
        ("num_micro_batches", "gradient_accumulation_steps", accumulation),
    ):
        value = r.integer(key, plan_field=name) or default
        differs = name in fields and fields[name] != value and not (name == "num_micro_batches" and fields[name] == 1)
        if differs and job.engine == "deepspeed":
            r.fault(key, f"{value} contradicts the DeepSpeed file's {fields[name]}", 'the same, or "auto" there')
        fields[name] = value
    if r.flag("auto_find_batch_size"):
        r.unmodelled("auto_find_batch_size", "the batch as it is stated")


def length(job: Job, default: int | None, packed: str = "packing") -> None:
    """Tokens a sequence: what the file cuts them to. default: None: the training script's. packed: the setting that packs."""
    r = job.r
    found = r.integer("max_length", plan_field="seq_len") or default
    if found is None:
        job.assumed["seq_len"] = (2048, "these arguments state no length")
    else:
        job.fields["seq_len"] = found
    packs(r, packed, on=bool(r.flag("packing")) or packed != "packing")


def packs(r: Reading, name: str, *, on: bool) -> None:
    """Whether sequences are joined to the full length."""
    if on:
        r.note(name, "sequences of the full length; attention is over all of it, unless --document-len is given")
    else:
        why = "every sequence is taken as long as the longest that is allowed; shorter ones are faster"
        r.default_unmodelled(name, "false", why)


def parallelism(job: Job) -> None:
    """DDP, FSDP or DeepSpeed, as accelerate's plugins run them."""
    r, fields = job.r, job.fields
    sharded = bool(r.raw("fsdp")) or any(name.startswith(_F) for name in r.entries)
    mixed = job.mixed if job.mixed != "no" else None
    if _DEEPSPEED in r and sharded:
        r.fault(_DEEPSPEED, "contradicts fsdp", "one of the two")
    if _DEEPSPEED in r:
        job.engine = "deepspeed"
        given = {*r.given, "precision", "micro_batch_size", "num_micro_batches", "optimizer"}
        inner = replace(r, given=given)  # what this file says fills in "auto"
        table: Any = r.entries[_DEEPSPEED].value
        inside = isinstance(table, Mapping)
        path = r.place(_DEEPSPEED) if inside else r.text(_DEEPSPEED)
        if inside:
            r.raw(_DEEPSPEED)
        if path is not None:  # else a fault says what it is
            read = (lambda _: table) if inside else job.read_json
            job.leftover, job.by_model = accelerate.deepspeed_file(inner, fields, read, path, mixed)
    elif sharded:
        job.engine = "fsdp"
        job.leftover = accelerate.fsdp(r, fields, *job.devices)
        job.by_model = {"reduce_dtype": accelerate.compute_dtype}
    else:
        fields |= {"data_parallel": "ddp", "zero": 0}
    if any(name.startswith("parallelism_config.parallelism_config_") for name in r.entries):
        job.leftover = accelerate.degrees(r, fields, job.leftover)
    if r.flag("accelerator_config.gradient_accumulation_kwargs.sync_each_batch") and job.engine != "deepspeed":
        fields["sync_every_micro_batch"] = True
    megabytes = r.number("ddp_bucket_cap_mb")
    if megabytes is not None and megabytes > 0 and job.engine == "ddp":
        fields["bucket_bytes"] = int(megabytes * 2**20)


def recompute(job: Job, default: bool = False) -> None:  # noqa: FBT001, FBT002
    """Checkpointed layers, and what of them leaves for host memory."""
    r, fields = job.r, job.fields
    word = r.raw("gradient_checkpointing", "recompute")
    offloads = r.raw("activation_offloading") in (True, "legacy", "hidden_states")
    moved = word in ("offload", "unsloth", "offload_disk") or offloads
    if not (moved or word is None or isinstance(word, bool)):
        word = bool(r.flag("gradient_checkpointing"))
    again = moved or bool(default if word is None else word) or fields.get("recompute") == "full"
    fields["recompute"] = "full" if again else "none"
    if moved:
        fields["offload"] = {**fields.get("offload", {}), "activations": "host"}
    if again and r.flag("gradient_checkpointing_kwargs.use_reentrant") is False:
        job.change("gradient_checkpointing_kwargs.use_reentrant", early_stop=True)


def optimizer(job: Job, default: str, classes: Mapping[str, str] | None = None) -> None:
    """By TrainingArguments' names; states in the dtype of what is trained, bitsandbytes' 32-bit ones in fp32.

    classes: those names by the last part of a class's.
    """
    r, fields, table = job.r, job.fields, table_of("transformers")["optimizers"]
    if job.engine == "deepspeed" and "optimizer" in fields:  # transformers/integrations/deepspeed.py
        r.overruled("optim", "the DeepSpeed file's own optimizer is taken")
        return
    name = "adafactor" if r.flag("adafactor") else (r.text("optim") or default).lower()
    name = (classes or {}).get(name.rpartition(".")[2], name)
    found = table.get(name)
    if found is None and "optimizer" not in r.given:
        remedy = f"{nearest(name, table) or 'adamw_torch'}, or --optimizer"
        r.fault("optim", f"{name} is not modelled", remedy, (("--optimizer", "adamw"),))
    kind, impl, *more = (found or "adamw foreach").split()
    usual = {"optimizer": kind, "optimizer_impl": impl}
    fields |= usual | ({"optimizer_in_backward": True} if "in_backward" in more else {})
    rank = re.search(r"\brank\s*=\s*([1-9]\d{0,5})\b", str(r.raw("optim_args") or ""))
    if classes is None and kind.endswith("8bit") and "fp32" in more and job.engine not in ("fsdp", "deepspeed"):
        fields["wide_embedding"] = True  # Trainer.create_optimizer: GlobalOptimManager, of transformers 5
    if kind == "galore" and rank:
        fields["galore_rank"] = int(rank[1])
    if fields.get("master_dtype", "fp32") == "bf16" and "fp32" not in more:
        fields["optimizer_dtype"] = "bf16"


def weights(job: Job, trained: str | None = None) -> None:
    """Dtype of what is trained. trained: what the framework casts it to; None: as loaded, but engines keep fp32 beside mixed precision.

    FSDP: accelerate casts flat parameters that are trained (accelerator.py, fsdp_utils.py); DeepSpeed: its master weights.
    """
    for name in ("lora_r", "lora_dropout", "lora_target_modules", "lora_target_linear", "lora_modules_to_save", "gptq"):
        job.r.overruled(name, "there is no adapter")
    found = trained or job.loaded
    if job.engine in ("fsdp", "deepspeed") and job.mixed != "no":
        found = "fp32"
    job.fields |= {"master_dtype": found} if found != "fp32" else {}
    if job.mixed == "no" and job.loaded != "fp32":
        job.fields["precision"] = job.loaded


def adapters(
    job: Job, base: str | None, dtype: str, *, rank: int = 8, share: float = 0, usual: tuple[str, ...] = ("q", "v")
) -> None:
    """Adapters of peft: LoRA or DoRA. base: of frozen weights, None: as they are loaded; dtype: of the pairs.

    rank, share (of dropout), usual (modules): where nothing states them; usual by default peft's for Llama and its kin
    (utils/constants.py).
    """
    r, fields = job.r, job.fields
    fields |= {"peft": "dora" if r.flag("use_dora") else "lora"}
    fields |= {"lora_rank": r.integer("lora_r", plan_field="lora_rank") or rank}
    fields |= dropout(r, "lora_dropout") if share == 0 or "lora_dropout" in r else {"lora_dropout": share}
    targets, saved = _names(r, "lora_target_modules"), _names(r, "lora_modules_to_save")
    if targets or "lora_targets" not in r.given:
        fields["lora_targets"] = targets or usual
    fields |= {"train_modules": saved} if saved else {}
    fields |= {"base_weights": base} if base is not None else {}
    if dtype != "fp32":
        fields["master_dtype"] = dtype
    elif job.mixed == "no":
        fields["adapter_dtype"] = "fp32"
    _by_layer(job)
    for key in ("lora_target_parameters", "lora_layer_replication"):
        if r.raw(key):
            r.fault(key, "adapters beside single parameters or repeated layers are not modelled", f"without {key}")


def quantised(four: bool | None, eight: bool | None, double: bool) -> str | None:  # noqa: FBT001
    """Frozen weights as bitsandbytes stores them; None: as they are loaded."""
    return ("nf4_double" if double else "nf4") if four else "int8" if eight else None


def ulysses(job: Job, name: str = "sequence_parallel_size") -> None:
    """Ranks that share a sequence, whose heads are swapped for tokens."""
    ranks = job.r.integer(name, plan_field="cp") or 1
    job.fields |= {"cp": ranks, "cp_exchange": "all_to_all"} if ranks > 1 else {}


def dropout(r: Reading, name: str) -> dict[str, float]:
    """The field of it, where there is any."""
    share = r.number(name) or 0
    if not 0 <= share < 1:
        r.fault(name, f"{share:g} is no fraction", "0 or more, below 1")
    return {"lora_dropout": share} if share else {}


def _by_layer(job: Job) -> None:
    """Adapters in some layers, or with ranks of their own."""
    r = job.r
    layers, ranks = r.raw("lora_layers_to_transform"), r.raw("lora_rank_pattern")
    numbers = [layers] if isinstance(layers, int) else layers
    if layers is not None and not (isinstance(numbers, list) and all(type(one) is int and one >= 0 for one in numbers)):
        r.fault("lora_layers_to_transform", f"{str(layers)[:60]} are no numbers of layers", "for example [0, 1, 2]")
        return
    if ranks is not None and not isinstance(ranks, Mapping):
        r.fault("lora_rank_pattern", f"{str(ranks)[:60]} is no table of ranks", "for example {q_proj: 32}")
        return
    if "lora_targets" in job.fields and (numbers or ranks):
        words, faults = with_ranks(job.fields["lora_targets"], numbers or None, ranks or {})
        job.fields["lora_targets"] = words
        for key, problem in faults:
            r.fault("lora_rank_pattern", f"{key[:60]}: {problem}", "a module's name or path, and a whole number")


def _names(r: Reading, key: str) -> tuple[str, ...]:
    """Modules as a list, as one text with commas, or as a pattern that whole paths of modules match (peft)."""
    value = r.raw(key)
    if value is None:
        return ()
    words = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    found = tuple(word.strip().rpartition(".")[2] for word in map(str, words) if word.strip())
    if not any(map(is_pattern, map(str, words))):
        return found
    modules = matched(value) if isinstance(value, str) else ()
    if not modules:
        r.fault(key, "is no pattern that modules of layers match", "the modules' names, or all-linear")
        return ()
    r.note(key, f"the pattern matches {', '.join(modules)}")
    return modules


def kernels(job: Job, *, implied: bool = True) -> None:
    """Attention, Liger's kernels, torch.compile, clipping. implied: how to compile says that it is (training_args.py)."""
    r = job.r
    attention = r.text("attn_implementation")
    kernel = _ATTENTION.get((attention or "auto").rpartition("/")[2].replace("flash-attn", "fa").replace("-", "_"))
    if attention is not None and kernel is None:
        r.unmodelled("attn_implementation", "FlashAttention 2 is taken")
    elif kernel not in (None, "flash2"):
        job.change("attn_implementation", **{"attention.kernel": kernel})
    if r.flag("use_liger_kernel"):
        job.change("use_liger_kernel", **LIGER)
    asked = [name for name in ("torch_compile_backend", "torch_compile_mode") if r.raw(name)]  # each asks for it too
    if r.raw("torch_compile") == "auto" or r.flag("torch_compile") or (implied and asked):
        job.fields["compiled"] = True
    for name, usual in (("torch_compile_backend", "inductor"), ("torch_compile_mode", "default")):
        if name in asked and r.raw(name) != usual:
            r.unmodelled(name, f"taken as {usual}")
    if r.number("max_grad_norm") == 0 and job.engine != "deepspeed":  # which computes the norm all the same
        job.change("max_grad_norm", clips="")


def _model(r: Reading) -> tuple[str | None, str]:
    """The preset that the model's name is of; else its name and what to do."""
    name = r.text("model_name_or_path")
    found = preset_of(name) if name else None
    if name is None or found is not None:
        r.note("model_name_or_path", f"model {found}")
        return found, ""
    r.note("model_name_or_path", f"{name} is not a preset")
    return None, f"{name} is not a preset; --model NAME, or its config.json"
