"""Samples of machines that were made up, with noise: slow ranks are found, healthy machines are not accused."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from validate.check.components import Component
from validate.check.findings import Finding, check
from validate.check.judged import corrected, judge
from validate.check.report import links, matrix, text
from validate.samples import Machine, Sample, SampleFile

RANKS, SLOWER = 8, 1.10
GPU = Machine(
    id="m",
    line=1,
    facts={"device": "NVIDIA H100 80GB HBM3", "architecture": "hopper", "driver": "570", "hostname": "n"},
)
SHAPES: dict[str, list[dict[str, Any]]] = {
    "gemm": [{"m": 2**i, "n": 512, "k": 512, "layout": layout, "dtype": "bf16"} for i in range(4, 12) for layout in ("tn", "nn", "nt")],
    "stream": [{"op": op, "stream_op": op, "read_bytes": 2**i, "write_bytes": 2**i, "launches": 1} for i in range(12, 20) for op in "ab"],
    "attention_forward": [{"batch": 1, "seq_q": 2**i, "causal": causal} for i in range(7, 12) for causal in (True, False)],
    "collective": [{"op": "all_reduce", "size_bytes": 2**i, "num_ranks": 8, "num_nodes": 1} for i in range(12, 29)],
}  # fmt: skip


def machine(
    seed: int, *, slow: Mapping[str, float] = {}, whole: float = 1.0, links: float = 1.0, facts: Mapping[str, Any] = {}
) -> SampleFile:
    """A node's samples: 4 % of noise, one in ten disturbed by up to four times, cards that differ by 1 %, runs by 1 %.

    slow: of rank 3, by kind or "" for all; whole: of every rank; links: of collectives.
    """
    rng, samples = np.random.default_rng(seed), []
    run = 0.01 * rng.standard_normal()
    cards = np.random.default_rng(7).standard_normal(RANKS)  # a card differs from its peers on every day
    own = {rank: 0.01 * cards[rank] + 0.003 * rng.standard_normal() for rank in range(RANKS)}
    for kind, shapes in SHAPES.items():
        for index, shape in enumerate(shapes):
            for rank in range(RANKS):
                log = math.log(1e-4 * (1 + index)) + run + 0.04 * rng.standard_normal()
                if kind == "collective":
                    log += math.log(links)
                else:
                    log += (
                        own[rank]
                        + math.log(whole)
                        + (math.log(slow.get(kind, slow.get("", 1.0))) if rank == 3 else 0.0)
                    )
                log += math.log(rng.uniform(1.5, 4)) if rng.random() < 0.1 else 0.0
                samples.append(sample(kind, math.exp(log), rank, shape))
    found = Machine(id="m", line=1, facts={**GPU.facts, "date": f"2026-01-{seed % 28 + 1:02d}", **facts})
    return SampleFile(machine=found, samples=tuple(samples), failures=(), faults=(), sha256={"s": ""})


def sample(kind: str, time_s: float, rank: int, shape: Mapping[str, Any]) -> Sample:
    return Sample(
        kind=kind, time_s=time_s, p10_s=None, p90_s=None, reps=5, sustained=False, rank=rank, host="", machine="m",
        line=1, shape=shape,
    )  # fmt: skip


def bad(found: list[Finding]) -> set[tuple[str, str]]:
    return {(one.kind, one.component.who) for one in found if one.bad}


def test_a_rank_that_is_a_tenth_slower_is_found_in_95_of_100_and_no_other_is_accused() -> None:
    found = [bad(check(machine(seed, slow={"": SLOWER}), ())) for seed in range(100)]
    assert sum(("slow", "rank 3") in one for one in found) >= 95
    assert sum(bool(one - {("slow", "rank 3")}) for one in found) <= 2


def test_healthy_machines_are_not_accused_of_anything() -> None:
    accused = sum(bool(bad(check(machine(seed), [machine(1000 + seed)]))) for seed in range(50))
    assert accused <= 1  # two in a hundred


def test_what_became_slower_is_named_by_part_and_by_how_much() -> None:
    before = machine(1)
    found = check(machine(2, slow={"stream": 1.2}, links=1.3), [before])
    regressions = {str(one.component): one for one in found if one.kind == "regression"}
    assert set(regressions) == {"rank 3: memory", "8 ranks: all_reduce, small", "8 ranks: all_reduce, large"}
    memory = regressions["rank 3: memory"].judged
    assert memory is not None
    assert memory.low < 1.2 < memory.high
    assert all(one.confidence > 0.99 for one in regressions.values())
    faster = check(before, [machine(2, slow={"stream": 1.2}, links=1.3)])
    assert not any(one.bad for one in faster)
    assert {one.component.who for one in faster if one.kind == "improvement"} == {"rank 3", "8 ranks"}


def linked(seed: int, *, slow: tuple[int, int] | None = None, card: int | None = None) -> SampleFile:
    """Two nodes of two ranks, 3 % of noise: each pair of a node, as both see it, and each rank's card."""
    rng, samples, hosts = np.random.default_rng(seed), [], ("node0", "node0", "node1", "node1")
    for size in (2**p for p in range(22, 30)):
        for source, target in ((0, 1), (1, 0), (2, 3), (3, 2)):
            time_s = size / 3e11 * math.exp(0.03 * rng.standard_normal()) * (1.3 if (source, target) == slow else 1)
            shape = {"source": source, "target": target, "size_bytes": size, "num_nodes": 1}
            samples += [replace(sample("pair", time_s, rank, shape), host=hosts[rank]) for rank in (source, target)]
        for rank in range(4):
            time_s = size / 5e10 * math.exp(0.03 * rng.standard_normal()) * (1.3 if rank == card else 1)
            samples.append(
                replace(sample("rail", time_s, rank, {"size_bytes": size, "num_nodes": 2}), host=hosts[rank])
            )
    return SampleFile(machine=GPU, samples=tuple(samples), failures=(), faults=(), sha256={"s": ""})


