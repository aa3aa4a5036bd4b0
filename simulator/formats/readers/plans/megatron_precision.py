"""Megatron-LM's arguments on precisions: of products, of gradients, and of what the optimizer keeps."""

from __future__ import annotations

from typing import Any, Final

from simulator.formats.readers.plans.reading import Reading

_ADAMW: Final = (("--optimizer", "adamw"),)  # what a ready command shows


def read_precision(r: Reading, fields: dict[str, Any]) -> None:
    """The precision of layers and of gradient sums."""
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
    _gradients(r, fields, bf16=bf16, fp16=fp16)


def _gradients(r: Reading, fields: dict[str, Any], *, bf16: bool, fp16: bool) -> None:
    """The precision of their sums."""
    wide, narrow = bool(r.flag("--accumulate-allreduce-grads-in-fp32")), bool(r.flag("--grad-reduce-in-bf16"))
    main = r.choice("--main-grads-dtype", ("fp32", "bf16"))
    if wide and narrow:
        r.fault("--grad-reduce-in-bf16", "contradicts --accumulate-allreduce-grads-in-fp32", "keep one")
    if bf16:
        fields["reduce_dtype"] = "bf16" if narrow or main == "bf16" else "fp32"
    elif fp16:
        fields["reduce_dtype"] = "fp32" if wide else "fp16"


def _fp8(r: Reading, fields: dict[str, Any]) -> None:
    recipe = r.text("--fp8-recipe") or "delayed"
    fields["fp8_recipe"] = recipe if recipe in ("delayed", "tensorwise", "blockwise", "mxfp8") else "tensorwise"
    if fields["fp8_recipe"] != recipe:
        r.unmodelled("--fp8-recipe", "another recipe's casts and speed are not known: taken as scaled by tensor")
    if not r.flag("--fp8-param-gather"):
        return
    if (
        r.flag("--use-distributed-optimizer")
        and not r.flag("--use-megatron-fsdp")
        and recipe in ("delayed", "tensorwise")
    ):
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


def read_optimizer(r: Reading, fields: dict[str, Any]) -> None:
    """The optimizer, and the precision of its states."""
    name = str(r.raw("--optimizer", "optimizer") or "adam").lower()
    momentum = r.number("--sgd-momentum")
    if name not in ("adam", "adamw", "sgd") and "optimizer" not in r.given:
        r.fault("--optimizer", f"{name} is unknown", "adam, sgd, or --optimizer adamw for its size", _ADAMW)
    fields["optimizer"] = ("sgd" if momentum == 0 else "sgd_momentum") if name == "sgd" else "adamw"
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
