"""Every study answers to the byte what is written down: `python tests/golden/regenerate.py` where a change is meant."""

import pytest

from tests.golden import recording


@pytest.mark.parametrize("name", recording.names())
def test_the_answer_is_what_is_written_down(name: str) -> None:
    known = recording.expected(name)
    assert known is not None, f"no record: python tests/golden/regenerate.py {name}"
    assert not list(recording.changes(known, recording.record(name)))


@pytest.mark.parametrize("command", ["predict --model gpt2", "topo dgx1-v100-8", "collective all_reduce --size 8B:1MB"])
def test_what_json_prints_is_the_answer_that_was_printed_as_text(command: str) -> None:
    heard = recording.Asked()
    with heard.listening():
        recording.answer(command.split())
    assert heard.json == recording.answer([*command.split(), "--json"])[1] != ""


def test_no_record_outlives_its_study() -> None:
    assert sorted(file.stem for file in recording.EXPECTED.glob("*.json")) == recording.names()
