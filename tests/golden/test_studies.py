"""Every study answers to the byte what is written down: `python tests/golden/regenerate.py` where a change is meant."""

import pytest

from tests.golden import recording


@pytest.mark.parametrize("name", recording.names())
def test_the_answer_is_what_is_written_down(name: str) -> None:
    known = recording.expected(name)
    assert known is not None, f"no record: python tests/golden/regenerate.py {name}"
    assert not list(recording.changes(known, recording.record(name)))


def test_no_record_outlives_its_study() -> None:
    assert sorted(file.stem for file in recording.EXPECTED.glob("*.json")) == recording.names()
