from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placer.errors import InputError
from placer.utils.units import (
    bytes_text,
    count_text,
    listed,
    ms_text,
    parse_bandwidth,
    parse_bytes,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (int(1.2 * 1024**3), "1.2 GiB"),
        (5 * 1024**6, "5120.0 PiB"),
    ],
)
def test_sizes_are_written_in_the_largest_unit_they_fill(size_bytes: int, text: str) -> None:
    assert bytes_text(size_bytes) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 devices, 0 entries"), (1, "1 device, 1 entry"), (2, "2 devices, 2 entries")],
)
def test_one_thing_is_called_otherwise_than_several(count: int, text: str) -> None:
    assert f"{count_text(count, 'device')}, {count_text(count, 'entry', 'entries')}" == text


@pytest.mark.parametrize(
    ("time_ms", "text"),
    [
        (0, "0 ms"),
        (1e-6, "<0.0001 ms"),
        (0.0123, "0.0123 ms"),
        (0.5, "0.500 ms"),
        (4.567, "4.57 ms"),
        (789.2, "789 ms"),
    ],
)
def test_times_keep_three_digits(time_ms: float, text: str) -> None:
    assert ms_text(time_ms) == text


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8GiB", 8 * 1024**3),
        ("1.5 GB", 1_500_000_000),
        ("4096", 4096),
        ("2kib", 2048),
        (" 3 B ", 3),
        ("7kB", 7000),
    ],
)
def test_a_size_is_read_as_a_person_means_it(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "8 gigs", "1e9", "nan", "8GiB 2"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(
        InputError,
        match=r"is not a size; write a number and a unit, as in 8GiB, 1\.5GB or 4096: KiB",
    ):
        parse_bytes(text)


@given(st.integers(min_value=0, max_value=2**60))
def test_a_written_size_is_read_back_within_its_last_digit(size_bytes: int) -> None:
    # One decimal of a number of at least 1 in its unit: off by at most 0.05 of that unit.
    assert abs(parse_bytes(bytes_text(size_bytes)) - size_bytes) <= 0.051 * max(size_bytes, 1)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("12GB/s", 12e9),
        ("100Gbit/s", 12.5e9),
        ("25 Gb/s", 3.125e9),
        ("10Gbps", 1.25e9),
        ("1GiB/s", 2**30),
    ],
)
def test_bandwidths_are_read_in_bytes_and_in_bits(text: str, bytes_per_s: float) -> None:
    assert parse_bandwidth(text) == bytes_per_s


@pytest.mark.parametrize("text", ["", "fast", "0GB/s", "12m"])
def test_what_is_no_bandwidth_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is not a bandwidth"):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("20us", 2e-5), ("1.5 ms", 1.5e-3), ("2s", 2.0), ("7 µs", 7e-6)]
)
def test_times_are_read_with_their_unit(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


def test_a_time_without_a_unit_is_refused() -> None:
    with pytest.raises(InputError, match="'20' is not a time"):
        parse_seconds("20")


@pytest.mark.parametrize(
    ("names", "text"), [([], ""), (["a", "b"], "a, b"), (["a", "b", "c"], "a, b, ...")]
)
def test_a_list_ends_with_dots_if_names_are_left_out(names: list[str], text: str) -> None:
    assert listed(names, 2) == text
