"""Fields of a plan that do nothing beside the others are told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from simulator.cli import main
from simulator.parallel.legality import unused
from simulator.spec.plan import Plan


def test_a_field_is_idle_until_what_it_needs_is_there() -> None:
    assert "recompute_modules" in unused(Plan(), experts=False)
    assert "recompute_modules" not in unused(Plan(recompute="selective"), experts=False)
    assert "sequence_parallel" in unused(Plan(), experts=False)
    assert "sequence_parallel" not in unused(Plan(tp=2), experts=False)
    assert "optimizer_impl" in unused(Plan(optimizer="adam8bit"), experts=False)
    assert "optimizer_impl" not in unused(Plan(), experts=False)
    assert "wide_embedding" in unused(Plan(optimizer="adam8bit"), experts=False)
    assert "wide_embedding" not in unused(Plan(optimizer="adam8bit", zero=0), experts=False)
    assert "dispatcher" in unused(Plan(), experts=False)
    assert "dispatcher" not in unused(Plan(), experts=True)


def test_every_idle_field_is_a_field() -> None:
    plans = (Plan(), Plan(data_parallel="deepspeed", zero=3), Plan(data_parallel="ddp", zero=0))
    assert {name for plan in plans for name in unused(plan, experts=False)} <= set(Plan.flat_fields())


def test_what_was_asked_for_in_vain_stands_among_the_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "llama3.2-1b", "--recompute-modules", "core_attn", "--recompute-every", "1"]
    flags += ["--sequence-parallel", "true", "--vocab-parallel", "false"]
    main(["predict", *flags, "--json"])
    sources = {one["what"]: one["detail"] for one in json.loads(capsys.readouterr().out)["sources"]}
    assert sources["plan.recompute_modules"] == 'without effect: needs recompute = "selective"'
    assert sources["plan.sequence_parallel"] == "without effect: needs tp above 1"
    assert not {"plan.recompute_every", "plan.vocab_parallel"} & set(sources)
    main(["predict", *flags, "--recompute", "selective", "--tp", "2", "--json"])
    assert "without effect" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("setting", "needs"),
    [
        ("comm_hook.rank=4", "comm_hook.kind"),
        ("one_bit.freeze_step=10", "one_bit.kind"),
        ("offload.pinned=false", "offload.optimizer, offload.parameters or offload.activations"),
        ("reshard_after_forward=2", 'data_parallel = "fsdp1" or "fsdp2"'),
        ("schedule=gpipe", "pp above 1"),
        ("galore_rank=8", 'optimizer = "galore"'),
        ("shard_reserve_bytes=1GB", 'shard_sizes = "by_memory"'),
        ("upcast_frozen=true", "peft, or freeze_modules"),
        ("expert_imbalance_sigma=0.1", "a model with experts"),
    ],
)
def test_details_of_what_is_off_are_told(setting: str, needs: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["predict", "--model", "gpt2", "--data-parallel", "deepspeed", "--set", f"plan.{setting}", "--json"])
    sources = {one["what"]: one["detail"] for one in json.loads(capsys.readouterr().out)["sources"]}
    name = setting.partition("=")[0].partition(".")[0]
    assert sources[f"plan.{name}"] == f"without effect: needs {needs}"


@pytest.mark.parametrize(
    ("setting", "needs"),
    [
        ("prefetch=3", "something on NVMe, or activations"),
        ("buffer_count=8", 'offload.optimizer = "nvme"'),
        ("overlap=false", 'offload.optimizer = "nvme"'),
        ("sub_group_numel=1000000", 'data_parallel = "deepspeed" with zero = 3, and offload.optimizer'),
        ("prefetch=0", ""),  # parameters then come on demand
        ("pinned=false", ""),
    ],
)
def test_details_of_what_is_offloaded_are_told(setting: str, needs: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And what is not told acts."""
    given = ["--model", "gpt2", "--data-parallel", "fsdp2", "--cluster", "hgx-h100-8"]
    given += ["--set", "plan.offload.optimizer=host", "--set", "plan.offload.parameters=host"]
    plain, asked = (_predicted(capsys, *given, *more) for more in ((), ("--set", f"plan.offload.{setting}")))
    found = {one["what"]: one["detail"] for one in asked["sources"] if "without effect" in one["detail"]}
    name = f"plan.offload.{setting.partition('=')[0]}"
    assert found == ({name: f"without effect: needs {needs}"} if needs else {})
    assert (asked["step_s"] == plain["step_s"]) == bool(needs)


def _predicted(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    main(["predict", *words, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found
