import gzip
import json
from pathlib import Path

import pytest

from simulator.base.errors import TableError
from validate.samples import MAX_FAULTS, MAX_LINE_BYTES, MAX_WRONG, machine_id, read_samples, sample_key, sample_line

MACHINE = {"kind": "machine", "device": "box", "torch": "2.13", "num_ranks": 2}
GEMM = {"kind": "gemm", "m": 64, "n": 64, "k": 64, "dtype": "fp32", "layout": "tn", "time_s": 1e-5, "reps": 5}


def written(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines), encoding="utf-8")
    return path


def faults_of(tmp_path: Path, *lines: object) -> tuple[list[str], int]:
    found = read_samples([written(tmp_path, MACHINE, GEMM, *lines)])
    return [str(f) for f in found.faults], len(found.samples)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ('{"kind": "gemm", "m": 1, "m": 2}\n', "'m' appears twice"),
        (json.dumps({**GEMM, "time_s": -1.0}) + "\n", "time_s = -1.0 is not above 0"),
        (json.dumps({**GEMM, "time_s": float("nan")}) + "\n", "NaN is not a number"),
        (json.dumps(GEMM).replace("1e-05", "1e999") + "\n", "1e999 is not a number"),
        ('{"kind": "collective", "size_bytes": 1e309}\n', "1e309 is not a number"),
        (json.dumps({**GEMM, "time_s": "fast"}) + "\n", "is not a number"),
        (json.dumps({**GEMM, "time_s": True}) + "\n", "is not a number"),
        (json.dumps({**GEMM, "time_s": 10**400}) + "\n", "longer than a year"),
        (json.dumps({k: v for k, v in GEMM.items() if k not in ("k", "layout")}) + "\n", "k, layout are missing"),
        (json.dumps({**GEMM, "m": 0}) + "\n", "m = 0 is not above 0"),
        (json.dumps({**GEMM, "rank": -1}) + "\n", "rank = -1"),
        (json.dumps({**GEMM, "reps": 1.5}) + "\n", "reps = 1.5"),
        (json.dumps({**GEMM, "p10_s": -1e-6}) + "\n", "p10_s"),
        (json.dumps({**GEMM, "mean_s": 0.0}) + "\n", "mean_s = 0.0 is not above 0"),
        (json.dumps({**GEMM, "extra": [1]}) + "\n", "extra is not a plain value"),
        ("[1, 2]\n", "is not an object"),
        ('{"m": 1}\n', "has no kind"),
        ("\x00\x01 rubbish\n", "not JSON"),
        ("[" * 100_000 + "\n", "nested too deeply"),
        ("x" * (MAX_LINE_BYTES + 10) + "\n", "is longer than"),
    ],
)
def test_a_bad_line_is_named_and_the_rest_is_kept(tmp_path: Path, bad: str, says: str) -> None:
    faults, count = faults_of(tmp_path, bad, GEMM)
    assert count == 2
    assert len(faults) == 1
    assert "line 3" in faults[0]
    assert says in faults[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in ("memory_bytes", "num_ranks") for value in (0, -1, 1.5, "x", [], {}, True, 10**30)]
    + [("settings", value) for value in (1, "x", [])] + [("nics", value) for value in (1, "x", {})],
)  # fmt: skip
def test_a_fact_of_a_machine_that_is_none_is_named_and_left_out(name: str, value: object, tmp_path: Path) -> None:
    found = read_samples([written(tmp_path, {**MACHINE, name: value}, GEMM)])
    (fault,) = found.faults
    assert f"line 1: machine: {name} = {value!r} is not a" in str(fault)
    assert name not in found.machine.facts
    assert len(found.samples) == 1


def test_a_last_line_that_was_being_written_is_called_cut_off(tmp_path: Path) -> None:
    faults, count = faults_of(tmp_path, json.dumps(GEMM)[:30])
    assert count == 1
    assert "line 3: is cut off" in faults[0]


def test_another_machines_samples_are_left_out_by_line(tmp_path: Path) -> None:
    faults, count = faults_of(tmp_path, GEMM, {**MACHINE, "device": "other"}, GEMM)
    assert count == 2
    assert "lines 5 to 5" in faults[0]
    assert "other" in faults[0]


def test_runs_of_one_machine_are_one_machine(tmp_path: Path) -> None:
    faults, count = faults_of(tmp_path, {**MACHINE, "date": "later", "command": "again"}, GEMM)
    assert (faults, count) == ([], 2)


def test_a_file_that_is_given_twice_counts_once(tmp_path: Path) -> None:
    path = written(tmp_path, MACHINE, GEMM)
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(path.read_bytes())
    found = read_samples([path, copy])
    assert len(found.samples) == 1
    assert ["is given twice" in str(fault) for fault in found.faults] == [True]


