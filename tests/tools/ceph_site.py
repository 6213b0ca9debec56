# SPDX-License-Identifier: Apache-2.0
"""A real Ceph cluster beside a World: this machine is the bridge and the host, each with a key of its own."""

from __future__ import annotations

import base64
import json
import subprocess
import time
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional
from xml.sax.saxutils import escape

import rados
import rbd

from lab import forks
from semishared.config import Config
from semishared.model import steps as s
from semishared.model.disk.network_disk import NetworkDisk
from semishared.model.store import access
from semishared.model.store import image_steps as i
from semishared.named import to_data
from semishared.plan.store.ceph_caps import keys
from semishared.wire.session import Session
from tools.world import MiB, World

ROOT = Path(__file__).resolve().parents[2]
POOL = "one"
USER, READER, BRIDGE = "libvirt", "bases", "bridge"
SECRET = "00000000-0000-4000-8000-0000000000cc"
FEATURES = 61


class Site:
    """The cluster behind the configuration `conf`, and what an admin sees in it."""

    def __init__(self, conf: str) -> None:
        self.conf = conf
        self.cluster = rados.Rados(conffile=conf, rados_id="admin")
        self.cluster.connect(timeout=20)
        self.ioctx = self.cluster.open_ioctx(POOL)
        self.rbd = rbd.RBD()
        for key in keys(USER, POOL, READER, BRIDGE):
            caps = [word for cap in key.caps for word in cap]
            made = self.command("auth get-or-create", entity=f"client.{key.user}", caps=caps)
            path = Path(conf).parent / f"ceph.client.{key.user}.keyring"
            path.write_text(f"[client.{key.user}]\n\tkey = {made[0]['key']}\n")
        self.access = access.Access("rbd", USER, READER, BRIDGE, conf, (), SECRET, "")

    def close(self) -> None:
        self.ioctx.close()
        self.cluster.shutdown()

    def command(self, prefix: str, **words: Any) -> Any:
        code, out, said = self.cluster.mon_command(
            json.dumps({"prefix": prefix, "format": "json", **words}), b"", timeout=30
        )
        assert code == 0, said
        return json.loads(out) if out.strip() else None

    # -- images ------------------------------------------------------------------------------------

    def ref(self, number: int = 7, source: str = "", generation: str = "") -> s.ImageRef:
        return s.ImageRef(105, number, "raw", source or f"{POOL}/one-{number}", generation, self.access)

    def make(self, number: int = 7, size: int = 64 * MiB, pattern: int = 0xA1) -> s.ImageRef:
        """Make an image as somebody else would, with a pattern at 1 MiB and at its end."""
        name = f"one-{number}"
        self.rbd.create(self.ioctx, name, size, old_format=False, features=FEATURES)
        self.write(name, 1 * MiB, bytes([pattern]) * 65536)
        self.write(name, size - 65536, bytes([pattern]) * 65536)
        return self.ref(number)

    def write(self, name: str, offset: int, data: bytes) -> None:
        with rbd.Image(self.ioctx, name) as image:
            image.write(data, offset)
            image.flush()

    def read(self, name: str, offset: int, count: int, snapshot: Optional[str] = None) -> bytes:
        with rbd.Image(self.ioctx, name, snapshot=snapshot, read_only=True) as image:
            data: bytes = image.read(offset, count)
            return data

    def content(self, name: str) -> bytes:
        with rbd.Image(self.ioctx, name, read_only=True) as image:
            data: bytes = image.read(0, image.size())
            return data

    def size(self, name: str) -> int:
        with rbd.Image(self.ioctx, name, read_only=True) as image:
            size: int = image.size()
            return size

    def names(self) -> List[str]:
        return sorted(self.rbd.list(self.ioctx))

    def snapshots(self, name: str) -> List[str]:
        with rbd.Image(self.ioctx, name, read_only=True) as image:
            return sorted(found["name"] for found in image.list_snaps() if not found["namespace"])

    def trashed(self, name: str) -> int:
        with rbd.Image(self.ioctx, name, read_only=True) as image:
            return sum(1 for found in image.list_snaps() if found["namespace"])

    def protected(self, name: str, snapshot: str) -> bool:
        with rbd.Image(self.ioctx, name, read_only=True) as image:
            found: bool = image.is_protected_snap(snapshot)
            return found

    def parent(self, name: str) -> str:
        with rbd.Image(self.ioctx, name, read_only=True) as image:
            try:
                return "/".join(image.parent_info()[:2]) + "@" + image.parent_info()[2]
            except rbd.ImageNotFound:
                return ""

    def busy(self, names: Optional[Iterable[str]] = None) -> Dict[str, List[str]]:
        """Return watchers and lockers of images (default: all), but for our own."""
        found = {}
        for name in self.names() if names is None else names:
            with rbd.Image(self.ioctx, name, read_only=True) as image:
                held = [watcher["addr"] for watcher in image.watchers_list()]
            if held:
                found[name] = held
        return found

    def held_after(self, seconds: float) -> Dict[str, List[str]]:
        """Return what is held of images when dead clients have had so long to let go; looked at one by one,
        since that opens them.
        """
        deadline = time.monotonic() + seconds
        for name in self.names():
            while self.busy([name]) and time.monotonic() < deadline:
                time.sleep(0.2)
        return self.busy()

    def wipe(self) -> None:
        """Remove all images, whatever hangs on them."""
        for _ in range(60):
            for name in self.names():
                try:
                    self._remove(name)
                except (rbd.ImageBusy, rbd.ImageHasSnapshots):
                    continue
            if not self.names():
                return
            time.sleep(1)
        raise AssertionError(f"images that cannot be removed: {self.names()}, {self.busy()}")

    def _remove(self, name: str) -> None:
        with rbd.Image(self.ioctx, name) as image:
            for found in image.list_snaps():
                if found["namespace"]:
                    continue
                if image.is_protected_snap(found["name"]):
                    image.unprotect_snap(found["name"])
                image.remove_snap(found["name"])
        self.rbd.remove(self.ioctx, name)

    # -- what actions do ---------------------------------------------------------------------------

    def on(self, *steps: s.Step, data: Iterable[Any] = (), seq: int = -1) -> List[Any]:
        """Carry out steps through the host side of this machine, as planned at a SEQ of a VM's history."""
        with Session("localhost", "test", Config()) as session:
            session.seq = seq
            results = [to_data(one) for one in session.run(steps)]
            self.moved = session.moved
        return results

    def base(self, world: World, image: s.ImageRef) -> str:
        """Have a base of an image as tm/clone does; return its generation."""
        (seen,) = self.on(i.SeeImage(image))
        if not seen["frozen"]:
            self.on(i.FreezeImage(image))
        if seen["generation"]:
            (staged,) = self.on(s.StageBase(str(world.root), image._replace(generation=seen["generation"])))
            return str(staged["generation"])
        (staged,) = self.on(s.StageBase(str(world.root), image))
        moved = self.moved
        if "snapshot" in staged:
            self.on(i.NameGeneration(image, staged["snapshot"], staged["generation"]))
        self.moved = moved
        return str(staged["generation"])

    def network(self, name: str) -> NetworkDisk:
        return NetworkDisk.of(name, self.access)

    # -- datastore actions -------------------------------------------------------------------------

    def datastore_xml(self, base: Path, **template: str) -> str:
        values = {
            "DISK_TYPE": "RBD",
            "POOL_NAME": POOL,
            "CEPH_USER": USER,
            "SEMISHARED_CEPH_READER": READER,
            "CEPH_CONF": self.conf,
            "SEMISHARED_CEPH_BRIDGE_USER": BRIDGE,
            "CEPH_SECRET": SECRET,
            "RESTRICTED_DIRS": "/",
            **template,
        }
        inside = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in values.items())
        return f"<DATASTORE><ID>105</ID><TYPE>0</TYPE><BASE_PATH>{escape(str(base))}</BASE_PATH><TEMPLATE>{inside}</TEMPLATE></DATASTORE>"  # noqa: E501

    def request(self, base: Path, *, template: Optional[Dict[str, str]] = None, **image: Any) -> str:
        """Return what oned gives a datastore action on stdin."""
        fields = "".join(
            f"<{name}>{escape(str(value))}</{name}>" for name, value in {"ID": 7, "TYPE": 0, **image}.items()
        )
        store = self.datastore_xml(base, **(template or {}))
        data = f"<DS_DRIVER_ACTION_DATA><IMAGE>{fields}<TEMPLATE/></IMAGE>{store}</DS_DRIVER_ACTION_DATA>"
        return base64.b64encode(data.encode()).decode()

    def run(
        self,
        action: str,
        base: Path,
        *,
        template: Optional[Dict[str, str]] = None,
        env: Optional[Dict[str, str]] = None,
        **image: Any,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a datastore executable of this checkout as one_datastore does, forked."""
        data = self.request(base, template=template, **image)
        return subprocess.run(
            [*forks.python(), str(ROOT / "datastore" / action), "7"],
            input=data.encode(),
            capture_output=True,
            check=False,
            timeout=120,
            cwd="/",
            env={"HOME": "/var/lib/no-home", "PATH": "/usr/bin:/bin:/usr/sbin", **(env or {})},
        )
