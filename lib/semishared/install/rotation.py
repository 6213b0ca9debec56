# SPDX-License-Identifier: Apache-2.0
"""The rotation of the log of the trail (front/trail.py): a file for logrotate, where the machine has that.

OpenNebula's own file, /etc/logrotate.d/opennebula, names its logs one by one, and ours is none of them (7.4.0
and 6.10.0: share/pkgs/logrotate/opennebula). Each line of ours opens the log anew, so a rename is enough:
copytruncate would lose lines.
"""

from __future__ import annotations

import grp
import os

from .. import NAME
from .front_end import FrontEnd
from .next_steps import administrator
from .timer import PLAIN, Timer

DIRECTORY = "/etc/logrotate.d"
PATH = f"{DIRECTORY}/{NAME}"
LOG = f"/var/log/one/{NAME}.log"


def text(log: str, user: str, group: str) -> str:
    """Return the file: a year of weeks, and sooner a new log where one has grown large.

    logrotate refuses to work as root in a directory that others may write to, so it works as the log's user.
    """
    return f"""{log} {{
    su {user} {group}
    create 0640 {user} {group}
    weekly
    maxsize 64M
    rotate 52
    missingok
    notifempty
    compress
    delaycompress
    dateext
    dateformat -%Y%m%d-%s
}}
"""


def look(place: FrontEnd, root: str, uninstall: bool) -> Timer:
    """Return the wanted changes: none without logrotate, or for a user without the right to write its files.

    A file that is there stays as it is, in an upgrade too: sites keep logs for as long as they want. A
    self-contained OpenNebula has its logs in a directory of its own, and rotates none.
    """
    root = os.path.abspath(root) if root else ""
    is_packaged = place.remotes == f"{root}/var/lib/one/remotes"
    is_there, directory = os.path.lexists(f"{root}{PATH}"), f"{root}{DIRECTORY}"
    if not is_packaged or is_there != uninstall or not os.access(directory, os.W_OK | os.X_OK):
        return Timer(root, {}, ())
    if uninstall:
        return Timer(root, {}, (PATH,))
    user, group = administrator(place), _group(place)
    can = PLAIN.match(user) and PLAIN.match(group)
    return Timer(root, {PATH: text(LOG, user, group)} if can else {}, ())


def _group(place: FrontEnd) -> str:
    try:
        return grp.getgrgid(place.owner[1]).gr_name if place.owner[1] else administrator(place)
    except KeyError:
        return administrator(place)