def test_failures_are_kept_apart(tmp_path: Path) -> None:
    found = read_samples([written(tmp_path, MACHINE, GEMM, {"kind": "gemm", "error": "no fp8 here"})])
    assert [f["error"] for f in found.failures] == ["no fp8 here"]
    assert not found.faults


def test_what_failed_and_was_measured_after_all_is_no_failure(tmp_path: Path) -> None:
    """A phase that was lost and begins again, one measurement that a later attempt has; a phase is lost once, whoever says so."""
    begins = {"kind": "section", "name": "gemm", "state": "begins", "seconds": 1}
    lost, product = (
        {"kind": "gemm", "error": "killed (rank 1)"},
        {"m": 8, "n": 8, "k": 8, "dtype": "fp32", "layout": "tn"},
    )
    failed = {"kind": "gemm", **product, "rank": 1, "error": "no memory"}
    again = {"kind": "gemm", **product, "rank": 1, "time_s": 1e-5, "reference_s": 1e-3}

    def failures(*lines: object) -> list[str]:
        return [one["error"] for one in read_samples([written(tmp_path, MACHINE, GEMM, *lines)]).failures]

    assert failures(begins, lost, failed) == ["no memory", "killed (rank 1)"]
    assert failures(begins, lost, failed, begins, again) == []
    assert failures(failed, {**again, "rank": 0}) == ["no memory"]
    other = tmp_path / "other.jsonl"
    other.write_bytes(written(tmp_path, MACHINE, {**GEMM, "rank": 1}, lost).read_bytes())
    assert len(read_samples([written(tmp_path, MACHINE, GEMM, lost), other]).failures) == 1


def test_a_file_without_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="no usable sample"):
        read_samples([written(tmp_path, MACHINE)])
    with pytest.raises(TableError, match="cannot be read"):
        read_samples([tmp_path / "missing.jsonl"])
    with pytest.raises(TableError, match="validate compare reads it") as caught:
        read_samples([written(tmp_path, {"kind": "run", "memory": {}, "time": {}})])
    assert len(caught.value.faults) == 2, "the record, and that there is no sample"


def test_a_cut_gzip_keeps_what_stands_before(tmp_path: Path) -> None:
    whole = gzip.compress("".join(json.dumps(x) + "\n" for x in [MACHINE, *[GEMM] * 2000]).encode())
    path = tmp_path / "samples.jsonl.gz"
    path.write_bytes(whole[: len(whole) - 10])
    found = read_samples([path])
    assert len(found.samples) > 0
    assert any("cannot be read to its end" in str(f) for f in found.faults)


def test_what_is_no_file_of_samples_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(f"{json.dumps(MACHINE)}\n{json.dumps(GEMM)}\n" + "x\n" * (MAX_WRONG + 5))
    found = read_samples([path])
    assert len(found.samples) == 1
    assert len(found.faults) == MAX_FAULTS + 1
    assert found.faults[-1].problem == "this line and those behind it were not read"
    assert found.faults[-1].place == f"samples.jsonl: line {MAX_WRONG + 3}"


def test_a_line_without_a_machine_is_a_fault(tmp_path: Path) -> None:
    found = read_samples([written(tmp_path, GEMM, MACHINE, GEMM)])
    assert len(found.samples) == 1
    assert "before any machine line" in str(found.faults[0])


def test_keys_ignore_what_was_measured_and_tell_apart_what_was_asked() -> None:
    shape = {"m": 1, "n": 2}
    assert sample_key("gemm", shape) == sample_key("gemm", {**shape, "flop": 4, "sustained": False})
    assert sample_key("gemm", shape) != sample_key("gemm", {**shape, "sustained": True})
    assert sample_key("gemm", shape) != sample_key("gemm", {**shape, "n": 3})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    line = sample_line("gemm", **{k: v for k, v in GEMM.items() if k != "kind"}, rank=1)
    found = read_samples([written(tmp_path, MACHINE, line)])
    (sample,) = found.samples
    assert (sample.rank, sample.time_s, sample["k"], sample.machine) == (1, 1e-5, 64, machine_id(MACHINE))
    with pytest.raises(ValueError, match="not JSON compliant"):
        sample_line("gemm", time_s=float("inf"))


def test_the_projects_own_samples_read_without_a_fault() -> None:
    path = Path(__file__).parents[2] / "experiments/measured/h200-2026-11-20/kernels.jsonl.gz"
    found = read_samples([path])
    assert not found.faults
    assert len(found.failures) == 9  # its README says so
    assert found.machine.facts["sms"] == 132