def test_a_slow_link_and_a_slow_network_card_are_named() -> None:
    """A link is slower than it was; a card also than the others. On PCIe two healthy links may differ."""
    found = check(linked(1, slow=(3, 2), card=1), [linked(2)])
    assert {(one.kind, one.component.what, one.component.who) for one in found if one.bad} == {
        ("regression", "link", "rank 3 to 2 on node1"),
        ("regression", "network card", "rank 1 on node0"),
        ("slow", "network card", "rank 1 on node0"),
    }
    assert not bad(check(linked(3), [linked(4)]))


def test_the_matrix_of_links_is_of_the_largest_message() -> None:
    rows = links(linked(1, slow=(3, 2)))
    assert [(row["source"], row["target"]) for row in rows] == [
        (0, 1), (0, None), (1, 0), (1, None), (2, 3), (2, None), (3, 2), (3, None)
    ]  # fmt: skip
    assert {row["size_bytes"] for row in rows} == {2**29}
    assert [round(row["bytes_per_s"] / 1e11) for row in rows if row["target"] is not None] == [3, 3, 3, 2]
    head, *lines = [line.split("  ") for line in matrix(rows)]
    assert [cell.strip() for cell in head if cell] == ["GB/s from", "to 0", "to 1", "to 2", "to 3", "next node"]
    assert len(lines) == 4
    assert matrix([]) == []


def test_a_cpu_is_not_called_a_gpu() -> None:
    node = machine(1)
    found = check(replace(node, machine=replace(node.machine, facts={**node.machine.facts, "architecture": "cpu"})), ())
    assert {one.component.what for one in found} == {"cpu"}
    assert {one.component.what for one in check(node, ())} == {"gpu"}


def test_a_drift_over_runs_is_found() -> None:
    runs = [machine(seed, whole=1.03**seed) for seed in range(6)]
    found = check(runs[-1], runs[:-1])
    drifting = {one.component.category for one in found if one.kind == "drift"}
    assert drifting == {"products", "memory", "attention"}
    assert not [one for one in check(machine(5), [machine(seed) for seed in range(5)]) if one.bad]


