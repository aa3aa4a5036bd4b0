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

Squared ReLU is torch.pow(relu(x), 2) in NeMo 2 (a lambda in ssm.py; fn/activation.py for Nemotron-4, its @torch.jit.script commented
out), one fused kernel in NeMo 1 and in Megatron-Core, whose function Bridge takes.
"""

from __future__ import annotations

import re
from typing import Final

from simulator.backtest.published import is_hybrid, published
from simulator.readers.runs_table import RunRow
from simulator.stack import AttentionBackend

_NEMO: Final = re.compile(r"\bnemo (2[5-9])\.(\d\d)", re.IGNORECASE)
_BRIDGE: Final = re.compile(r"megatron-bridge (2[5-9])\.(\d\d)", re.IGNORECASE)
_OVERLAPS: Final = (25, 7)
_CURRENT_SCALING: Final = (25, 9)
_ACCUMULATES: Final = (26, 4)  # Megatron-Bridge

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


def wide_layers(row: RunRow) -> dict[str, int]:
    """Fields of the plan for layers that NVFP4 leaves in 16 bits."""
    model = published(row) if row.precision == "nvfp4" else None
    return {"last_layers_bf16": 14} if model is not None and model.name == "nemotron-3-super-120b-a12b" else {}


def _release(framework: re.Pattern[str], row: RunRow) -> _Release | None:
    found = framework.search(row.framework)
    return (int(found[1]), int(found[2])) if found else None
