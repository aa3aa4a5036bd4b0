"""axolotl's YAML (0.13 to 0.16: utils/schemas, utils/config, loaders/model.py, core/builders)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from time import process_time as now
from typing import Final

from simulator.base.errors import Fault
from simulator.base.patterns import compiled
from simulator.formats.readers.peft_words import scoped
from simulator.formats.readers.plans import trainer
from simulator.formats.readers.plans.draft import Draft
from simulator.formats.readers.plans.options import table_of
from simulator.formats.readers.plans.preferences import ALONE, pairs
from simulator.formats.readers.plans.reading import Stated
from simulator.formats.readers.plans.trainer import LIGER, Job
from simulator.spec.model import Model, ModelPart

_FLAGS: Final = {  # older words for attn_implementation
    "flash_attention": "flash_attention_2", "sdp_attention": "sdpa", "eager_attention": "eager", "xformers_attention": "xformers",
    "flex_attention": "flex_attention",
}  # fmt: skip
_ROWS: Final = re.compile(r"\[\d*(:\d*)?\]$")
_MOST, _MOST_S = 1024, 2.0  # patterns, and seconds of the CPU for all of them
_FUSED: Final = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")
_LIGER: Final = {
    "liger_rms_norm": ("norm", "norm_dtype"),
    "liger_rope": ("rope",),
    "liger_fused_linear_cross_entropy": ("loss",),
}


def read_axolotl(stated: Stated) -> Draft:
    """The plan of a configuration that was read as plain data."""
    job = trainer.begin(stated, "axolotl")
    r = job.r
    trainer.precision(job, default=True)
    plain = "bf16" if r.flag("bfloat16") else "fp16" if r.flag("float16") else "fp32"
    job.loaded = job.mixed if job.mixed != "no" else plain
    if r.flag("fp8"):
        job.fields["precision"] = "fp8"
    trainer.parallelism(job)
    _degrees(job)
    _batch(job)
    trainer.length(job, 512)
    trainer.recompute(job)
    _adapter(job)
    trainer.optimizer(job, "adamw_torch_fused")
    trainer.kernels(job, implied=False)
    _kernels(job)
    _refusals(job)
    return job.draft("axolotl", "axolotl 0.16")


def _batch(job: Job) -> None:
    total = job.r.integer("batch_size")
    micro = job.r.integer("per_device_train_batch_size") or 1
    trainer.batch(job, micro=1, accumulation=max(1, (total or micro) // micro))


def _degrees(job: Job) -> None:
    r, fields = job.r, job.fields
    split = r.integers({"cp": "context_parallel_size", "tp": "tensor_parallel_size"}, above=1)
    fields |= split | ({"vocab_parallel": False} if "tp" in split else {})
    fields |= r.integers({"dp_shard": "dp_shard_size", "dp_replicate": "dp_replicate_size"})
    if job.engine == "fsdp" and "dp_shard" in fields:
        job.leftover = "dp_replicate"


def _adapter(job: Job) -> None:
    r = job.r
    kind = r.choice("adapter", ("lora", "qlora"))
    four, eight = r.flag("load_in_4bit"), r.flag("load_in_8bit")
    if kind is None:
        for name in (name for name, on in (("load_in_4bit", four), ("load_in_8bit", eight)) if on):
            r.fault(name, "goes with adapters alone", f"adapter: qlora, or {name}: false")
        trainer.weights(job)
        return
    if kind == "qlora" and not four and not r.flag("gptq"):
        r.fault("load_in_4bit", "adapter: qlora needs it", "load_in_4bit: true")
    double = r.flag("bnb_config_kwargs.bnb_4bit_use_double_quant") is not False
    base = "gptq" if r.flag("gptq") else trainer.quantised(kind == "qlora" and not eight, eight, double)
    kept = r.flag("peft_autocast_adapter_dtype") is False  # as loaded
    trainer.adapters(job, base, job.loaded if kept else "fp32")
    if r.flag("lora_target_linear"):
        job.fields["lora_targets"] = ("all",)
    _fused(job, eight=bool(eight))


def _fused(job: Job, *, eight: bool) -> None:
    """Autograd functions of whole projections: on unless they are named (utils/schemas/config.py)."""
    r = job.r
    flags = {name: r.flag(name) for name in _FUSED}
    named = [value for value in flags.values() if value is not None]
    sharded_flat = job.fields.get("data_parallel") == "fsdp1"
    usual = not (eight or r.flag("trust_remote_code") or sharded_flat)
    if all(flags.values()) or (not named and usual):
        place = next((r.place(name) for name in _FUSED if flags[name]), f"{r.file} (default)")
        job.changes["adapters"] = ("fused", place)
    elif any(named):
        for name in (name for name, on in flags.items() if on):
            r.unmodelled(name, "adapters are fused in all projections, or in none")


def _kernels(job: Job) -> None:
    r = job.r
    for name, kernel in _FLAGS.items():
        if r.flag(name) and kernel == "eager":
            job.change(name, **{"attention.kernel": "math"})
    plugins = " ".join(r.words("plugins"))
    for name, settings in _LIGER.items():
        if not r.flag(name):
            continue
        if "liger" in plugins:
            job.change(name, **{key: LIGER[key] for key in settings})
        else:
            r.overruled(name, "needs axolotl.integrations.liger.LigerPlugin among the plugins")
    if r.flag("cut_cross_entropy") or ("cut_cross_entropy" in plugins and r.raw("cut_cross_entropy") is None):
        job.change("plugins", loss="cut")
    if r.flag("chunked_cross_entropy"):
        r.unmodelled("chunked_cross_entropy", "the loss of chunks of logits: taken as one kernel")
        job.change("chunked_cross_entropy", loss="fused")


def _refusals(job: Job) -> None:
    r = job.r
    kind = r.text("rl")
    if kind in ("dpo", "ipo", *ALONE):
        pairs(job, "rl", alone=kind in ALONE)
    elif kind == "kto":
        pairs(job, "rl", unpaired=True)
    elif kind:
        r.fault("rl", f"{kind}: its generation, rewards or losses are not modelled", "dpo, kto, orpo, or without rl")
    if r.raw("unfrozen_parameters") and "freeze_modules" not in r.given:
        _unfrozen(job)


def _unfrozen(job: Job) -> None:
    """Patterns of the parameters that are trained alone; a dot of them is a dot (utils/freeze.py)."""
    r, name = job.r, "unfrozen_parameters"
    texts = [stated] if isinstance(stated := r.raw(name), str) else stated
    if not isinstance(texts, list) or len(texts) > _MOST or not all(isinstance(one, str) for one in texts):
        r.fault(name, f"is no list of at most {_MOST:,} patterns", 'for example ["^lm_head.weight$"]')
    elif any(_ROWS.search(one) for one in texts):
        r.fault(name, "rows of a parameter are not modelled", "patterns without [0:32000]")
    elif "peft" in job.fields:
        r.fault(name, "beside adapters axolotl freezes these too: their names begin otherwise", "without adapter")
    else:
        if any(word in one for one in texts for word in ("lm_head", "embed_tokens")):
            r.unmodelled(name, "the backward goes through frozen layers below what is trained too")
        patterns = {one: compiled(re.sub(r"\.(?!\+)", r"\\.", one)) for one in texts}

        def frozen(model: Model, _: object) -> object:
            words, place = _frozen(patterns, model), r.place(name)
            return words if isinstance(words, tuple) else Fault(place, words, "--freeze-modules with what stays frozen")

        job.by_model = {**job.by_model, "freeze_modules": frozen}


def _frozen(patterns: Mapping[str, re.Pattern[str] | None], model: Model) -> tuple[str, ...] | str:
    """Words for what no pattern matches from its name's beginning; or why there are none."""
    used, left, until_s = set[str](), dict[str, set[int]](), now() + _MOST_S
    parts: tuple[ModelPart, ...] = ("embedding", *model.body, "head")
    for number, part in enumerate(parts, start=-1):
        for module in (name.rpartition(".")[0] for name, _ in model.parameter_shapes(part)):
            paths = [path.format(number) for path in table_of("axolotl")["parameters"].get(module, ())]
            if not paths:
                return f"this model's {module} has no name here"
            hits = [one for one, made in patterns.items() if made and now() < until_s and any(map(made.match, paths))]
            used.update(hits)
            if now() > until_s:
                return "so many patterns take too long to try"
            if not hits:
                left.setdefault(module, set()).add(number)
    if unused := [one for one in patterns if one not in used]:
        return f"{unused[0][:60]!r} matches no parameter"
    layers = set(range(len(model.body)))
    in_some = {module: None if at == layers or not at & layers else at for module, at in left.items()}
    return tuple(word for module, at in in_some.items() for word in scoped([f"{module}.*"], at))
