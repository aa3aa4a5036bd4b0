"""Preference trainers: the further work of their steps (trl's DPOTrainer, KTOTrainer)."""

from __future__ import annotations

from typing import Final

from simulator.formats.readers.plans.reading import Reading
from simulator.formats.readers.plans.trainer import Job

# Losses of a pair that ask no reference (LLaMA-Factory, hparams/finetuning_args.py: use_ref_model)
ALONE: Final = ("orpo", "simpo")


def pairs(job: Job, name: str, *, unpaired: bool = False, alone: bool = False) -> None:
    """Preferences: the chosen and the rejected answer run as one batch (trl's DPOTrainer).

    alone: without a reference. unpaired: single answers (KTOTrainer.compute_loss), of which policy and reference see
    mismatched ones too, without gradients.
    """
    if unpaired:
        r, forwards = job.r, 3
        if r.text("loss_type") == "apo_zero_unpaired":
            forwards = 1
        if r.flag("precompute_ref_log_probs"):
            forwards //= 2
        why = f"single answers; --reference model:{forwards} (base:{forwards}, with adapters) adds {forwards} "
        why += "forwards, of the reference, and of both on mismatched answers, and the reference's weights"
        _differs(r, name, why if forwards else "single answers, and nothing beside them")
        return
    job.fields["micro_batch_size"] = 2 * int(job.fields["micro_batch_size"])
    why = "two sequences a pair; --reference model (base, with adapters) adds the reference's forward and weights"
    _differs(job.r, name, "two sequences a pair, and no reference" if alone else why)


def _differs(r: Reading, name: str, why: str) -> None:
    """What a prediction misses of a trainer that a setting or a command names."""
    if name in r:
        r.unmodelled(name, why)
    else:
        r.default_unmodelled(name, "by the trainer", why)
