"""Three steps of a small Llama by Hugging Face's launchers: accelerate (FSDP2), Trainer (DDP) or peft (LoRA, DDP)."""

import sys
import tempfile

import torch
import transformers
import with_torchvision  # noqa: F401
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

SEQ, VOCAB = 32, 128


class Tokens(Dataset):
    """Sequences of one length, each its own labels."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(SEQ) + index) % VOCAB
        return {"input_ids": tokens, "labels": tokens}


def llama() -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=VOCAB, use_cache=False,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, attn_implementation="eager",
        )
    )  # fmt: skip


def accelerate() -> None:
    """FSDP2 as `accelerate launch` sets it up."""
    names = ["LlamaDecoderLayer"]
    wrap = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": names}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True, **wrap)
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=not torch.cuda.is_available())
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Tokens(), batch_size=2))
    for batch, _ in zip(loader, range(3), strict=False):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def trainer() -> None:
    """A Trainer's own loop."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=3, per_device_train_batch_size=2, report_to=[], save_strategy="no",
            optim="adamw_torch_fused", disable_tqdm=True, use_cpu=not torch.cuda.is_available(), logging_strategy="no",
        )  # fmt: skip
        transformers.Trainer(llama(), arguments, train_dataset=Tokens()).train()


def lora() -> None:
    """Adapters of rank 4 beside every projection of attention, the rest frozen."""
    import peft

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], lora_dropout=0.0)
    with device:
        model = DistributedDataParallel(peft.get_peft_model(llama(), adapters))
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3, fused=True)
    for _ in range(3):
        tokens = torch.randint(0, VOCAB, (2, SEQ), device=device)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


{"accelerate": accelerate, "trainer": trainer, "lora": lora}[sys.argv[1]]()
