"""Byte counts as people write and read them."""

import re

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")

_FACTORS = {unit.lower(): 1024**i for i, unit in enumerate(_BINARY)}
_FACTORS |= {unit: 1000**i for i, unit in enumerate(("kb", "mb", "gb", "tb"), 1)}


def human_bytes(count: float) -> str:
    """Return a byte count in the largest binary unit that keeps it above 1.

    Example:
      >>> human_bytes(640), human_bytes(3 * 2**29), human_bytes(2**52)
      ('640 B', '1.5 GiB', '4096.0 TiB')
    """
    for unit in _BINARY:
        if count < 1024 or unit == _BINARY[-1]:
            break
        count /= 1024
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"


def parse_bytes(
    # such as `"192GiB"`, `"1.5 TB"` or a plain count; GB are 10**9 bytes, GiB are 2**30
    text: str | int,
) -> int:
    """Return the bytes that an int, or a number with a unit, stands for.

    Raises:
      ValueError: for anything else, and for less than one byte.

    Example:
      >>> parse_bytes("192GiB"), parse_bytes("40 GB"), parse_bytes(4096)
      (206158430208, 40000000000, 4096)
    """
    match = re.fullmatch(r"\s*([\d_]*\.?\d+)\s*([a-z]*)\s*", str(text).lower())
    unit = (match[2] or "b") if match else ""
    if match is None or unit not in _FACTORS:
        raise ValueError(
            f"{text!r} is no number of bytes; write a count, or a number with a unit: "
            f"B, kB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (of 1024)"
        )
    # Whole numbers stay exact at any size.
    number = match[1].replace("_", "")
    exact = int(number) if number.isdigit() else float(number)
    count = int(exact * _FACTORS[unit])
    if count < 1:
        raise ValueError(f"{text!r} is less than one byte; give more")
    return count
