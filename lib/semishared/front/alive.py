# SPDX-License-Identifier: Apache-2.0
"""What says that a host is not off: oned's monitoring, and the host itself over ssh. Asked anew wherever its
being off counts.
"""

from __future__ import annotations

from ..errors import ToolFailed, ToolTimeout
from ..opennebula.xml import Host
from ..tools.run import run

MONITORED = (1, 2)
"""States of a host that OpenNebula sees (include/Host.h): MONITORING_MONITORED, MONITORED."""
TURNED_AWAY = ("Permission denied", "Host key verification failed")
"""Words of an ssh that was not let in: somebody is there."""


def why(host: Host, connect_s: int, as_monitored: bool = True) -> str:
    """Return what says that a host is not off, '' if nothing does.

    OpenNebula needs minutes to see that a host is gone: `as_monitored` says whether its word counts.
    """
    if as_monitored and host.number("STATE") in MONITORED:
        return "OpenNebula monitors it"
    return "it answers over ssh" if answers(host.name, connect_s) else ""


def answers(host: str, connect_s: int) -> bool:
    """Tell whether a host answers over ssh, also if it lets nobody in."""
    options = ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={connect_s}"]
    try:
        # Through a shared connection ssh itself has no limit; once more that time for the answer.
        run(["ssh", *options, "--", host, "true"], timeout_s=2 * connect_s, ok=tuple(range(255)))
    except ToolFailed as e:
        return any(words in e.detail for words in TURNED_AWAY)
    except ToolTimeout:
        return False
    return True
