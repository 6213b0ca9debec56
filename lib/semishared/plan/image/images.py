# SPDX-License-Identifier: Apache-2.0
"""Decide which paths may be read, the formats of images, how hosts reach an image (ImageRef), and which
machine changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...errors import BadAttribute, HostUnreachable, NotSupported, RestrictedPath
from ...model.exchange import Part, ask, here, warn
from ...model.refs import ImageRef
from ...model.store import access as store_access
from ...model.store import template
from ...opennebula.args import image_source
from ...opennebula.states import DatastoreType, ImageType
from ...opennebula.xml import Datastore, Image

if TYPE_CHECKING:
    from ...model.store.datastore_steps import CheckStore

STORED = ("raw", "qcow2")
NEW_SHARE = "new:"
"""What PATH begins with where it asks for a share (plan/share/shares.py)."""


def _is_below(path: str, directory: str) -> bool:
    return directory == "/" or path == directory or path.startswith(f"{directory}/")


def check_allowed(path: str, real_path: str, safe: list[str], restricted: list[str]) -> None:
    """Raise RestrictedPath unless `real_path` is below a safe directory, or below no restricted one.

    All paths are real paths; they are compared by component (OpenNebula's libfs.sh compares prefixes).
    """
    if any(_is_below(real_path, directory) for directory in safe):
        return
    if any(_is_below(real_path, directory) for directory in restricted):
        # The path as given: a user without access there must not learn where a link leads.
        raise RestrictedPath(f"{path} may not be read by this datastore")


def check_allowed_ssh(url: str, safe: list[str]) -> None:
    """Raise RestrictedPath unless SAFE_DIRS names the machine and a directory above the path
    (ssh://host:/dir).

    oneadmin's keys open every host, whose files are not for all users that may create an image.
    """
    if not any(entry.startswith("ssh://") and _is_below(url, entry.rstrip("/")) for entry in safe):
        raise RestrictedPath(f"{url} may not be read by this datastore")


def check_backup(path: str, store: int, parts: frozenset[str], image: Image, known: Sequence[Image]) -> None:
    """Raise RestrictedPath unless oned knows the disk in a backup and lets the owner of `image` use it.

    FROM_BACKUP_DS in its template proves nothing: any user may write it.
    """
    backups = (one for one in known if one.type == ImageType.BACKUP and one.store_id == store)
    if not any(parts <= one.backup_parts and one.may_be_used_by(image) for one in backups):
        raise RestrictedPath(
            f"{path} is in no backup that user {image.number('UID')} may use by its permissions"
        )


def stored_format(found: str, image: Image, datastore: Datastore, *, encrypted: bool = False) -> str:
    """Return the format to store an image of format `found` in; raise BadAttribute for an unknown DRIVER.

    CD-ROMs and files (kernels, scripts) are stored unchanged, and so are `encrypted` raw images: libvirt
    decrypts raw content.
    """
    if encrypted and found == "raw":
        return found
    if image.type == ImageType.CDROM or datastore.type == DatastoreType.FILE_DS:
        return found
    wanted = datastore.attribute("DRIVER").lower()
    if wanted and wanted not in STORED:
        raise BadAttribute(
            f"DRIVER of datastore {datastore.id} is {wanted!r}, not one of {', '.join(STORED)}"
        )
    if wanted and datastore.attribute("CONVERT").lower() != "no":
        return wanted
    return found if found in STORED else "qcow2"


def format_of(image: Image, datastore: Datastore) -> str:
    """Return the format in which an image is read: its FORMAT, else what its datastore would have made it.

    The format is part of a generation's name (tools/extents.py). So the image and its datastore alone decide
    it: another rule would make another generation of the same content.
    """
    formats = template.access(datastore).can.formats
    default = datastore.attribute("DRIVER").lower() if len(formats) > 1 else ""
    return image.format or default or formats[0]


def image_ref(image: Image, datastore: Datastore, source: str = "", name: str = "SOURCE") -> ImageRef:
    """Return how hosts reach an image, at `source` (of which errors say `name`) or its own SOURCE.

    Raise NotSupported for a format that its store does not have, BadArguments for a source that it cannot
    have.
    """
    access = template.access(datastore)
    found = source or image_source(image.source, name)
    return ref_at(datastore.id, access, image.id, found, name, format_of(image, datastore))


def ref_at(
    store: int, access: store_access.Access, number: int, source: str, name: str = "SOURCE", format: str = ""
) -> ImageRef:
    """Return the image at `source` of a store, where oned has none; `format`: '' for the store's own."""
    format = format or access.can.formats[0]
    if format not in access.can.formats:
        raise NotSupported(f"image {number} has format {format!r}, not {' or '.join(access.can.formats)}")
    return ImageRef(store, number, format, store_access.check_source(access, source, name), access=access)


def machine(datastore: Datastore, number: int, host: str = store_access.HERE) -> Part[str]:
    """Return the machine that changes images of a datastore for object `number`, as template.machine says; of
    several bridges the first that answers.

    Raise HostUnreachable if none does.
    """
    machines = template.changers(datastore, number)
    if len(machines) == 1 or not template.kind(datastore).machine:
        return template.machine(datastore, number, host)
    from ...model.store.datastore_steps import CheckStore

    step = CheckStore(template.access(datastore), template.pool(datastore))
    return (yield from answering(datastore, machines, step))


def answering(store: Datastore, machines: Sequence[str], step: CheckStore) -> Part[str]:
    """Return the first of the machines of a store that answers, HERE for this one; raise HostUnreachable.

    That a bridge does not answer is known before anything is changed, so the next one can do it. It need not
    know what the first one does: what bridges do to an image is decided by the store, not by the machine.
    """
    silent = []
    for one in machines:
        try:
            yield from (ask(one, step) if one else here(step))
            return one
        except HostUnreachable as e:
            silent.append(one)
            if len(silent) == len(machines):
                raise HostUnreachable(
                    f"no bridge of datastore {store.id} answers, of {' '.join(silent)}: {e.detail}"
                ) from None
            yield warn(f"bridge {one} of datastore {store.id} is passed over: {e.detail}")
    return store_access.HERE
