# SPDX-License-Identifier: Apache-2.0
"""What OpenNebula gives in base64: standard input of some actions, an argument of another."""

from __future__ import annotations

import base64
import binascii

from ..errors import BadArguments


def decode(data: bytes) -> bytes:
    """Return base64 `data` decoded; raise BadArguments."""
    try:
        return base64.b64decode(b"".join(data.split()), validate=True)
    except (binascii.Error, ValueError) as e:
        raise BadArguments(f"standard input is not base64: {e}") from None
