# SPDX-License-Identifier: Apache-2.0
"""Read an attribute's text as oned reads it: a tenant may have written what oned takes for no number.

oned (src/common/Attribute.cc, include/Attribute.h: vector_value; src/template/Template.cc: get) reads a
number by istringstream >> to the end of the text, in the C locale, and YES whatever its case.
tests/unit/oned_values.cc does the same; the unit tests compare. Also base64, in which OpenNebula gives
standard input of some actions, and an argument of another.
"""

from __future__ import annotations

from typing import Optional

from ..errors import BadArguments

_SPACES = " \t\n\v\f\r"
_DIGITS = 20
"""More than 64 bits have, except for leading zeros."""
ID_BITS = 32
"""Bits of a C++ int, in which oned keeps ids of objects, disks and snapshots."""


def integer(text: str, bits: int = 64) -> Optional[int]:
    """Return what oned reads into a signed integer of so many bits; None if oned reads no number."""
    signed = text.lstrip(_SPACES)
    digits = signed[1:] if signed[:1] in ("+", "-") else signed
    if not (digits.isascii() and digits.isdigit()) or len(digits.lstrip("0")) > _DIGITS:
        return None
    number = int(signed)
    return number if -(1 << bits - 1) <= number < 1 << bits - 1 else None


def is_yes(text: str) -> bool:
    """Tell whether oned takes a text for YES."""
    return text.isascii() and text.upper() == "YES"


def upper(text: str) -> str:
    """Return a word as oned compares it: it changes the case of ASCII letters alone."""
    return text.upper() if text.isascii() else text


def decode(data: bytes) -> bytes:
    """Return base64 `data` decoded; raise BadArguments."""
    import base64
    import binascii

    try:
        return base64.b64decode(b"".join(data.split()), validate=True)
    except (binascii.Error, ValueError) as e:
        raise BadArguments(f"standard input is not base64: {e}") from None
