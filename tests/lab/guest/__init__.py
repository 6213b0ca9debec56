# SPDX-License-Identifier: Apache-2.0
"""Real guests: a bootable image with a verifier inside, and the client that talks to it over the serial console."""

from __future__ import annotations

from lab.guest.client import Guest, GuestError, content, serial_path, serial_xml
from lab.guest.image import COMMAND_LINE, build_guest_image, lay_out_boot

__all__ = [
    "COMMAND_LINE", "Guest", "GuestError", "build_guest_image", "content", "lay_out_boot", "serial_path", "serial_xml",
]  # fmt: skip
