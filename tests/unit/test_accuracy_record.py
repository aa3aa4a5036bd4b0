"""What reports say of past errors are the figures of docs/accuracy."""

from __future__ import annotations

import accuracy_record

from simulator.formats.html.step import record_of


def test_the_record_is_that_of_the_pages() -> None:
    assert accuracy_record.RECORD.read_text(encoding="utf-8") == accuracy_record.text(), (
        "stale: python experiments/accuracy_record.py"
    )


def test_runs_alike_are_those_of_the_device_and_precision_or_of_the_stack() -> None:
    found = record_of("h100-sxm5-80gb", "bf16", "llm-foundry-2023")
    assert found is not None
    assert found["rows"][0]["runs_of"] == "software llm-foundry-2023"
    assert {(row["device"], row["precision"]) for row in found["rows"][1:]} == {("h100-sxm5-80gb", "bf16")}
    assert record_of("no-such-gpu", "bf16", "no-such-stack") is None
