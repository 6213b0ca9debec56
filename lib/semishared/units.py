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
