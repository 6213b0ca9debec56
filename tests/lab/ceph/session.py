# SPDX-License-Identifier: Apache-2.0
"""Talk to the cluster as its admin, in one session that stays: run by python3 on the cluster's node
(cluster.py, `ask`).

Takes requests, one JSON a line, and prints one JSON answer a line: a list of one, or a text that says what
went wrong. A `ceph` or `rbd` command costs up to 0.3 s of start-up each, and tests look into the pool some
hundred times.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from typing import Any, Dict, List

import rados  # type: ignore[import-not-found,unused-ignore]
import rbd  # type: ignore[import-not-found,unused-ignore]

SECONDS = 60.0


class Session:
    """One connection as client.admin."""

    def __init__(self) -> None:
        self.cluster = rados.Rados(conffile="/etc/ceph/ceph.conf", name="client.admin")
        self.cluster.connect(timeout=20)

    def command(self, prefix: str, **words: Any) -> Any:
        """Run a monitor command; return its JSON, or its text where it has none."""
        text = json.dumps({"prefix": prefix, "format": "json", **words})
        code, out, err = self.cluster.mon_command(text, b"", timeout=20)
        if code:
            raise RuntimeError(f"{prefix}: {code} {err}")
        try:
            return json.loads(out)
        except ValueError:
            return out.decode()

    def wait(self, what: str) -> None:
        """Wait until all OSDs are up, or one is not, all copies are there, the manager counts, or the
        metadata server serves.
        """

        def there() -> bool:
            if what in ("osd", "lost"):
                stat = self.command("osd stat")
                return bool(stat["num_osds"]) and (stat["num_up_osds"] == stat["num_osds"]) == (what == "osd")
            if what == "clean":
                states = self.command("pg stat")["pg_summary"]["num_pg_by_state"]
                return [state["name"] for state in states] == ["active+clean"]
            if what == "mgr":
                return bool(
                    self.command("mgr stat")["available"] and self.command("df")["stats"]["total_bytes"]
                )
            if what == "mds":
                maps = self.command("fs dump")["filesystems"]
                return all(
                    any(i["state"] == "up:active" for i in one["mdsmap"]["info"].values()) for one in maps
                )
            raise ValueError(what)

        end = time.monotonic() + SECONDS
        while not there():
            if time.monotonic() > end:
                raise RuntimeError(f"not in {SECONDS} s: {what}")
            time.sleep(0.05)

    def pool(self, name: str) -> None:
        """Make a pool for RBD and wait until it answers."""
        self.command("osd pool create", pool=name, pg_num=8, pgp_num=8)
        self.command("osd pool application enable", pool=name, app="rbd")
        with self.cluster.open_ioctx(name) as io:
            rbd.RBD().pool_init(io, True)
            rbd.RBD().list(io)

    def answers(self, pool: str) -> None:
        """Wait until a pool's placement groups answer."""
        with self.cluster.open_ioctx(pool) as io:
            rbd.RBD().list(io)

    def images(self, pool: str) -> Dict[str, Dict[str, Any]]:
        """Return what is in a pool: per image its size, snapshots, parent, children, watchers and lock
        owners.
        """
        found = {}
        with self.cluster.open_ioctx(pool) as io:
            for name in rbd.RBD().list(io):
                found[name] = self._image(io, name)
        return found

    @staticmethod
    def _image(io: Any, name: str) -> Dict[str, Any]:
        with rbd.Image(io, name, read_only=True) as image:
            try:
                parent = "{}/{}@{}".format(*image.parent_info())
            except rbd.ImageNotFound:
                parent = ""
            snaps = [
                {
                    "name": snap["name"],
                    "size": snap["size"],
                    "protected": image.is_protected_snap(snap["name"]),
                }
                for snap in image.list_snaps()
                if snap["namespace"] == rbd.RBD_SNAP_NAMESPACE_TYPE_USER
            ]
            children = [
                f"{child['pool']}/{child['image']}" for child in image.list_children2() if not child["trash"]
            ]
            lockers = image.list_lockers() or {}
            return {
                "size": image.size(),
                "snaps": snaps,
                "parent": parent,
                "children": children,
                "watchers": [watcher["addr"] for watcher in image.watchers_list()],
                "lockers": [locker[2] for locker in lockers.get("lockers", [])],
            }

    def allocated(self, images: Dict[str, str]) -> Dict[str, int]:
        """Return how many bytes the objects of each image POOL/NAME have, of what is there now: nothing of
        its snapshots or parent.
        """
        found = {}
        for key, image in images.items():
            pool, _, name = image.partition("/")
            with self.cluster.open_ioctx(pool) as io:
                with rbd.Image(io, name, read_only=True) as opened:
                    prefix, count = opened.block_name_prefix(), -(-opened.size() // opened.stat()["obj_size"])
                found[key] = sum(self._size(io, f"{prefix}.{number:016x}") for number in range(count))
        return found

    def patterns(self, images: Dict[str, List[int]], count: int) -> Dict[str, List[int]]:
        """Return of each image POOL/NAME which byte `count` of them from each offset on all are; -1 where
        they differ, or end before.
        """
        found: Dict[str, List[int]] = {}
        for image, offsets in images.items():
            pool, _, name = image.partition("/")
            with self.cluster.open_ioctx(pool) as io, rbd.Image(io, name, read_only=True) as opened:
                parts = [opened.read(offset, count) for offset in offsets]
            found[image] = [part[0] if part and part == part[:1] * count else -1 for part in parts]
        return found

    @staticmethod
    def _size(io: Any, name: str) -> int:
        try:
            return int(io.stat(name)[0])
        except rados.ObjectNotFound:
            return 0

    def read(self, pool: str, image: str, count: int, offset: int) -> str:
        """Return bytes of an image, or of IMAGE@SNAPSHOT, in base64."""
        name, _, snapshot = image.partition("@")
        with (
            self.cluster.open_ioctx(pool) as io,
            rbd.Image(io, name, snapshot=snapshot or None, read_only=True) as opened,
        ):
            return base64.b64encode(opened.read(offset, count)).decode()

    def snapshot(self, pool: str, image: str, name: str, protect: bool) -> None:
        """Take a snapshot of an image."""
        with self.cluster.open_ioctx(pool) as io, rbd.Image(io, image) as opened:
            opened.create_snap(name)
            if protect:
                opened.protect_snap(name)

    def remove(self, pool: str, image: str) -> None:
        """Remove an image with its snapshots."""
        with self.cluster.open_ioctx(pool) as io:
            with rbd.Image(io, image) as opened:
                for snap in list(opened.list_snaps()):
                    if snap["namespace"] == rbd.RBD_SNAP_NAMESPACE_TYPE_USER:
                        opened.remove_snap(snap["name"])
            rbd.RBD().remove(io, image)

    def trash(self, pool: str) -> List[str]:
        """Return the names of what lies in a pool's trash."""
        with self.cluster.open_ioctx(pool) as io:
            return [entry["name"] for entry in rbd.RBD().trash_list(io)]


def main() -> None:
    """Answer requests of the form [method, arguments, named arguments] until there are no more."""
    session = Session()
    try:
        for line in sys.stdin:
            name, words, named = json.loads(line)
            try:
                print(json.dumps([getattr(session, name)(*words, **named)]), flush=True)
            except Exception as e:  # noqa: BLE001 - who asked tells it
                print(json.dumps(repr(e)), flush=True)
    finally:
        session.cluster.shutdown()  # or its threads crash the interpreter on its way out


if __name__ == "__main__":
    main()
