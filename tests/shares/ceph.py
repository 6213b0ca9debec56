# SPDX-License-Identifier: Apache-2.0
"""A cloud with shares on CephFS: a cluster and a metadata server of our own, the keys that the page has, the
drivers as oned calls them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from lab import Lab, Node
from lab.ceph import fs
from lab.cloud import Cloud
from semishared.model.share import steps as share_steps
from semishared.model.share.share import Tree, first_uid
from semishared.model.steps import Step, to_data
from shares import once
from shares.cloud import SHARES, template
from shares.guests import Guests
from shares.page import PAGES, ROOT

COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"
AS_HOST = "/srv/as-host"
"""Where h1, which makes the shares, has them by the key that hosts have."""


class CephShares:
    """A cloud of host h1, which makes shares and has no guests, and two that have some; all mount the group
    of subvolumes.
    """

    def __init__(self, cloud: Cloud) -> None:
        self.cloud, self.lab, self.oned, self.host = cloud, cloud.lab, cloud.oned, cloud.lab.hosts[0]

    @classmethod
    @contextmanager
    def up(cls) -> Iterator[CephShares]:
        """Put one up."""
        with Cloud.up(hosts=3, ceph=True, forks=True) as up:
            cls.provide(up.lab)
            more: dict[str, Any] = {
                "SEMISHARED_FS_VOLUME": f"{fs.NAME}/one",
                "CEPH_USER": "shares",
                "BRIDGE_LIST": up.lab.hosts[0].name,
                "SEMISHARED_FS_POOLS": "none",
            }
            up.oned.datastore_create(template("cephfs", Path(ROOT), **more), SHARES)
            made = cls(up)
            made.cli("init", str(SHARES))
            yield made

    @cached_property
    def guests(self) -> Guests:
        """Return what makes guests on it, which have shares by their hosts."""
        return Guests(self.cloud)

    @property
    def tree(self) -> Tree:
        """Return where the shares are."""
        marker, cloud = (
            str(self.oned.datastores[SHARES].template[f"SEMISHARED_{name}"]) for name in ("STORE", "CLOUD")
        )
        return Tree("cephfs", ROOT, marker, f"{fs.NAME}/one", "shares", cloud=cloud)

    @classmethod
    def provide(cls, lab: Lab) -> None:
        """Do what the page tells the admin of a cluster."""
        fs.create(lab.ceph)
        commands = re.findall(r"(?m)^    ((?:ceph fs|ceph auth|verbs=|caps=).*)$", PAGES)
        assert len(commands) == 8
        script = "\n".join(commands).replace("cephfs", fs.NAME).replace(f"tag {fs.NAME}", "tag cephfs")
        lab.ceph.node.run(["bash", "-euc", script], user="root", cwd="/")
        mounts = re.findall(r"(?m)^    (ceph-fuse .*?) +# on ", PAGES)
        host = lab.hosts[0]
        for user in ("shares", "shares-maker", "shares-mount"):
            lab.ceph.give_key(host, user, lab.ceph.key(user))
        for mount, where in zip(mounts, (ROOT, AS_HOST)):
            host.run(["mkdir", "-p", where], user="root")
            host.run(
                [*mount.replace("cephfs", fs.NAME).replace(ROOT, where).split(), *fs.OPTIONS],
                user="root",
                cwd="/",
            )
        host.run(["chown", "oneadmin:oneadmin", ROOT], user="root")
        for host in lab.hosts[1:]:
            lab.ceph.give_key(host, "shares-mount", lab.ceph.key("shares-mount"))
            cls.mount(host)

    def second_group(self) -> Tree:
        """Make another OpenNebula's group of subvolumes on the same file system, by what the page says,
        mounted on h1; return its root.
        """
        root, text = (
            "/srv/second",
            PAGES.replace("client.shares", "client.second").replace("--id shares", "--id second"),
        )
        commands = "\n".join(re.findall(r"(?m)^    ((?:ceph fs|ceph auth|verbs=|caps=).*)$", text)).replace(
            "cephfs", fs.NAME
        )
        script = re.sub(r"\bone\b", "two", commands.replace(f"tag {fs.NAME}", "tag cephfs"))
        self.lab.ceph.node.run(["bash", "-euc", script], user="root", cwd="/")
        for user in ("second", "second-maker"):
            self.lab.ceph.give_key(self.host, user, self.lab.ceph.key(user))
        mount = re.findall(r"(?m)^    (ceph-fuse .*?) +# on the machine", text)[0].replace("cephfs", fs.NAME)
        self.host.run(["mkdir", "-p", root], user="root")
        words = mount.replace("/volumes/one", "/volumes/two").replace(ROOT, root).split()
        self.host.run([*words, *fs.OPTIONS], user="root", cwd="/")
        self.host.run(["chown", "oneadmin:oneadmin", root], user="root")
        tree = Tree("cephfs", root, "", f"{fs.NAME}/two", "second", cloud="2" * 32)
        return tree._replace(marker=self.step(share_steps.MarkRoot(tree, "3" * 32))[1]["marker"])

    @staticmethod
    def mount(host: Node) -> None:
        """Mount the group of subvolumes on a host that has guests, as the page says."""
        words = (
            re.findall(r"(?m)^    (ceph-fuse .*?) +# on hosts", PAGES)[0].replace("cephfs", fs.NAME).split()
        )
        host.run(["mkdir", "-p", ROOT], user="root")
        host.run([*words, *fs.OPTIONS], user="root", cwd="/")

    def cli(self, *words: str, code: int = 0) -> str:
        """Run `semishared share` on the front-end; return all it says."""
        done = self.lab.fe.run([COMMAND, "share", *words], check=False, timeout=120)
        assert done.returncode == code, done
        return (done.stdout + done.stderr).decode()

    def image(self, name: str, path: str, **attributes: str) -> int:
        """Make a share as `oneimage create --type FILESYSTEM --path` does."""
        return int(
            self.oned.image_create(SHARES, name, path=path, type="FILESYSTEM", attributes=dict(attributes))
        )

    def source(self, image: int) -> str:
        """Return where a share is."""
        return str(self.oned.image(image).source)

    def listed(self) -> dict[int, dict[str, Any]]:
        """Return what `semishared share list` says, by image."""
        return {row["image"]: row for row in json.loads(self.cli("list", "--json"))["shares"]}

    def gc(self) -> dict[str, str]:
        """Return what became of what `semishared gc` found of shares and keys, '' of what it keeps."""
        done = self.lab.fe.run([COMMAND, "gc", "--json", "--now"], timeout=120)
        return {
            row["path"]: row["result"]
            for row in json.loads(done.stdout)["findings"]
            if row["kind"] in ("share", "key")
        }

    def does(self, words: list[str], owner: int = 0, check: bool = True) -> tuple[str, str]:
        """Run a program as root of a guest of an owner's."""
        uid = str(first_uid(owner))
        as_guest = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *words]
        done = self.host.run(as_guest, user="root", cwd="/", check=check, timeout=120)
        return done.stdout.decode(), done.stderr.decode()

    def subvolumes(self) -> list[str]:
        """Return what the manager knows; it takes each directory of the group for one."""
        said = self.lab.ceph.node.run(
            ["ceph", "fs", "subvolume", "ls", fs.NAME, "one", "--format", "json"], user="root", cwd="/"
        ).stdout
        return sorted(row["name"] for row in json.loads(said) if row["name"] != ".semishared")

    def step(self, step: Step, at: int = 0) -> tuple[int, Any]:
        """Carry out a step on h1, killed at a point; return the exit code, and what it found out."""
        for name, text in (("job", json.dumps(to_data(step))), ("once.py", Path(once.__file__).read_text())):
            self.host.path(f"/var/tmp/{name}").write_text(text)
            self.host.path(f"/var/tmp/{name}").chmod(0o644)
        env = {
            "PYTHONPATH": "/var/tmp/one/lib",
            "PYTHONDONTWRITEBYTECODE": "1",
            **({"SEMISHARED_KILL_AT": str(at)} if at else {}),
        }
        done = self.host.run(
            ["/usr/bin/python3", "/var/tmp/once.py", "/var/tmp/job"], env=env, check=False, timeout=120
        )
        assert at or not done.returncode, done
        return done.returncode, None if done.returncode else json.loads(done.stdout)
