"""The program of `shardwise capture config.json --recipe`: CONFIG RECIPE SEQ_LEN MICRO_BATCH_SIZE, of Hugging Face transformers.

fsdp2 shards each block and the root, computes in bf16 and reduces in fp32; ddp keeps fp32 parameters under autocast; zero3
is DeepSpeed's engine in bf16. AdamW, fused where the recipe lets one choose.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from validate.capture.ranks import RefusedError

Step = Callable[[dict[str, torch.Tensor]], None]


def main(config_file: str, recipe: str, seq_len: str, micro_batch_size: str) -> None:
    """Train without end: the capture stops it."""
    _without_broken_torchvision()
    import transformers

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    settings = json.loads(Path(config_file).read_text(encoding="utf-8"))
    try:
        config = transformers.AutoConfig.for_model(**settings)
    except ValueError as exc:
        problem = str(exc).splitlines()[0]
        raise RefusedError(
            f"transformers {transformers.__version__} does not know the model of {config_file}: {problem}"
        ) from exc
    config.use_cache = False
    step = _RECIPES[recipe](config)
    vocabulary = getattr(config, "vocab_size", None) or config.get_text_config().vocab_size
    while True:
        tokens = torch.randint(0, vocabulary, (int(micro_batch_size), int(seq_len)), device="cuda")
        step({"input_ids": tokens, "labels": tokens})


def _without_broken_torchvision() -> None:
    """Hugging Face imports torchvision where it is installed: one of another torch's build shall not stop a model of text."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, OSError, RuntimeError):
        for name in [one for one in sys.modules if one.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        vars(sys)["modules"]["torchvision"] = None  # what import finds of a module that is not there


def _model(config: Any, device: str) -> nn.Module:
    import transformers

    with torch.device(device):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.train()


def _fsdp2(config: Any) -> Step:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    distributed.init_process_group("nccl")
    model = _model(config, "meta")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = set(getattr(model, "_no_split_modules", None) or ())
    for module in model.modules():
        if type(module).__name__ in blocks:
            fully_shard(module, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cuda")
    return _eager(model)


def _ddp(config: Any) -> Step:
    distributed.init_process_group("nccl")
    step = _eager(nn.parallel.DistributedDataParallel(_model(config, "cuda")))

    def run(batch: dict[str, torch.Tensor]) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            step(batch)

    return run


def _eager(model: nn.Module) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run(batch: dict[str, torch.Tensor]) -> None:
        loss = model(**batch).loss
        with torch.autocast("cuda", enabled=False):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def _zero3(config: Any) -> Step:
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "zero_force_ds_cpu_optimizer": False,
    }
    deepspeed.init_distributed("nccl")
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = _model(config, "cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def run(batch: dict[str, torch.Tensor]) -> None:
        engine.backward(engine(**batch).loss)
        engine.step()

    return run


_RECIPES: dict[str, Callable[[Any], Step]] = {"fsdp2": _fsdp2, "ddp": _ddp, "zero3": _zero3}


if __name__ == "__main__":
    main(*sys.argv[1:])
