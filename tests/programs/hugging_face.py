"""Three steps of a small model of Hugging Face transformers, nothing downloaded: FAMILY fsdp2|ddp."""

import sys

import torch
import transformers
import with_torchvision  # noqa: F401
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

SEQ, VOCAB = 32, 128
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": VOCAB, "use_cache": False}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "attn_implementation": "eager"}
EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}


def configured(family: str) -> nn.Module:
    """The model of a family, on the device in force."""
    match family:
        case "llama":
            config = transformers.LlamaConfig(**SIZES, **HEADS)
        case "qwen3":
            config = transformers.Qwen3Config(**SIZES, **HEADS)
        case "qwen3_moe":
            config = transformers.Qwen3MoeConfig(**SIZES, **HEADS, **EXPERTS, num_experts=4, moe_intermediate_size=48)
        case "gpt_oss":
            config = transformers.GptOssConfig(**SIZES, **HEADS, **EXPERTS, num_local_experts=4, sliding_window=16)
        case "mamba2":
            ssm = {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 16, "expand": 2}
            config = transformers.Mamba2Config(**SIZES, **ssm)
        case "llava":
            vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
            config = transformers.LlavaConfig(
                vision_config={"model_type": "clip_vision_model", **vision, "image_size": 32, "patch_size": 8},
                text_config={"model_type": "llama", **SIZES, **HEADS},
                image_token_index=VOCAB - 1,
                attn_implementation="eager",
            )
            return transformers.LlavaForConditionalGeneration._from_config(config)
        case _:
            raise SystemExit(f"no family {family}")
    return transformers.AutoModelForCausalLM.from_config(config)


def sharded(model: nn.Module, family: str) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if family == "llava":  # layer norms of bf16 keep fp32 statistics on a GPU, and bf16 ones on a CPU
        policy = MixedPrecisionPolicy()
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for layer in module:
                fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def inputs(family: str, device: torch.device) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, VOCAB - 1, (2, SEQ), device=device)
    if family != "llava":
        return {"input_ids": tokens, "labels": tokens}
    tokens[:, :16] = VOCAB - 1  # the places of the image's 4 x 4 patches
    images = torch.randn(2, 3, 32, 32, device=device)
    return {"input_ids": tokens, "labels": tokens, "pixel_values": images}


def main(family: str, recipe: str) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    with device:
        model = configured(family)
    model = (
        sharded(model, family)
        if recipe == "fsdp2"
        else DistributedDataParallel(model, find_unused_parameters=family == "llava")
    )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(3):
        loss = model(**inputs(family, device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


main(*sys.argv[1:])