def test_parts_that_are_gone_or_failed_or_throttled_are_named() -> None:
    whole = machine(1)
    rest = tuple(s for s in whole.samples if s.rank != 5)
    ends = {
        "kind": "section",
        "state": "ends",
        "name": "gemm",
        "rank": 2,
        "throttled_by": "power cap, hardware thermal",
        "temperature_c": 92,
    }
    broken = SampleFile(
        machine=GPU, samples=rest, failures=({"kind": "gemm", "error": "CUDA error", "rank": 1, "place": "x"},),
        faults=(), sha256={}, sections=(ends, {**ends, "rank": 4, "throttled_by": "power cap"}),
    )  # fmt: skip
    found = check(broken, [machine(3)])
    parts = {one.component for one in found if one.bad}
    assert f"{len(parts)} of " in text(found, ())
    assert f"{len(parts)} of " in text([*found, *found], ()), "a part is bad once"
    assert {(one.kind, one.component.who) for one in found if one.bad} == {
        ("missing", "rank 5"), ("failed", "rank 1"), ("throttled", "rank 2"),
    }  # fmt: skip


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    told = [judge(list(0.1 + 0.04 * rng.standard_normal(24))) for _ in range(300)]
    held = sum(one is not None and math.log(one.low) <= 0.1 <= math.log(one.high) for one in told)
    assert 0.92 * 300 <= held <= 0.99 * 300
    assert judge([0.1] * 5) is None


def test_holms_correction_by_hand() -> None:
    assert corrected({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})


# --- the commands


def written(path: Path, found: SampleFile) -> Path:
    rows = [{"kind": "machine", **found.machine.facts}]
    rows += [{"kind": s.kind, "time_s": s.time_s, "rank": s.rank, **_whole(s)} for s in found.samples]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _whole(s: Sample) -> dict[str, Any]:
    attention = {"seq_kv": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8, "dtype": "bf16"}
    return {**s.shape, **(attention if s.kind == "attention_forward" else {})}


def test_check_exits_with_1_and_writes_what_programs_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = written(tmp_path / "old.jsonl", machine(1))
    new = written(tmp_path / "new.jsonl", machine(2, slow={"": 1.15}, facts={"driver": "575"}))
    report, gauges, history = (tmp_path / name for name in ("check.xml", "check.prom", "history"))
    files = ["--junit", str(report), "--prometheus", str(gauges), "--history", str(history), "--keep"]
    assert main(["calibrate", "check", "--baseline", str(old), str(new), *files]) == 1
    told = capsys.readouterr().out
    assert "changed: driver: 570 -> 575" in told
    assert "slow: rank 3: products: 1.1" in told
    cases = list(ET.fromstring(report.read_text(encoding="utf-8")).iter("testcase"))  # noqa: S314  our own
    failures = [case for case in cases if case.find("failure") is not None]
    assert failures
    assert all("rank 3" in str(case.get("name")) for case in failures)
    assert (
        'shardwise_bad{machine="n",part="gpu",who="rank 3",category="products",found="regression,slow"} 1'
        in gauges.read_text()
    )
    assert main(["calibrate", "check", str(old), "--history", str(history)]) == ExitCode.OK  # faster is not worse
    assert "improvement" in capsys.readouterr().out


