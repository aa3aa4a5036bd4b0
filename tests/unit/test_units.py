"""Quantities: what each spelling means, what is refused and how the reader is helped, and how numbers are printed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from simulator.base.errors import InputError
from simulator.base.schema import Strict
from simulator.base.units import (
    Bytes,
    BytesPerS,
    FlopPerS,
    Seconds,
    UnitError,
    counted,
    format_bytes,
    format_flop_per_s,
    format_number,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_bytes_per_s,
    parse_count,
    parse_flop_per_s,
    parse_seconds,
)


class Part(Strict):
    size: Bytes = 0
    rate_bytes_per_s: BytesPerS = 0.0
    latency_s: Seconds = 0.0
    peak_flop_per_s: FlopPerS = 0.0


class Whole(Strict):
    parts: list[Part] = []


@pytest.mark.parametrize(
    ("text", "expected"),
    [("80GiB", 80 * 2**30), ("25MB", 25 * 10**6), ("1.5KiB", 1536), ("7 B", 7), ("2e3kB", 2_000_000), ("1TiB", 2**40)],
)
def test_sizes_are_exact_integers(text: str, expected: int) -> None:
    size = parse_bytes(text)
    assert size == expected
    assert isinstance(size, int)


def test_a_byte_is_eight_bits() -> None:
    assert parse_bytes_per_s("400Gb/s") == parse_bytes_per_s("400Gbit/s") == 400e9 / 8
    assert parse_bytes_per_s("900GB/s") == 900e9


def test_times_and_speeds() -> None:
    assert parse_seconds("5us") == parse_seconds("5µs") == 5e-6
    assert parse_seconds("1.2ms") == 1.2e-3
    assert parse_flop_per_s("1.5TFLOP/s") == 1.5e12


@pytest.mark.parametrize(
    ("parse", "text", "remedy"),
    [
        (parse_bytes_per_s, "400GB", "'400GB/s'"),
        (parse_bytes_per_s, "400Gbps", "'400Gb/s'"),
        (parse_bytes_per_s, "400gb/s", "'400GB/s' or '400Gb/s'"),
        (parse_bytes, "80GB/s", "'80GB'"),
        (parse_bytes, "80Gb", "'80GB'"),
        (parse_bytes, "0.3B", "1B"),
        (parse_flop_per_s, "989TFLOPS", "'989TFLOP/s'"),
        (parse_seconds, "5", "5us"),
        (parse_seconds, "5GB", "5us"),
    ],
)
def test_a_wrong_unit_is_answered_with_the_right_one(parse: object, text: str, remedy: str) -> None:
    assert callable(parse)
    with pytest.raises(UnitError) as caught:
        parse(text)
    assert remedy in caught.value.remedy
    assert text in caught.value.problem


@pytest.mark.parametrize(
    "text", ["", "GB", "-5GB", "nanGB", "infGB", "1e999GB", "0x10GB", "1_0GB", "٣GB", "9" * 9999 + "GB", "5GB\n5"]
)
def test_hostile_text_is_refused(text: str) -> None:
    with pytest.raises(UnitError):
        parse_bytes(text)


def test_a_number_that_is_too_large_is_not_called_an_unknown_unit() -> None:
    with pytest.raises(UnitError, match=r"'1e300s' is not a time: write a number and a unit"):
        parse_seconds("1e300s")


@given(st.text(max_size=60))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    for parse in (parse_bytes, parse_bytes_per_s, parse_seconds, parse_flop_per_s):
        try:
            assert math.isfinite(parse(text))
        except UnitError as exc:
            assert exc.remedy  # noqa: PT017  both outcomes are legal; a refusal must help


def test_numbers_are_bytes_in_code_but_not_in_files() -> None:
    assert Part(size=5, latency_s=5e-6).size == 5
    with pytest.raises(InputError) as caught:
        Part.parse({"size": 5, "latency_s": 1.0, "rate_bytes_per_s": "1GB/s"}, "a.toml", InputError, from_file=True)
    assert [fault.place for fault in caught.value.faults] == ["a.toml: size", "a.toml: latency_s"]
    assert "'5B'" in caught.value.faults[0].remedy
    assert "'1.0s'" in caught.value.faults[1].remedy


def test_units_hold_in_nested_tables_and_faults_come_together() -> None:
    data = {"parts": [{"size": "1GiB"}, {"size": True, "sise": "1GiB", "latency_s": "5GB"}]}
    with pytest.raises(InputError) as caught:
        Whole.parse(data, "a.toml", InputError, from_file=True)
    assert {fault.place for fault in caught.value.faults} == {
        "a.toml: parts[1].size",
        "a.toml: parts[1].sise",
        "a.toml: parts[1].latency_s",
    }
    (unknown,) = (fault for fault in caught.value.faults if fault.place.endswith("sise"))
    assert unknown.remedy == "did you mean size?"


def test_any_pydantic_model_may_use_the_types() -> None:
    class Foreign(BaseModel):
        rate: BytesPerS

    assert Foreign.model_validate({"rate": "8Gb/s"}).rate == 1e9
    with pytest.raises(ValidationError):
        Foreign.model_validate({"rate": "8Gb"})


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (format_bytes(80 * 2**30), "80.0 GiB"),
        (format_bytes(1536), "1.50 KiB"),
        (format_bytes(0), "0 B"),
        (format_seconds(1.2345), "1.23 s"),
        (format_seconds(0.0123), "12.3 ms"),
        (format_seconds(0.99996), "1.00 s"),
        (format_bytes(1023.99 * 2**20), "1.00 GiB"),
        (format_seconds(1234.5), "1,234 s"),
        (format_seconds(0), "0 s"),
        (format_seconds(5e-6), "5.00 us"),
        (format_seconds(-0.5), "-500 ms"),
        (format_rate(50e9), "50.0 GB/s"),
        (format_flop_per_s(989.4e12), "989 TFLOP/s"),
    ],
)
def test_printing_keeps_three_digits(printed: str, expected: str) -> None:
    assert printed == expected


@given(st.floats(min_value=1e-9, max_value=999.0))
def test_what_is_printed_can_be_read_back(seconds: float) -> None:
    assert parse_seconds(format_seconds(seconds)) == pytest.approx(seconds, rel=5.1e-3)


FORMATS = {  # name -> (how it is printed, one of its smallest unit)
    "seconds": (format_seconds, 1e-9),
    "bytes": (format_bytes, 1.0),
    "rate": (format_rate, 1.0),
    "flop": (format_flop_per_s, 1.0),
}


@pytest.mark.parametrize("name", FORMATS)
@given(power=st.floats(-30, 15), sign=st.sampled_from([-1, 1]))
def test_nothing_is_printed_with_more_digits_than_it_has(name: str, power: float, sign: int) -> None:
    """Three digits: at most three decimals, in a unit near the value; less than the smallest unit can show is zero."""
    show, smallest = FORMATS[name]
    value = sign * 10**power * smallest
    number, unit = show(value).split(" ")
    assert len(number.partition(".")[2]) <= 3
    assert (float(number.replace(",", "")) == 0) == (unit in ("s", "B", "B/s", "FLOP/s") and number == "0")
    if abs(value) >= smallest:
        assert number != "0"
    if abs(value) < 4e-4 * smallest:
        assert number == "0"


@pytest.mark.parametrize(
    ("text", "number"),
    [("15T", 15 * 10**12), ("1.5 B", 1_500_000_000), ("15e12", 15 * 10**12), ("7", 7), ("1t", 10**12)],
)
def test_counts(text: str, number: int) -> None:
    assert parse_count(text) == number


@pytest.mark.parametrize("text", ["", "T", "-1", "1Q", "1e-3", "1" * 99])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(UnitError, match="not a count"):
        parse_count(text)


def test_numbers_for_people_have_no_exponent_above_one() -> None:
    assert [format_number(value) for value in (0.0, 0.03456, 3.567, 99.96, 1190.4, 1_234_567.0)] == [
        "0",
        "0.0346",
        "3.57",
        "100",
        "1,190",
        "1,234,567",
    ]


@pytest.mark.parametrize(("count", "text"), [(0, "0 tokens"), (1, "1 token"), (65536, "65,536 tokens")])
def test_one_is_no_plural(count: int, text: str) -> None:
    assert counted(count, "token") == text
