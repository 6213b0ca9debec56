# SPDX-License-Identifier: Apache-2.0
"""A process beside the host side during a freeze (guest/freeze.py): it wakes the guest when that cannot.

    guest/freeze_watch.py VMDIR DOMAIN TOKEN SECONDS      stdin ends with the host side

Waits for the end of its stdin, so many seconds at most; then the guest is woken from the rest TOKEN, if that
still is noted: again and again while its agent does not answer, for KEEP_S at most.
"""

from __future__ import annotations

import os
import select
import sys
import time

if __package__ in (None, ""):
    sys.path[0:0] = [os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))]

from semishared.errors import SemisharedError
from semishared.guest import freeze
from semishared.guest.virsh import site

KEEP_S = 900
PAUSE_S = 5
SETTLE_S = 0.3


def main(argv: list[str]) -> int:
    """Watch one rest."""
    directory, name, token, seconds = argv
    try:
        site()  # now, while nothing is in trouble: the same libvirt that the host side asks
    except (SemisharedError, OSError):
        pass
    if select.select([0], [], [], float(seconds))[0]:
        # What the host side has asked libvirt for last is being done, before it is undone.
        time.sleep(SETTLE_S)
    deadline = time.monotonic() + KEEP_S
    while time.monotonic() < deadline:
        try:
            if freeze.wake(directory, name, token):
                return 0
        except FileNotFoundError:
            return 0  # the VM is gone
        except (SemisharedError, OSError):
            pass
        time.sleep(PAUSE_S)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
