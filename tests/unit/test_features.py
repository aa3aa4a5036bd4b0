"""The table of features: its commands are taken, its tests and pages exist, and its page is what it says."""

from __future__ import annotations

from dataclasses import replace

import features  # experiments/
import pytest

LINES = features.features()


def test_commands_are_taken_and_tests_and_pages_exist() -> None:
    assert [fault for line in LINES for fault in features.faults(line)] == []


def test_the_page_is_as_it_would_be_written_now() -> None:
    assert features.PAGE.read_text(encoding="utf-8") == features.page(LINES), "python experiments/features.py"


def test_a_feature_stands_once() -> None:
    assert len({line.feature for line in LINES}) == len(LINES) >= 100


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"command": "predict --modle llama3-8b"}, "No such option '--modle'"),
        ({"command": "predikt"}, "No such command"),
        ({"command": "search --model llama3-8b"}, "Missing option"),
        ({"command": "calibrate learn"}, "Missing argument"),
        ({"test": LINES[0].test + "_no_more"}, "no such test"),
        ({"test": "tests/unit/test_nothing.py::test_it"}, "no such test"),
        ({"page": "guides/nothing.md"}, "no such page"),
    ],
)
def test_what_is_wrong_is_found(change: dict[str, str], told: str) -> None:
    (fault,) = features.faults(replace(LINES[0], **change))
    assert told in fault
