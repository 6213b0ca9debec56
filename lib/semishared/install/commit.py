# SPDX-License-Identifier: Apache-2.0
"""Which commit the package is of, for people: `semishared --version`.

Front-end and hosts do not compare it (wire/messages.RELEASE): commits may have the same package. It is said
where it is known for certain, else not at all: what an archive of git says (COMMIT at the top of the
checkout, which git fills in), what git says of a checkout, what install.sh has written into the package.
"""

from __future__ import annotations

import os
import re

from .. import NAME, VERSION
from ..errors import SemisharedError
from ..tools.run import run

COMMIT = "COMMIT"
"""At the top of a checkout, and in an installed package."""
DIGITS = 10
CHANGED = ", changed"
"""Stands behind the commit of a checkout with changes in what is installed."""
INSTALLED = ("lib", "tm", "datastore", "vmm", "im", "bin", "etc", "install.sh")
_TEMPLATE = "$Format:%H$"
_FULL = re.compile(r"[0-9a-f]{40,64}\Z")
_SHORT = re.compile(rf"[0-9a-f]{{{DIGITS}}}(?:{CHANGED})?\Z")


def version() -> str:
    """Return what `semishared --version` prints."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    commit = _read(f"{package}/{COMMIT}")
    if not _SHORT.match(commit):
        commit = commit_of(os.path.dirname(os.path.dirname(package)))
    return f"{NAME} {VERSION} ({commit})" if commit else f"{NAME} {VERSION}"


def commit_of(checkout: str) -> str:
    """Return the commit of a checkout or an unpacked archive, '' if that is not certain."""
    said = _read(f"{checkout}/{COMMIT}")
    if _FULL.match(said):
        return said[:DIGITS]
    return _of_git(checkout) if said == _TEMPLATE else ""


def _of_git(checkout: str) -> str:
    """Return what git says of a checkout; '' of one that lies in another repository, or is another user's."""
    # Without optional locks git writes nothing: this may be root in a user's checkout.
    git = ["git", "--no-optional-locks", "-C", checkout]
    try:
        top, _, commit = run([*git, "rev-parse", "--show-toplevel", "HEAD"]).strip().partition("\n")
        changed = run([*git, "status", "--porcelain", "--", *INSTALLED]).strip()
    except SemisharedError:
        return ""
    if os.path.realpath(top) != os.path.realpath(checkout) or not _FULL.match(commit):
        return ""
    return f"{commit[:DIGITS]}{CHANGED if changed else ''}"


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(200).strip()
    except OSError:
        return ""
