"""What `accelerate launch` passes to the Trainer that it starts (accelerate 1.12: commands/launch.py, utils/launch.py).

Its options and configuration become variables of the environment: FSDP's and DeepSpeed's plugins, mixed precision where the
arguments state none (transformers 5, training_args.py), and torch.compile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from simulator.base.errors import Fault
from simulator.formats.readers.plans.reading import flattened
from simulator.formats.readers.plans.tuning_command import Option

_DEEPSPEED: Final = {
    "zero_stage": "stage",
    "offload_optimizer_device": "offload_optimizer",
    "offload_param_device": "offload_param",
}
_TABLES: Final = ("fsdp_config", "deepspeed_config", "dynamo_config", "parallelism_config", "megatron_lm_config")
Found = dict[str, tuple[Any, tuple[str, str]]]  # a Trainer's setting -> (value, (as it is spelled, its place))


def trainer_settings(
    options: Mapping[str, Option], config: Mapping[str, Any], file: str, script: str
) -> tuple[Found, list[Fault]]:
    """The Trainer's settings of a launcher's options, over those of its configuration `file`; what cannot be read."""
    stated: Found = {}
    for name, entry in flattened(config, file).items():
        table, _, key = name.partition(".")
        stated[key if table in _TABLES and key else name] = (entry.value, (entry.name, entry.place))
    for name, option in options.items():
        stated[name.replace("-", "_")] = (option.value, (option.spelled, option.place))
    kind = str(stated.get("distributed_type", ("", ("", "")))[0]).upper()
    own = {name for name, option in options.items() if option.value is True}
    if not own & {"use_fsdp", "use_deepspeed", "use_megatron_lm", "multi_gpu"}:
        own = {"FSDP": {"use_fsdp"}, "DEEPSPEED": {"use_deepspeed"}, "MEGATRON_LM": {"use_megatron_lm"}}.get(
            kind, set()
        )
    faults = [
        Fault(
            place=options[name].place if name in options else file,
            problem=f"{name}: a Trainer on it is not read",
            remedy="--use_fsdp, --use_deepspeed or --multi_gpu",
        )
        for name in sorted(own & {"use_megatron_lm", "tpu", "cpu", "use_xpu", "ipex"})
    ]
    found: Found = {}
    if "use_fsdp" in own:
        found = {f"fsdp_config.{name}": value for name, value in stated.items() if name.startswith("fsdp_")}
        found.setdefault("fsdp_config.fsdp_version", (1, ("fsdp_version", script)))
    elif "use_deepspeed" in own:
        found = _deepspeed(stated)
    found |= {
        f"parallelism_config.{name}": value for name, value in stated.items() if name.startswith("parallelism_config_")
    }
    precision, place = stated.get("mixed_precision", ("no", ("", "")))
    if precision in ("bf16", "fp16"):
        found[str(precision)] = (True, place)
    backend, place = stated.get("dynamo_backend", ("no", ("", "")))
    if str(backend).lower() == "inductor":
        found["torch_compile"] = (True, place)
    return found, faults


def _deepspeed(stated: Found) -> Found:
    """The plugin's settings as DeepSpeed's file (utils/dataclasses.py, DeepSpeedPlugin: everything else is "auto")."""
    if (file := stated.get("deepspeed_config_file")) is not None:
        return {"deepspeed": file}
    zero: dict[str, Any] = {"stage": 2}  # the launcher's default
    place = next(
        (stated[name][1] for name in ("zero_stage", "use_deepspeed", "distributed_type") if name in stated),
        ("use_deepspeed", ""),
    )
    for name, key in _DEEPSPEED.items():
        value = stated.get(name, (None, place))[0]
        if value is not None and value != "none":
            zero[key] = value if key == "stage" else {"device": value}
    steps = stated.get("gradient_accumulation_steps", ("auto", place))[0]
    table = {"zero_optimization": zero, "gradient_accumulation_steps": steps, "train_micro_batch_size_per_gpu": "auto"}
    return {"deepspeed": ({**table, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, place)}
