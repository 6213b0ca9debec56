# SPDX-License-Identifier: Apache-2.0
"""Decisions of the datastore actions: which paths may be read, which format an image is stored in."""

from __future__ import annotations

from ..errors import BadAttribute, RestrictedPath
from ..opennebula.xml import Datastore, Image

CDROM = 1
FILE_DATASTORE = 2
STORED = ("raw", "qcow2")


def _is_below(path: str, directory: str) -> bool:
    return directory == "/" or path == directory or path.startswith(f"{directory}/")


def check_allowed(path: str, real_path: str, safe: list[str], restricted: list[str]) -> None:
    """Raise RestrictedPath unless `real_path` may be read: below a safe directory, or below no restricted one.

    All paths are real paths; they are compared by component (OpenNebula's libfs.sh compares prefixes).
    """
    if any(_is_below(real_path, directory) for directory in safe):
        return
    if any(_is_below(real_path, directory) for directory in restricted):
        # The path as given: where a link leads is nobody's business who may not read there.
        raise RestrictedPath(f"{path} may not be read by this datastore")


def check_allowed_ssh(url: str, safe: list[str]) -> None:
    """Raise RestrictedPath unless SAFE_DIRS names the machine and a directory above the path (ssh://host:/dir).

    Nothing less will do: oneadmin's keys open every host, whose files are not for whoever may create an image.
    """
    if not any(entry.startswith("ssh://") and _is_below(url, entry.rstrip("/")) for entry in safe):
        raise RestrictedPath(f"{url} may not be read by this datastore")


def stored_format(found: str, image: Image, datastore: Datastore, *, encrypted: bool = False) -> str:
    """Return the format to store an image of format `found` in; raise BadAttribute for an unknown DRIVER.

    CD-ROMs and files (kernels, scripts) are stored as they are, whatever they look like; and so are `encrypted` raw images:
    libvirt decrypts what is raw.
    """
    if encrypted and found == "raw":
        return found
    if image.type == CDROM or datastore.type == FILE_DATASTORE:
        return found
    wanted = datastore.attribute("DRIVER").lower()
    if wanted and wanted not in STORED:
        raise BadAttribute(f"DRIVER of datastore {datastore.id} is {wanted!r}, not one of {', '.join(STORED)}")
    if wanted and datastore.attribute("CONVERT").lower() != "no":
        return wanted
    return found if found in STORED else "qcow2"
