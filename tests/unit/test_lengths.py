"""Data whose sequences differ in length: the arithmetic of the longest of a batch, and what packing brings."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from simulator import Cluster, Model, Plan, predict
from simulator.base.errors import InputError
from simulator.cli import main
from simulator.predict.lengths import Padding, padding_of, read_lengths

GPT2, ONE, EIGHT = Model.load("gpt2"), Cluster.synthesise("a100-80gb", 1), Cluster.synthesise("a100-80gb", 8)


def padded(lengths: tuple[int, ...], cluster: Cluster = ONE, **fields: object) -> Padding:
    plan = Plan.model_validate({"zero": 0, "data_parallel": "ddp", "seq_len": 512, **fields})
    return padding_of(sorted(lengths), GPT2, plan, cluster)


def test_equal_lengths_are_the_plain_step() -> None:
    found = padded((512,) * 7, micro_batch_size=4, num_micro_batches=2)
    plain = predict(GPT2, Plan(zero=0, seq_len=512, micro_batch_size=4, num_micro_batches=2), ONE)
    assert (found.padding, found.padded_len, found.document_len) == (0, 512, 512)
    assert found.step_s == pytest.approx(plain.step_s)
    assert found.packed_step_s == pytest.approx(plain.step_s)
    assert found.tokens_per_step == found.packed_tokens_per_step == 8 * 512


def test_a_batch_is_as_long_as_its_longest() -> None:
    lengths, batch = (64, 128, 256, 300, 512), 3
    every = [max(drawn) for drawn in product(lengths, repeat=batch)]
    found = padded(lengths, micro_batch_size=batch)
    assert found.padded_len == pytest.approx(sum(every) / len(every))
    assert found.mean_len == sum(lengths) / 5
    assert found.document_len == -(-sum(length**2 for length in lengths) // sum(lengths))


def test_lengths_are_cut_at_the_plan_s() -> None:
    found = padded((100, 5000))
    assert (found.longest, found.mean_len) == (512, 306)


def test_ranks_that_meet_in_every_micro_batch_wait_for_the_longest_of_all() -> None:
    lengths = tuple(range(32, 513, 32))
    alone, together = (
        padded(lengths, EIGHT, zero=zero, data_parallel=kind, num_micro_batches=16, **{axis: 8})
        for zero, kind, axis in ((0, "ddp", "dp_replicate"), (3, "fsdp2", "dp_shard"))
    )
    full = [
        predict(
            GPT2, Plan.model_validate({"zero": zero, axis: 8, "seq_len": 512, "num_micro_batches": 16}), EIGHT
        ).step_s
        for zero, axis in ((0, "dp_replicate"), (3, "dp_shard"))
    ]
    assert alone.step_s / full[0] < together.step_s / full[1] <= 1 + 1e-9


def test_packing_brings_what_padding_takes() -> None:
    found = padded(read_lengths("lognormal:100,0.8"), micro_batch_size=8)
    assert 0.5 < found.padding < 0.8
    assert found.packed_tokens_per_s > found.tokens_per_s
    spread = [padded(read_lengths(f"lognormal:100,{sigma}"), micro_batch_size=8).padding for sigma in (0, 0.3, 0.6)]
    assert spread == sorted(spread)
    assert spread[0] == 0


@pytest.mark.parametrize(
    "text", ["lognormal:", "lognormal:100", "lognormal:0,1", "lognormal:100,-1", "lognormal:1e99,1", "nothing.txt"]
)
def test_what_is_no_distribution_is_told(text: str) -> None:
    with pytest.raises(InputError, match="--lengths"):
        read_lengths(text)


def test_a_file_has_a_length_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("300\n100\n")
    assert read_lengths(str(file)) == (100, 300)
    command = [
        "predict",
        "--model",
        "gpt2",
        "--gpus",
        "1xa100",
        "--zero",
        "0",
        "--seq-len",
        "256",
        "--json",
        "--lengths",
        str(file),
    ]
    assert main(command) == 0
    told = json.loads(capsys.readouterr().out)["lengths"]
    assert (told["count"], told["longest"]) == (2, 256)
    for wrong in ("", "12\nx\n", "-3", "0", "1.5"):
        file.write_text(wrong)
        with pytest.raises(InputError, match="a whole number of tokens a line"):
            read_lengths(str(file))


def test_every_entry_that_is_no_length_is_told(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("12\nx\n-3\n")
    with pytest.raises(InputError) as told:
        read_lengths(str(file))
    assert [fault.problem for fault in told.value.faults] == [
        "entry 2, 'x', is no length",
        "entry 3, '-3', is no length",
    ]
    with pytest.raises(InputError, match="pipe or a device"):
        read_lengths("/dev/zero")
