"""Preference trainers: the further work of their steps (trl's DPOTrainer, KTOTrainer)."""

from __future__ import annotations

from typing import Final

from simulator.formats.readers.plans.trainer import Job

# Losses of a pair that ask no reference (LLaMA-Factory, hparams/finetuning_args.py: use_ref_model)
ALONE: Final = ("orpo", "simpo")


def pairs(job: Job, name: str, *, unpaired: bool = False, alone: bool = False) -> None:
    """Preferences: the chosen and the rejected answer run as one batch (trl's DPOTrainer).

    alone: without a reference. unpaired: single answers (KTOTrainer.compute_loss), of which policy and reference see
    mismatched ones too, without gradients.
    """
    r = job.r
    forwards = 0 if alone else 1
    if unpaired and r.text("loss_type") != "apo_zero_unpaired":
        forwards = 3
    if r.flag("precompute_ref_log_probs"):
        forwards //= 2
    if not unpaired:
        job.fields["micro_batch_size"] = 2 * int(job.fields["micro_batch_size"])
    job.reference_forwards = forwards
    job.notes += (pairs_note(r.place(name) if name in r else r.file, forwards, unpaired=unpaired),)


def pairs_note(place: str, forwards: int, *, unpaired: bool = False) -> str:
    """What a line says of preferences."""
    what = "single answers" if unpaired else "two sequences a pair"
    more = {0: "no forward beside them", 1: "predict adds a forward without gradients"}
    more[3] = "predict adds three, of the reference and of both on mismatched answers"
    return f"{place}: {what}; {more[forwards]}{' (--reference none: without)' if forwards else ''}"
