"""What NeMo's and Megatron-Bridge's own code ran from release to release, where rows do not say it.

Read in github.com/NVIDIA/NeMo and NVIDIA-NeMo/Megatron-Bridge, at the commits that github.com/NVIDIA/dgxc-benchmarking installs
(nemotronh/setup.sh, nemotron-h/metadata.yaml). Nothing here was measured, and nothing was fitted.

Hybrids (scripts/performance/llm/pretrain_nemotronh_56b.py, nemo/collections/llm/gpt/model/ssm.py):

- 25.04 (7a8f1cc) takes pretrain_recipe() without performance_mode, which alone appends MegatronCommOverlapCallback: no
  userbuffers, and overlap_param_gather stays False. From 25.07 (00b778e) on performance_mode is True, and both run.
- --fp8_recipe is `ds`, delayed scaling, unless given, and dgxc gives `cs`, current scaling, from 25.10 (NeMo 25.09) on.
- SSMConfig derives from TransformerConfig, not from GPTConfig, and leaves gradient_accumulation_fusion at False. Megatron-Bridge's
  MambaModelProvider does so up to 26.02 (v0.3.1), and sets it from 26.04 (v0.4.0) on; Nemotron 3's recipes always did.
- attention_backend is flash, which names no version: taken for flash-attention 2. `auto` in NeMo from 25.07.01 (9244b1e) on, and in
  Megatron-Bridge's recipe of Nemotron-H from 26.04 (v0.4.0) on; Nemotron 3's always said fused.

NVFP4 of Nemotron 3 Super leaves the last 14 layers in bf16 (nemotron_3_super_bf16_with_nvfp4_mixed). That it leaves attention's products, the
latent ones and multi-token prediction in bf16 too, and Mamba's out_proj in MXFP8 (te_quant.cfg), no plan has a word for.

fp8. dgxc's launchers of NeMo 24.09 and 24.12 set model.fp8_params with fp8 (v24.11.1 and v25.03, */configure.sh), and Megatron-Bridge's recipes
fp8_param_gather (training/mixed_precision.py, from 25.09 to 26.06): matrices of layers are kept and gathered in fp8. Of those, only what one
scale of a tensor serves travels so here.

CUDA graphs. NeMo 2's scripts capture whole layers (--cuda_graphs) where scripts/performance/recommended_model_configs/
model_configs_{gb200,b200}.csv say so (9a86f67, 06c0e70), or dgxc's launchers: Nemotron-4 and Grok-1 on GB200 and B200 (*/launch.sh,
v25.05.02 to v25.08). None on H100.

Vocabulary. The same launchers train Llama 3.1 405B on mock data through GPT-2's tokenizer (llama3.1/configure.sh, llama3.1_405b.yaml), whose
50,257 words are padded to a multiple of 128 × tp, whatever a table says of Llama; 8B and 70B read Llama's.

Squared ReLU is torch.pow(relu(x), 2) in NeMo 2 (a lambda in ssm.py; fn/activation.py for Nemotron-4, its @torch.jit.script commented
out), one fused kernel in NeMo 1 and in Megatron-Core, whose function Bridge takes.
"""

from __future__ import annotations

import re
from typing import Final

from runs_table.published import is_hybrid, published
from simulator.spec.cluster.device import Device
from simulator.spec.software.stack import AttentionBackend
from simulator.studies.backtest.rows import RunRow

_NEMO: Final = re.compile(r"\bnemo (2[5-9])\.(\d\d)", re.IGNORECASE)
_BRIDGE: Final = re.compile(r"megatron-bridge (2[5-9])\.(\d\d)", re.IGNORECASE)
_LAUNCHED: Final = re.compile(r"nemo 24\.(09|1[0-2])\b", re.IGNORECASE)  # by dgxc-benchmarking v24.11.1 to v25.03
_GPT2_WORDS: Final = 50_257
_OVERLAPS: Final = (25, 7)
_CURRENT_SCALING: Final = (25, 9)
_ACCUMULATES: Final = (26, 4)  # Megatron-Bridge

_GRAPHED: Final = {  # families whose layers NeMo 2 captures, by GPU
    "gb200": r"nemotron-?4|grok|mixtral-?8x7b|gpt-?3|llama-?3(\.\d)?-8b",
    "b200-sxm": r"nemotron-?4|grok|mixtral-?8x7b|llama-?3(\.\d)?-(8|70)b",
}

_Release = tuple[int, int]


def stack_changes(row: RunRow) -> dict[str, object]:
    """Fields of the stack that the row's release has otherwise than the stack of its framework."""
    nemo, bridge = _release(_NEMO, row), _release(_BRIDGE, row)
    changes: dict[str, object] = {}
    if nemo is not None and row.mlp_kind == "squared_relu":
        changes["squared_relu"] = "operators"
    if not is_hybrid(row):
        return changes
    old_bridge = bridge is not None and bridge < _ACCUMULATES and (row.n_experts or 1) == 1
    if nemo is not None or old_bridge:
        changes["weight_gradients"] = "added"
    if nemo is not None and nemo < _OVERLAPS:
        changes |= {"tp_overlap": "backward", "late_parameters": True}
    if old_bridge or (nemo is not None and nemo <= _OVERLAPS):
        changes["attention"] = AttentionBackend(kernel="flash2")
    return changes


def fp8_recipe(row: RunRow) -> str | None:
    """How a hybrid's fp8 is scaled; None for other models."""
    nemo = _release(_NEMO, row)
    if not is_hybrid(row):
        return None
    return "delayed" if nemo is not None and nemo < _CURRENT_SCALING else "tensorwise"


def keeps_fp8(row: RunRow) -> bool:
    """Matrices of layers are parameters in fp8."""
    return (
        row.precision == "fp8"
        and bool(_LAUNCHED.search(row.framework) or _release(_BRIDGE, row))
        and not is_hybrid(row)
    )


def cuda_graphs(row: RunRow) -> dict[str, tuple[str, ...]]:
    """Fields of the plan for layers that run as CUDA graphs."""
    families = _GRAPHED.get(Device.resolve(row.gpu)) if _release(_NEMO, row) else None
    if families is None or not re.match(families, row.model_name, re.IGNORECASE):
        return {}
    return {"cuda_graphs": ("attn", "moe" if (row.n_experts or 1) > 1 else "mlp")}


def vocabulary(row: RunRow) -> int | None:
    """Rows of the embedding where the run took another tokenizer than its model's; None: the model's own."""
    model = published(row) if _LAUNCHED.search(row.framework) else None
    if model is None or model.name != "llama3.1-405b":
        return None
    multiple = 128 * (row.tp or 1)
    return -(-_GPT2_WORDS // multiple) * multiple


def bf16_layers(row: RunRow) -> dict[str, int]:
    """Fields of the plan for layers that NVFP4 leaves in 16 bits."""
    model = published(row) if row.precision == "nvfp4" else None
    return {"last_layers_bf16": 14} if model is not None and model.name == "nemotron-3-super-120b-a12b" else {}


def _release(framework: re.Pattern[str], row: RunRow) -> _Release | None:
    found = framework.search(row.framework)
    return (int(found[1]), int(found[2])) if found else None
