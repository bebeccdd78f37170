"""Quantities and lists as text: ``1.2 GiB``, ``3.4 ms``, ``2 devices``, ``conv1, bn1, ...``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from placer.errors import InputError

Text = Callable[[float], str]
"""A function that formats a quantity with its unit."""

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_FACTORS = {unit.lower(): 1024**power for power, unit in enumerate(_BINARY)}
_FACTORS |= {unit: 1000**power for power, unit in enumerate(("", "kb", "mb", "gb", "tb", "pb"))}


def bytes_text(size_bytes: float) -> str:
    """Return a size with about three digits: ``512 B``, ``97.8 MiB``, ``1.2 GiB``."""
    power = 0
    # 1023.95 would be rounded to 1024.0, which is 1.0 of the next unit
    while abs(size_bytes) >= 1023.95 and power < len(_BINARY) - 1:
        size_bytes /= 1024
        power += 1
    return f"{size_bytes:.0f} B" if power == 0 else f"{size_bytes:.1f} {_BINARY[power]}"


def count_text(count: int, one: str, several: str = "") -> str:
    """Return a count with its noun: ``1 layer``, ``3 micro-batches``.

    Args:
        count: the number.
        one: the singular.
        several: the plural, unless it is ``one`` with an s.
    """
    return f"{count} {one}" if count == 1 else f"{count} {several or f'{one}s'}"


def number_text(count: int, one: str) -> str:
    """Return a count with its noun, small numbers as words: ``two devices``, ``12 devices``."""
    text = count_text(count, one)
    return f"{_NUMBERS[count]}{text[1:]}" if count < 10 else text


def listed(names: Sequence[str], most: int) -> str:
    """Return the first names, and whether there are more: ``conv1, bn1, ...``."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def size_text(size_bytes: int) -> str:
    """Return the size of a device as users write it: ``24 GiB``, ``1.5 GiB``, ``80 GB``."""
    for unit in ("TB", "GB", "MB"):
        factor = _FACTORS[unit.lower()]
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor} {unit}"
    return bytes_text(size_bytes).replace(".0 ", " ")


def needed_text(size_bytes: int) -> str:
    """Return a size rounded up, so that a device of this size is large enough: ``31.3 GiB``."""
    text = bytes_text(size_bytes)
    unit = text.split()[1]
    if unit == "B":
        return text
    factor = _FACTORS[unit.lower()]
    return f"{-(-size_bytes * 10 // factor) / 10:.1f} {unit}"


def devices_text(sizes_bytes: Iterable[int], noun: str = "device") -> str:
    """Return devices by their sizes: ``two 24 GiB devices``.

    Args:
        sizes_bytes: the memory of each device.
        noun: the singular of what they are called.
    """
    counts = Counter(map(size_text, sizes_bytes))
    *parts, last = (number_text(count, f"{text} {noun}") for text, count in counts.items())
    return f"{', '.join(parts)} and {last}" if parts else last


def ms_text(time_ms: float) -> str:
    """Return a time with at least three digits: ``0.0123 ms``, ``4.56 ms``, ``789 ms``."""
    if time_ms == 0:
        return "0 ms"
    if time_ms < 0.0001:
        return "<0.0001 ms"
    decimals = 4 if time_ms < 0.1 else 3 if time_ms < 1 else 2 if time_ms < 100 else 0
    return f"{time_ms:.{decimals}f} ms"


def parse_bytes(text: str) -> int:
    """Return the bytes of a size as users write it: ``8GiB``, ``1.5 GB``, ``4096``.

    Args:
        text: a number and a unit: B; KiB, MiB, GiB, TiB, PiB (1024); kB, MB, GB, TB, PB (1000).

    Raises:
        InputError: if it is not a size.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise InputError(
            f"{text!r} is not a size; write a number and a unit, as in 8GiB, 1.5GB or 4096: "
            "KiB to PiB are of 1024, kB to PB of 1000"
        )
    return int(float(match[1]) * factor)


def parse_bandwidth(text: str) -> float:
    """Return the bytes per second of a bandwidth as users write it: ``12GB/s``, ``100Gbit/s``.

    Args:
        text: a size as for ``parse_bytes``, or in kbit, Mbit, Gbit or Tbit (1000), per second.

    Raises:
        InputError: if it is not a positive bandwidth.
    """
    size = re.sub(r"\s*(/s|ps)\s*$", "", text.strip())
    bits = re.fullmatch(r"(.*[kKMGT])(?:bit|b)", size)
    try:
        value = parse_bytes(f"{bits[1]}B") / 8 if bits else float(parse_bytes(size))
    except InputError:
        value = 0.0
    if value <= 0:
        raise InputError(
            f"{text!r} is not a bandwidth; write what flows in a second, as in 12GB/s or 100Gbit/s"
        )
    return value


def parse_seconds(text: str) -> float:
    """Return the seconds of a time as users write it: ``20us``, ``1.5 ms``, ``2s``.

    Args:
        text: a number and a unit: ns, us (or µs), ms, s.

    Raises:
        InputError: if it is not a time.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ns|us|µs|ms|s)\s*", text)
    if match is None:
        raise InputError(
            f"{text!r} is not a time; write a number and a unit, as in 20us, 1.5ms or 2s"
        )
    return float(match[1]) * {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]


def bandwidth_text(bytes_per_s: float) -> str:
    """Return a bandwidth in billions of bytes per second: ``384.00 GB/s``."""
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def seconds_text(time_s: float) -> str:
    """Return a short time in microseconds: ``18.0 µs``."""
    return f"{time_s * 1e6:.1f} µs"
