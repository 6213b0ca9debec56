# SPDX-License-Identifier: Apache-2.0
"""Go on with a newer Python where /usr/bin/python3 is too old for semishared, as that of EL 8 is.

The old Python reads this, so nothing here is newer than Python 3.6. Every program of semishared begins with
/usr/bin/python3 and imports the package: a machine where that is new enough pays for one comparison.
"""

import os
import sys

FLOOR = (3, 9)
"""The oldest Python that runs semishared; platforms.PYTHON_FLOOR and install.sh have the same."""
PLACE = "/usr/bin"
NEWEST = 30
PACKAGES = ("/usr/lib64", "/usr/lib", "/usr/local/lib64", "/usr/local/lib")
"""Where a Python may have libvirt's binding, below python3.N/site-packages."""


def newest(place: str = PLACE, packages: "tuple[str, ...]" = PACKAGES) -> str:
    """Return the path of the newest Python in `place`, of those that have libvirt's binding first; '' if none
    is new enough.
    """
    there = [number for number in range(FLOOR[1], NEWEST) if os.access(_path(place, number), os.X_OK)]
    best = max(there, key=lambda number: (_binds(packages, number), number)) if there else 0
    return _path(place, best) if best else ""


def _path(place: str, number: int) -> str:
    return "{}/python3.{}".format(place, number)  # noqa: UP032


def _binds(packages: "tuple[str, ...]", number: int) -> bool:
    file = "python3.{}/site-packages/libvirt.py".format(number)  # noqa: UP032
    return any(os.path.exists(os.path.join(top, file)) for top in packages)


def go_on() -> None:
    """Become this program under a newer Python; end with one line if there is none."""
    path = newest()
    # Not for ever: a name may lead back to the old one.
    is_other = bool(path) and os.path.realpath(path) != os.path.realpath(sys.executable)
    if is_other and os.path.exists(sys.argv[0]):
        flags = "-I" + "S" * sys.flags.no_site + "B" * sys.flags.dont_write_bytecode
        os.execv(path, [path, flags] + sys.argv)
    said = "SS092 host {}: /usr/bin/python3 is {}.{}, and {} has no newer one from python3.{} on; {}\n"
    install = "install one beside it: docs/reference/platforms.md"
    sys.stderr.write(said.format(os.uname().nodename, *sys.version_info[:2], PLACE, FLOOR[1], install))
    sys.exit(1)
