"""Prices of captured operators beyond products of two matrices: what each computes and moves, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.base.kernels import Attention, Stated
from simulator.work.captured.kernels import priced
from simulator.work.captured.products import Priced
from simulator.work.captured.tensors import parsed


def tensor(*shape: int, dtype: str = "fp32") -> list[Any]:
    return ["T", dtype, list(shape), None]


def price(name: str, positional: list[Any], *results: list[Any]) -> Priced:
    return priced(f"aten.{name}", (parsed(positional), ()), parsed(list(results)))


def kernels(name: str, positional: list[Any], *results: list[Any]) -> tuple[Any, ...]:
    one = price(name, positional, *results)
    assert one.known
    return one.kernels


def test_a_transposed_convolution_multiplies_each_input_position_once() -> None:
    """64 channels to 32 through windows of 2 × 2, from 16 × 16 positions, as torch's own FLOP counter has it."""
    x, w, y = tensor(2, 64, 16, 16), tensor(64, 32, 2, 2), tensor(2, 32, 32, 32)
    how = [[2, 2], [0, 0], [1, 1], True, [0, 0], 1]
    (one,) = kernels("convolution.default", [x, w, None, *how], y)
    assert one.flop == 2 * (2 * 16 * 16) * 64 * (32 * 2 * 2)
    both = kernels("convolution_backward.default", [y, x, w, [32], *how, [True, True, False]], x, w)
    assert [each.flop for each in both] == [one.flop] * 2


def test_bags_read_the_rows_that_they_sum() -> None:
    """1,000 of a million rows of 64 in bags of 10, 4 bytes each; backward the table's gradient is zeroed."""
    table, picked, begins, sums = (
        tensor(10**6, 64),
        tensor(1000, dtype="int64"),
        tensor(100, dtype="int64"),
        tensor(100, 64),
    )
    (one,) = kernels("_embedding_bag.default", [table, picked, begins], sums, picked, begins, begins)
    assert (one.read_bytes, one.write_bytes) == (1000 * 64 * 4 + 8000, 100 * 64 * 4)
    zeros, added = kernels(
        "_embedding_bag_backward.default", [sums, picked, begins, picked, begins, begins, 10**6], table
    )
    assert zeros.write_bytes == 10**6 * 64 * 4
    assert added.num_bytes == 3 * 1000 * 64 * 4


def test_a_transform_passes_once_for_each_dim_that_a_block_holds() -> None:
    x, half = tensor(8, 1024), tensor(8, 513, dtype="complex64")
    (short,) = kernels("_fft_r2c.default", [x, [1], 0, True], half)
    assert (short.num_bytes, short.launches) == (8 * 1024 * 4 + 8 * 513 * 8, 1)
    wide = tensor(4, 65536, 512, dtype="complex64")
    (both,) = kernels("_fft_c2c.default", [wide, [1, 2], 0, True], wide)
    assert (both.num_bytes, both.launches) == (3 * 2 * 4 * 65536 * 512 * 8, 3)


