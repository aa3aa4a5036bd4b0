"""The program of `shardwise capture config.json --recipe`: CONFIG RECIPE SETTINGS, of Hugging Face transformers.

fsdp2 shards each block and the root, computes in bf16 and reduces in fp32; ddp keeps fp32 parameters under autocast; zero3
is DeepSpeed's engine in bf16. AdamW, fused where the recipe lets one choose. Of a model with a tower for images, sequences
begin with `images` of them. Parameters whose name matches a pattern of `freeze` are not trained; under an `adapter`, the path of
a file of peft's, only its pairs are, and all weights are bf16, since a unit of FSDP2 has one dtype.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from validate.capture.images import Images, has_tower
from validate.capture.ranks import RefusedError

Settings = dict[str, Any]
Step = Callable[[dict[str, torch.Tensor]], None]


def main(config_file: str, recipe: str, written: str) -> None:
    """Train without end: the capture stops it."""
    _without_broken_torchvision()
    import transformers

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    try:
        config = transformers.AutoConfig.for_model(**json.loads(Path(config_file).read_text(encoding="utf-8")))
    except ValueError as exc:
        problem = str(exc).splitlines()[0]
        raise RefusedError(
            f"transformers {transformers.__version__} does not know the model of {config_file}: {problem}"
        ) from exc
    config.use_cache = False
    settings = json.loads(written)
    if not has_tower(config):
        if settings["images"] or settings["image_size"]:
            raise RefusedError(f"--images, --image-size: {config.model_type} has no tower for images")
        settings["images"] = 0
    elif recipe == "zero3":  # its zero.Init makes a tower's buffers by torch's own functions, beside the capture's
        raise RefusedError(f"zero3 of {config.model_type}, which has a tower for images, is not captured: fsdp2 or ddp")
    settings["images"] = 1 if settings["images"] is None else settings["images"]
    images = _images(config, settings)  # before the recipe, whose weights may lie in parts
    step = _RECIPES[recipe](config, settings)
    vocabulary = getattr(config, "vocab_size", None) or config.get_text_config().vocab_size
    while True:
        tokens = torch.randint(0, vocabulary, (settings["micro_batch_size"], settings["seq_len"]), device="cuda")
        step(images.inputs(tokens) if images else {"input_ids": tokens, "labels": tokens})


def _without_broken_torchvision() -> None:
    """Hugging Face imports torchvision where it is installed: one of another torch's build shall not stop a model of text."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, OSError, RuntimeError):
        for name in [one for one in sys.modules if one.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        vars(sys)["modules"]["torchvision"] = None  # what import finds of a module that is not there


def _images(config: Any, settings: Settings) -> Images | None:
    import transformers

    if not settings["images"]:
        return None
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    return Images(model, settings["images"], settings["image_size"])


def _model(config: Any, settings: Settings, device: str) -> nn.Module:
    import transformers

    auto = transformers.AutoModelForImageTextToText if has_tower(config) else transformers.AutoModelForCausalLM
    dtype = torch.bfloat16 if settings["adapter"] else torch.float32
    with torch.device(device):
        model: nn.Module = auto.from_config(config, dtype=dtype)
    if settings["adapter"]:
        model = _adapted(model, settings["adapter"])
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    for pattern in settings["freeze"]:
        if not (names := [name for name in trained if fnmatchcase(name, pattern)]):
            raise RefusedError(f"--freeze {pattern} names no parameter that is trained, as {next(iter(trained))} is")
        for name in names:
            trained[name].requires_grad = False
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RefusedError(f"--freeze {' '.join(settings['freeze'])} leaves nothing to train")
    return model.train()


def _adapted(model: nn.Module, file: str) -> nn.Module:
    import peft

    written = {key: value for key, value in peft.LoraConfig.from_json_file(file).items() if key != "peft_type"}
    try:
        adapted: nn.Module = peft.get_peft_model(model, peft.LoraConfig(**written), autocast_adapter_dtype=False)
    except (TypeError, ValueError) as exc:
        raise RefusedError(f"--adapter {file}: {exc}") from exc
    return adapted


def _fsdp2(config: Any, settings: Settings) -> Step:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    distributed.init_process_group("nccl")
    model = _model(config, settings, "meta")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = set(getattr(model, "_no_split_modules", None) or ())
    for module in model.modules():
        if type(module).__name__ in blocks:
            fully_shard(module, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cuda")
    return _eager(model)


def _ddp(config: Any, settings: Settings) -> Step:
    distributed.init_process_group("nccl")
    model = _model(config, settings, "cuda")
    # towers have layers behind the one that is read
    step = _eager(nn.parallel.DistributedDataParallel(model, find_unused_parameters=settings["images"] > 0))

    def run(batch: dict[str, torch.Tensor]) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            step(batch)

    return run


def _eager(model: nn.Module) -> Step:
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-4, fused=True)

    def run(batch: dict[str, torch.Tensor]) -> None:
        loss = model(**batch).loss
        with torch.autocast("cuda", enabled=False):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def _zero3(config: Any, settings: Settings) -> Step:
    import deepspeed

    engine_settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "zero_force_ds_cpu_optimizer": False,
    }
    deepspeed.init_distributed("nccl")
    with deepspeed.zero.Init(config_dict_or_path=engine_settings):
        model = _model(config, settings, "cuda")
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-4, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=engine_settings)

    def run(batch: dict[str, torch.Tensor]) -> None:
        engine.backward(engine(**batch).loss)
        engine.step()

    return run


_RECIPES: dict[str, Callable[[Any, Settings], Step]] = {"fsdp2": _fsdp2, "ddp": _ddp, "zero3": _zero3}


if __name__ == "__main__":
    main(*sys.argv[1:])
