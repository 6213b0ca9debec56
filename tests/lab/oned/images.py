# SPDX-License-Identifier: Apache-2.0
"""Datastore and image operations."""

from __future__ import annotations

import base64
import re
import time
from typing import Dict, Optional

from .core import Core, TemplateLike, as_template
from .drivers import ActionFailed, Refused
from .objects import Datastore, Image, now
from .states import Img
from .template import Template, merge, scalar

_FILESYSTEM = "FILESYSTEM"
_IMAGE_TYPES = {"OS": 0, "CDROM": 1, "DATABLOCK": 2, _FILESYSTEM: 7}
_IMAGE_DS: Template = {
    "ALLOW_ORPHANS": "YES",
    "CLONE_TARGET": "SYSTEM",
    "DISK_TYPE": "FILE",
    "LN_TARGET": "NONE",
    "PERSISTENT_SNAPSHOTS": "YES",
    "TYPE": "IMAGE_DS",
}
_SYSTEM_DS: Template = {
    "ALLOW_ORPHANS": "YES",
    "DISK_TYPE": "FILE",
    "DS_LIVE_MIGRATE": "YES",
    "DS_MIGRATE": "YES",
    "DS_MIGRATE_SNAP": "YES",
    "PERSISTENT_SNAPSHOTS": "YES",
    "SHARED": "NO",
    "TYPE": "SYSTEM_DS",
}
_RM_ERROR = (
    "Error removing image from datastore. Retry the operation or manually remove image source "
    " and run the delete --force operation to completely delete the image"
)