@pytest.mark.parametrize(
    ("name", "given", "flop", "steps"),
    [
        ("linalg_cholesky_ex", [tensor(96, 96)], 96**3 // 3, 96),
        ("linalg_lu_factor_ex", [tensor(96, 96)], 2 * 96**3 // 3, 96),
        ("linalg_qr", [tensor(192, 96), "reduced"], 2 * (2 * 192 * 96**2 - 2 * 96**3 // 3), 96),
        ("linalg_solve_triangular", [tensor(96, 96), tensor(96, 8)], 96**2 * 8, 3),
        ("_cholesky_solve_helper", [tensor(96, 8), tensor(96, 96), False], 2 * 96**2 * 8, 6),
        ("_linalg_eigh", [tensor(96, 96), "L", False], 4 * 96**3 // 3, 12 * 96),
        ("_linalg_svd", [tensor(3, 96, 96), False, True, None], 3 * 26 * 96**3, 3 * 20 * 96),
        ("linalg_inv_ex", [tensor(16, 96, 96)], 16 * 2 * 96**3, 96),  # so many small ones at a time
    ],
)
def test_solvers_compute_what_lapack_counts_a_column_after_another(
    name: str, given: list[Any], flop: int, steps: int
) -> None:
    one = price(f"{name}.default", given, tensor(96, 96))
    (kernel,) = one.kernels
    assert isinstance(kernel, Stated)
    assert kernel.flop == pytest.approx(flop, abs=1)
    assert (kernel.launches, kernel.together) == (steps, True)
    assert not one.known  # how they overlap nobody says: the interval is wide


def test_the_host_waits_where_a_solver_s_success_is_checked() -> None:
    assert price("_linalg_check_errors.default", [tensor(4, dtype="int32"), "linalg.inv", False]).waits


def test_attention_of_sequences_end_to_end_is_of_their_mean_length() -> None:
    """Four sequences in 1,024 rows of 8 heads."""
    rows, begins = tensor(1024, 8, 64, dtype="bf16"), tensor(5, dtype="int32")
    (one,) = kernels(
        "_flash_attention_forward.default", [rows, rows, rows, begins, begins, 512, 512, 0.0, True, False], rows
    )
    assert isinstance(one, Attention)
    assert (one.batch, one.num_heads, one.seq_q, one.head_dim, one.causal) == (4, 8, 256, 64, True)
    whole = tensor(2, 512, 8, 64, dtype="bf16")
    given = [
        whole,
        whole,
        whole,
        whole,
        None,
        whole,
        None,
        None,
        512,
        512,
        tensor(2, 8, 512),
        0.0,
        None,
        None,
        0,
        False,
    ]
    (back,) = kernels("_efficient_attention_backward.default", given, whole)
    assert (back.batch, back.seq_q, back.causal, back.direction) == (2, 512, False, "backward")


def test_a_product_is_one_in_place_or_not() -> None:
    given = [tensor(64, 16), tensor(64, 32), tensor(32, 16)]
    assert kernels("addmm_.default", given, given[0]) == kernels("addmm.default", given, given[0])


def test_weights_of_whole_numbers_are_read_as_they_lie() -> None:
    x, packed, scales, y = (
        tensor(16, 4096, dtype="bf16"),
        tensor(512, 32, 32, 4, dtype="int32"),
        tensor(32, 4096, 2, dtype="bf16"),
        tensor(16, 4096, dtype="bf16"),
    )
    (one,) = kernels("_weight_int4pack_mm.default", [x, packed, 128, scales], y)
    assert one.flop == 2 * 16 * 4096 * 4096
    assert one.num_bytes == 2 * 16 * 4096 * 2 + 4096 * 4096 // 2 + 32 * 4096 * 2 * 2


def test_gradients_of_distances_write_a_share_of_each_pair_and_add_the_shares_up() -> None:
    """300 × 200 points of 64, and 300 among themselves, where each point of a pair has a share (ATen, DistanceKernel.cu)."""
    grad, a, b = tensor(300, 200), tensor(300, 64), tensor(200, 64)
    shares = 300 * 200 * 64 * 4
    written, summed = kernels("_cdist_backward.default", [grad, a, b, 1.0, grad], a)
    assert written.num_bytes == (2 * 300 * 200 + (300 + 200) * 64) * 4 + shares
    assert summed.num_bytes == shares + 300 * 64 * 4
    pairs = tensor(300 * 299 // 2)
    written, _ = kernels("_pdist_backward.default", [pairs, a, 2.0, pairs], a)
    assert written.write_bytes == 300 * 299 * 64 * 4
    (forward,) = kernels("_pdist_forward.default", [a, 2.0], pairs)
    assert forward.flop == 3 * 64 * 300 * 299 // 2


def test_half_sparse_products_are_half_as_deep() -> None:
    """4,096 × 4,096 with two of four numbers: the metadata takes an eighth of what is left."""
    x, y = tensor(4096, 512, dtype="fp16"), tensor(4096, 512, dtype="fp16")
    packed = tensor(4096 * 4096 * 9 // 16, dtype="fp16")
    (one,) = kernels("_cslt_sparse_mm.default", [packed, x], y)
    assert one.flop == 2 * 4096 * 512 * 4096 // 2
    halves, meta = tensor(4096, 2048, dtype="fp16"), tensor(4096, 256, dtype="int16")
    assert kernels("_sparse_semi_structured_mm.default", [halves, meta, x], y) == (one,)
    assert kernels("_sparse_semi_structured_addmm.default", [tensor(4096), halves, meta, x], y) == (one,)
    rows = tensor(8, 64, 4096, dtype="fp16")
    (linear,) = kernels(
        "_sparse_semi_structured_linear.default", [rows, halves, meta], tensor(8, 64, 4096, dtype="fp16")
    )
    assert linear.flop == one.flop


def test_ctc_takes_a_step_after_another_each_way() -> None:
    """500 steps of 16 sequences; backward once more, and a pass over what both ways have found."""
    scores, found, lost = tensor(500, 16, 32), tensor(16, 500, 101), tensor(16)
    forward = price("_ctc_loss.default", [scores, tensor(16, 50, dtype="int64"), [500] * 16, [50] * 16], lost, found)
    (steps,) = forward.kernels
    assert isinstance(steps, Stated)
    twice = price("_ctc_loss.default", [tensor(1000, 16, 32), lost, [], []], lost, found).kernels[0]
    assert twice.seconds == 2 * steps.seconds > 0  # type: ignore[union-attr]
    given = [lost, scores, tensor(16, 50, dtype="int64"), [500] * 16, [50] * 16, lost, found, 0]
    cleared, again, passed = price("_ctc_loss_backward.default", given, scores).kernels
    assert again == steps
    assert cleared.num_bytes == 500 * 16 * 32 * 4
    assert passed.num_bytes == (2 * 16 * 500 * 101 + 3 * 500 * 16 * 32) * 4
    assert not forward.known  # the latency of a step is from microbenchmarks of other programs: the interval is wide