def test_a_run_that_nothing_can_be_compared_with_is_no_all_clear(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks have no peers, the first run of a history no past, and a run is no baseline of itself."""
    run = machine(1)
    two = SampleFile(
        machine=run.machine, samples=tuple(s for s in run.samples if s.rank < 2), failures=(), faults=(), sha256={}
    )
    file, history = str(written(tmp_path / "run.jsonl", two)), str(tmp_path / "history")
    for earlier in ([], ["--baseline", file]):
        assert main(["calibrate", "check", file, *earlier]) == ExitCode.BAD_INPUT
        assert "no earlier run (--baseline OLD" in capsys.readouterr().err
    for _ in range(2):
        assert main(["calibrate", "check", file, "--history", history, "--keep"]) == ExitCode.OK
        assert capsys.readouterr().out == "nothing to compare with yet\n"
    assert main(["calibrate", "check", file, "/dev/full", "--history", history, "--keep"]) == ExitCode.OK
    assert "/dev/full: cannot be read: is a pipe or a device" in capsys.readouterr().err
    assert len(list(Path(history).iterdir())) == 1  # what was left out is not kept, which would never end


def test_diff_says_what_changed_beyond_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = written(tmp_path / "old.jsonl", machine(1))
    new = written(tmp_path / "new.jsonl", machine(2, links=1.4, facts={"nccl": "2.27", "driver": "575"}))
    assert main(["calibrate", "diff", str(old), str(new), "--json"]) == ExitCode.OK
    told = json.loads(capsys.readouterr().out)
    assert told["changed"] == ["driver: 570 -> 575"]
    beyond = {(row["who"], row["category"]) for row in told["parts"] if row["beyond_noise"] and row["ratio"] > 1.1}
    assert beyond == {("8 ranks", "all_reduce, small"), ("8 ranks", "all_reduce, large")}
    other = written(tmp_path / "a100.jsonl", machine(3, facts={"device": "NVIDIA A100"}))
    assert main(["calibrate", "diff", str(other), str(new)]) == ExitCode.BAD_INPUT
    assert "baseline of the same machine" in capsys.readouterr().err
    gone = [str(tmp_path / f"gone.{name}") for name in ("jsonl", "calibration.json", "toml")]
    assert main(["calibrate", "diff", *gone[:2], "--study", gone[2], "--cluster", "nowhere"]) == ExitCode.BAD_INPUT
    told_of = capsys.readouterr().err
    assert all(one in told_of for one in (*gone, "nowhere")), "all at once"
    links = written(tmp_path / "links.jsonl", linked(1))
    assert main(["calibrate", "diff", str(old), str(links)]) == ExitCode.BAD_INPUT  # no all-clear
    assert "too few measurements of both" in capsys.readouterr().err


def test_diff_of_calibrations_predicts_a_study_with_either(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from simulator.spec.calibration import Calibration

    shipped = Calibration.load("h100-sxm")
    gemms = {dtype: curve.model_copy(update={"e_sust": 0.8 * curve.e_sust}) for dtype, curve in shipped.gemms.items()}
    slower = shipped.model_copy(update={"gemms": gemms})
    for name, one in (("old", shipped), ("new", slower)):
        one.save(tmp_path / f"{name}.calibration.json")
    study = tmp_path / "study.toml"
    study.write_text(
        'model = "llama3-8b"\ncluster = "hgx-h100-8"\n[plan]\ndp_shard = 8\nseq_len = 2048\n', encoding="utf-8"
    )
    files = [str(tmp_path / f"{name}.calibration.json") for name in ("old", "new")]
    assert main(["calibrate", "diff", *files, "--study", str(study), "--json"]) == ExitCode.OK
    (told,) = json.loads(capsys.readouterr().out)["studies"]
    assert 1.05 < told["ratio"] == pytest.approx(told["after_s"] / told["before_s"])
    assert told["ratio"] < 1 / 0.8  # products are a part of a step


def test_components_sort_and_read() -> None:
    assert str(Component("gpu", "rank 3 on node1", "products")) == "rank 3 on node1: products"


# --- fleets and histories


def write(run: SampleFile, path: Path, node: str, date: str, **section: Any) -> Path:
    """A made-up run as a file of `calibrate run` on a node of that name."""
    facts = {**run.machine.facts, "kind": "machine", "format_version": 1, "hostname": node, "date": date}
    rows = [facts, *([{"kind": "section", "state": "ends", **section}] if section else [])]
    rows += [
        {"kind": one.kind, "time_s": one.time_s, "reps": one.reps, "rank": one.rank, **one.shape} for one in run.samples
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_fleet_names_its_slow_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Six nodes, one of which is 15 % slower in everything since its newest run; a history is a folder."""
    files = [
        write(machine(i, whole=1.15 if i == 2 else 1.0), tmp_path / f"{i}.jsonl", f"n{i}", "2026-02-01")
        for i in range(5)
    ]
    folder = tmp_path / "history"
    folder.mkdir()
    for index in range(2):
        write(machine(10 + index), folder / f"{index}.jsonl", "n5", f"2026-01-0{index + 1}")
    picture = tmp_path / "fleet.svg"
    line = ["calibrate", "fleet", *map(str, files), str(folder)]
    assert main([*line, "--json", "--plot", str(picture)]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [node["node"] for node in told["nodes"] if node["worse"]] == ["n2"]
    assert {node["node"]: node["runs"] for node in told["nodes"]}["n5"] == 2
    assert "n2" in picture.read_text(encoding="utf-8")
    assert main(line) == 1
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == "1 of 6 nodes are worse"


def test_two_nodes_are_no_fleet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [write(machine(i, whole=1 + i), tmp_path / f"{i}.jsonl", f"n{i}", "2026-02-01") for i in range(2)]
    assert main(["calibrate", "fleet", *map(str, files)]) == ExitCode.BAD_INPUT  # no all-clear
    assert "fewer than 3 nodes" in capsys.readouterr().err
    files += [write(machine(i), tmp_path / f"{i}.jsonl", f"n{i}", "2026-02-01") for i in (2, 3)]
    other = write(machine(9, facts={"device": "A100"}), tmp_path / "other.jsonl", "other", "2026-02-01")
    line = ["calibrate", "fleet", *map(str, files[2:]), str(files[0]), str(other), str(files[0])]
    assert main([*line, "--json"]) == ExitCode.OK
    told = json.loads(capsys.readouterr().out)
    assert {n["node"]: (n["compared"], n["runs"]) for n in told["nodes"]} == {
        **dict.fromkeys(("n0", "n2", "n3"), (True, 1)),
        "other": (False, 1),
    }, "and a run that is given twice counts once"
    assert main(line) == ExitCode.OK
    out = capsys.readouterr().out
    assert "other  A100  1 run, newest 2026-02-01  not compared" in out
    assert out.endswith("ok: 3 nodes\n")
    (tmp_path / "empty").mkdir()
    assert main(["calibrate", "fleet", str(tmp_path / "empty")]) == 3


def test_a_history_is_drawn_over_time_and_clocks_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history, picture = tmp_path / "history", tmp_path / "history.svg"
    history.mkdir()
    for index in range(3):
        write(machine(20 + index), history / f"{index}.jsonl", "n", f"2026-01-0{index + 1}")
    held = {"name": "gemm", "rank": 0, "lowest_sm_clock_mhz": 1200.0, "temperature_c": 71.0}
    new = write(machine(30, whole=1.3), tmp_path / "new.jsonl", "n", "2026-01-09", **held)
    line = ["calibrate", "check", str(new), "--history", str(history)]
    page = tmp_path / "check.html"
    assert main([*line, "--json", "--plot", str(picture), "--html", str(page)]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["clocks"] == [{"phase": "gemm", "rank": 0, "lowest_sm_clock_mhz": 1200.0, "temperature_c": 71.0}]
    assert "lowest sm clock" in page.read_text(encoding="utf-8")
    drawing = picture.read_text(encoding="utf-8")
    assert all(date in drawing for date in ("2026-01-01", "2026-01-09"))
    assert main([*line, "--plot", str(tmp_path / "history.txt")]) == 3


def test_a_run_that_takes_longer_than_asked_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from validate import calibrate
    from validate.measure import MeasureOutcome

    asked = {"out": tmp_path / "x.jsonl", "device": "cpu", "ranks": 1, "threads": 1, "resume": False, "tiny": True}
    clock = iter((0.0, 12.0, 0.0, 12.0))
    monkeypatch.setattr(calibrate, "measure", lambda *_: MeasureOutcome())
    monkeypatch.setattr(calibrate.time, "monotonic", lambda: next(clock))
    assert calibrate.run(minutes=0.02, **asked) == 0
    assert "took 0.2 minutes, not 0.02: 85 items are measured whatever the time" in capsys.readouterr().err
    assert calibrate.run(minutes=0.2, **asked) == 0
    assert "took" not in capsys.readouterr().err
