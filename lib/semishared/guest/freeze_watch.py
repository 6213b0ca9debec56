# SPDX-License-Identifier: Apache-2.0
"""A process beside the host side during a rest (guest/freeze.py): it wakes the guest if the host side cannot.

    guest/freeze_watch.py VMDIR DOMAIN TOKEN SECONDS      stdin ends with the host side

It waits for the end of its stdin, at most SECONDS. Then it wakes the guest from the rest TOKEN, if that is
still noted; while the agent does not answer it repeats that for KEEP_S seconds.
"""

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
        site()  # read kvmrc now, before anything fails: the same libvirt as the host side's
    except (SemisharedError, OSError):
        pass
    if select.select([0], [], [], float(seconds))[0]:
        # libvirt may still be at the host side's last call, which is then undone.
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