class ImageOps(Core):
    """What onedatastore and oneimage do."""

    def datastore_create(self, template: TemplateLike, datastore_id: Optional[int] = None) -> int:
        """Create a datastore; TM_MAD_CONF of the driver fills what the template leaves open."""
        given = as_template(template)
        system = scalar(given, "TYPE") == "SYSTEM_DS"
        keys = (
            ("SHARED", "DS_MIGRATE", "DS_LIVE_MIGRATE", "DS_MIGRATE_SNAP")
            if system
            else ("LN_TARGET", "CLONE_TARGET")
        )
        conf = {key: value for key, value in self.tm_mad_conf.items() if key in (*keys, "ALLOW_ORPHANS")}
        full: Template = {**(_SYSTEM_DS if system else _IMAGE_DS), **conf, **given}
        name = scalar(full, "NAME")
        full.pop("NAME", None)
        if "SAFE_DIRS" not in full and "RESTRICTED_DIRS" not in full:
            full.update(SAFE_DIRS="/var/tmp", RESTRICTED_DIRS="/")
        with self.data:
            number = self.next_datastore if datastore_id is None else datastore_id
            self.next_datastore = max(self.next_datastore, number + 1)
            ds_mad = "-" if system else scalar(full, "DS_MAD")
            base = f"{self.settings.location}/{number}"
            ds = Datastore(number, name, int(system), ds_mad, scalar(full, "TM_MAD"), base, full)
            self.datastores[number] = ds
        if not system:
            self._monitor(ds)
        return number

    def datastore_update(self, datastore_id: int, attributes: TemplateLike) -> None:
        """Add attributes to a datastore, which may be drivers.

        VMs keep theirs: Datastore::disk_attribute has copied TM_MAD into each DISK when it was made.
        """
        given = as_template(attributes)
        with self.data:
            ds = self.datastore(datastore_id)
            merge(ds.template, given)
            ds.ds_mad = scalar(given, "DS_MAD") or ds.ds_mad
            ds.tm_mad = scalar(given, "TM_MAD") or ds.tm_mad

    def datastore_replace(self, datastore_id: int, attributes: TemplateLike) -> None:
        """Give a datastore another template, as Datastore::post_update_template does.

        What the class keeps comes back: the drivers, TYPE, what oned.conf says of the driver. DISK_TYPE does
        not; the class's own stays.
        """
        given = as_template(attributes)
        with self.data:
            ds = self.datastore(datastore_id)
            kept = ds.disk_type
            system = ds.type == 1
            ds.tm_mad = scalar(given, "TM_MAD") or ds.tm_mad
            ds.ds_mad = "-" if system else scalar(given, "DS_MAD") or ds.ds_mad
            defaults = dict(_SYSTEM_DS if system else _IMAGE_DS)
            del defaults["DISK_TYPE"]
            made = {"TM_MAD": ds.tm_mad, **({} if system else {"DS_MAD": ds.ds_mad})}
            ds.template = {**given, **defaults, **self.tm_mad_conf, **made}
            ds.known_type = kept

    def datastore_delete(self, datastore_id: int) -> None:
        """Delete an empty datastore."""
        with self.data:
            if self.datastore(datastore_id).images:
                raise Refused(f"Datastore {datastore_id} is not empty.")
            del self.datastores[datastore_id]

    def datastore_monitor(self, datastore_id: int) -> None:
        """Ask the driver for the capacity of an image datastore."""
        self._monitor(self.datastore(datastore_id))

    def image_create(
        self,
        datastore_id: int,
        name: str,
        path: str = "",
        size: int = 0,
        type: str = "OS",  # noqa: A002 - the name of the option
        format: str = "",  # noqa: A002
        persistent: bool = False,
        prefix: str = "",
        attributes: TemplateLike = "",
        uid: int = 0,
        monitored: bool = True,
    ) -> int:
        """Create an image from a path or URL, or an empty one; return once it is READY.

        Then oned asks for the capacity of its datastore, if `monitored`.
        """
        ds = self.datastore(datastore_id)
        template = as_template(attributes)
        if prefix:
            template["DEV_PREFIX"] = prefix
        if type == _FILESYSTEM:
            size = self._stat_directory(ds, path)
        elif path:
            size = self._stat(ds, path)
        image = self._new_image(ds, name, _IMAGE_TYPES[type], persistent, template, size)
        image.path, image.format, image.uid = path, "" if path else format, uid
        image.fs = scalar(template, "FS")
        try:
            if path:
                answer = self._ds_action(ds, "cp", str(image.id), image).split()
                if len(answer) < 2:
                    raise ActionFailed(f"no SOURCE and FORMAT in {answer}")
                self._finish(image, answer[0], answer[1])
            elif type == _FILESYSTEM:
                # LOCKED for ever: without a PATH oned asks its driver for nothing (register_image).
                image.format = "dir"
            else:
                source = self._ds_action(ds, "mkfs", str(image.id), image).strip()
                self._finish(image, source, format)
        except ActionFailed as failure:
            self._image_error(
                image, f"Error {'copying' if path else 'creating'} image in the datastore", failure
            )
            raise
        if monitored:
            self._monitor(ds)
        return image.id

    def image_clone(self, image_id: int, name: str, datastore_id: Optional[int] = None) -> int:
        """Clone an image into a datastore of the same driver."""
        original = self.image(image_id)
        ds = self.datastore(original.datastore_id if datastore_id is None else datastore_id)
        if original.type == _IMAGE_TYPES[_FILESYSTEM]:
            raise Refused("FILESYSTEM images cannot be cloned.")
        if original.state != Img.READY and original.state != Img.USED:
            raise Refused(f"Cannot clone image in state {original.state}")
        image = self._new_image(ds, name, original.type, False, dict(original.template), original.size)
        image.path, image.format, image.cloning_id = original.source, original.format, image_id
        try:
            # From 7.4 on (ImageAPI::clone), and only of another datastore.
            bridges = scalar(self.datastore(original.datastore_id).template, "BRIDGE_LIST")
            is_sent = bridges and ds.id != original.datastore_id
            more = f"<SOURCE_BRIDGE_LIST>{bridges}</SOURCE_BRIDGE_LIST>" if is_sent else ""
            answer = self._ds_action(ds, "clone", str(image.id), image, more).split()
            self._finish(image, answer[0], answer[1] if len(answer) > 1 else original.format)
        except ActionFailed as failure:
            self._image_error(image, "Error cloning image", failure)
            raise
        self._monitor(ds)
        return image.id

    def image_delete(self, image_id: int) -> None:
        """Delete an image nobody uses."""
        image = self.image(image_id)
        if image.vms:
            raise Refused(f"Cannot delete image {image_id}, used by VMs {image.vms}")
        ds = self.datastore(image.datastore_id)
        # What never got a place in the store needs no driver to be forgotten.
        stored = bool(image.source)
        if stored:
            try:
                self._ds_action(ds, "rm", str(image_id), image)
            except ActionFailed:
                self._image_error(image, _RM_ERROR, None)
                raise
        with self.data:
            del self.images[image_id]
            if image_id in ds.images:
                ds.images.remove(image_id)
        if stored:
            self._monitor(ds)

    def image_persistent(self, image_id: int, persistent: bool) -> None:
        """Flip the persistence of an unused image; no driver hears of it."""
        with self.data:
            image = self.image(image_id)
            if image.state != Img.READY:
                raise Refused(f"Image {image_id} is in use or not ready")
            image.persistent = persistent

    def image_update(self, image_id: int, attributes: TemplateLike, append: bool = True) -> None:
        """Update an image's template: merge what is given, or put it in place of all."""
        new = as_template(attributes)
        with self.data:
            image = self.image(image_id)
            if append:
                merge(image.template, new)
            else:
                image.template = new

    def image_enable(self, image_id: int) -> None:
        """Take an image out of ERROR."""
        with self.data:
            self.image(image_id).set_state(Img.READY)

    def image_snapshot(self, image_id: int, action: str, snapshot: int) -> None:
        """Run snap_revert, snap_delete or snap_flatten on an unused image."""
        image = self.image(image_id)
        if image.state != Img.READY:
            raise Refused(f"Image {image_id} is in use or not ready")
        image.target_snapshot = snapshot
        try:
            self._ds_action(self.datastore(image.datastore_id), action, str(image_id), image)
        finally:
            image.target_snapshot = -1
        with self.data:
            revise_snapshots(image.snapshots, action, snapshot)

    # -- parts ----------------------------------------------------------------------------------

    def _new_image(
        self, ds: Datastore, name: str, kind: int, persistent: bool, template: Template, size: int
    ) -> Image:
        if kind != _IMAGE_TYPES[_FILESYSTEM]:
            template.setdefault("DEV_PREFIX", "hd" if kind == 1 else self.settings.device_prefix)
        with self.data:
            number = self.next_image
            self.next_image += 1
            # A CD-ROM is the next number after the type it is a CD-ROM of: FILE 0, RBD 3.
            disk_type = ds.disk_type + int(kind == 1)
            image = Image(
                number, name, kind, persistent, ds.id, ds.name, template, size=size, disk_type=disk_type
            )
            self.images[number] = image
        # The driver of cp and mkfs does not see the image in the datastore's list yet.
        image.regtime = image.modtime = now()
        return image

    def _finish(self, image: Image, source: str, format_: str) -> None:
        with self.data:
            image.source, image.format, image.cloning_id = source, format_, -1
            image.set_state(Img.READY)
            ds = self.datastore(image.datastore_id)
            if image.id not in ds.images:
                ds.images.append(image.id)

    def _stat(self, ds: Datastore, path: str, size: str = "<SIZE></SIZE>") -> int:
        with self.data:
            request = self.next_request
            self.next_request += 1
            body = f"<IMAGE><PATH>{_escape(path)}</PATH>{size}</IMAGE>{ds.to_xml()}"
        answer = self.drivers.datastore(ds.ds_mad, "stat", str(request), _encode(body)).strip()
        if not answer.isdigit():
            raise ActionFailed(f"Cannot determine Image SIZE: {answer!r}")
        return int(answer)

    def _stat_directory(self, ds: Datastore, path: str) -> int:
        """Return what oned counts for an image of TYPE=FILESYSTEM (ImageManagerActions.cc, stat_image):
        before 7.4 nothing.
        """
        if self.settings.version < "7.4":
            return 0
        if not path:
            raise Refused("Cannot parse image SIZE: Missing PATH attribute.")
        return self._stat(ds, path, "")

    def _ds_action(self, ds: Datastore, action: str, request: str, image: Image, more: str = "") -> str:
        with self.data:
            body = image.to_xml() + ds.to_xml() + more
        return self.drivers.datastore(ds.ds_mad, action, request, _encode(body))

    def _monitor(self, ds: Datastore) -> None:
        with self.data:
            body = ds.to_xml()
        answer = self.drivers.datastore(ds.ds_mad, "monitor", str(ds.id), _encode(body))
        found: Dict[str, str] = dict(re.findall(r"(USED_MB|TOTAL_MB|FREE_MB)\s*=\s*(\d+)", answer))
        with self.data:
            ds.used_mb, ds.total_mb, ds.free_mb = (
                int(found.get(k, 0)) for k in ("USED_MB", "TOTAL_MB", "FREE_MB")
            )

    def _image_error(self, image: Image, prefix: str, failure: Optional[ActionFailed]) -> None:
        with self.data:
            image.set_state(Img.ERROR)
            ds = self.datastore(image.datastore_id)
            if image.id not in ds.images:
                ds.images.append(image.id)
            image.template["ERROR"] = (
                f"{time.strftime('%a %b %d %H:%M:%S %Y')} : {prefix}{failure and f': {failure}' or ''}"
            )


def revise_snapshots(snapshots: Template, action: str, number: int) -> None:
    """Note a reverted or deleted snapshot in a snapshot list."""
    items = snapshots.get("SNAPSHOT", [])
    rows = [items] if isinstance(items, dict) else list(items) if isinstance(items, list) else []
    if action == "snap_delete":
        rows = [row for row in rows if row["ID"] != str(number)]
    elif action == "snap_flatten":
        rows = []
    elif action == "snap_revert":
        activate(rows, number)
    snapshots.pop("SNAPSHOT", None)
    if rows:
        snapshots["SNAPSHOT"] = rows


def activate(rows: list[Dict[str, str]], number: int) -> None:
    """Mark one snapshot as the active one."""
    for row in rows:
        row.pop("ACTIVE", None)
        if row["ID"] == str(number):
            row["ACTIVE"] = "YES"


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _encode(body: str) -> str:
    return base64.b64encode(f"<DS_DRIVER_ACTION_DATA>{body}</DS_DRIVER_ACTION_DATA>".encode()).decode()
