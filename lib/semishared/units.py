# SPDX-License-Identifier: Apache-2.0
"""Sizes. OpenNebula speaks MiB at its border (and calls them MB); inside everything is bytes."""

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB
TiB = 1024 * GiB


def mib_ceil(size: int) -> int:
    """Return the MiB needed to hold `size` bytes, as OpenNebula counts image sizes."""
    return -(-size // MiB)


def human(size: int) -> str:
    """Return `size` bytes for a person to read: 1536 -> '1.5 KiB'."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def amount(text: str) -> int:
    """Return the bytes that `text` means: 100, 40M, 1.5G, 200GiB (powers of 1024); raise ValueError."""
    number = text.strip().upper()
    for suffix in ("IB", "B"):
        if number.endswith(suffix):
            number = number[: -len(suffix)]
            break
    scale = {"K": KiB, "M": MiB, "G": GiB, "T": TiB}.get(number[-1:], 0)
    value = float(number[:-1] if scale else number) * (scale or 1)
    if not 0 <= value < 1 << 62:
        raise ValueError(f"not an amount: {text!r}")
    return int(value)
