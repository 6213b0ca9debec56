# SPDX-License-Identifier: Apache-2.0
"""A small cloud in a lab: our drivers installed, an image and a system datastore, images and VMs with real
guests.
"""

from __future__ import annotations

import base64
import os
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple
from weakref import WeakSet

from lab import Lab, Node, connections
from lab.ceph import fs
from lab.forks import serve
from lab.guest import BOOT, METAL, Guest, System, lay_out_boot, serial_path, serial_xml, write_guest_image
from lab.oned import IMAGE_DS, SYSTEM_DS, Oned, Settings

STORE, SYSTEM, RBD_STORE = 100, 101, 110
DATASTORES = "/var/lib/one/datastores"
RECORDS = ".semishared"
FEW_DEVICES = "<devices><controller type='usb' model='none'/><memballoon model='none'/></devices>"
"""What libvirt adds to a guest unasked, and an emulated processor needs a tenth of a boot to set up."""
ONCE = "<on_reboot>destroy</on_reboot>"
"""A guest that panics or triple-faults is gone, and its console says why; libvirt's default is to let it
begin anew.
"""
MEMORY = "128"
"""MiB of a guest."""


def odd_memory(mib: str) -> str:
    """Return what makes QEMU give a guest 8 KiB less than so many MiB: then what it writes while it moves is
    not lost.

    QEMU before 9.0 notes dirty memory 64 pages at a time where all of a block is of whole such pieces, and
    forgets to tell its emulated processors that they have to mark a page again (mended by 03bfc2188f06, and
    not in Debian 12's). What a guest writes after that is left behind: its kernel panics after the move, or
    takes old content for new. By pieces of one page it is right. libvirt would round the size up.
    """
    backend = f"memory-backend-ram,id=odd,size={(int(mib) << 20) - 8192}"
    words = ["-object", backend, "-machine", "memory-backend=odd", "-m", f"size={(int(mib) << 10) - 8}k"]
    return (
        "<qemu:commandline>"
        + "".join(f"<qemu:arg value='{word}'/>" for word in words)
        + "</qemu:commandline>"
    )


class Cloud:
    """A lab with a simulated oned and the installed drivers; ids as in the recordings: store 100, system
    101.
    """

    standing: WeakSet[Cloud] = WeakSet()
    """Those of this process."""

    def __init__(self, lab: Lab, oned: Oned) -> None:
        self.lab = lab
        self.oned = oned
        self._guests: Dict[int, Guest] = {}
        self._bootable: Dict[str, System] = {}
        self._forgiven: Set[str] = set()
        self.standing.add(self)

    @classmethod
    @contextmanager
    def up(
        cls,
        hosts: int = 2,
        systems: Sequence[int] = (SYSTEM,),
        ceph: int = 0,
        cephfs: bool = False,
        forks: bool = False,
        installs: bool = False,
        releases: Optional[Mapping[str, int]] = None,
        front_ends: int = 1,
    ) -> Iterator[Cloud]:
        """Put up lab, drivers and datastores (with `ceph`, a number of OSDs, also RBD_STORE); take all of it
        down at the end.

        With `cephfs` STORE is on CephFS, which each node mounts by itself; else it is a bind mount. With
        `forks` the drivers are forked and not started (forks.py), and machines share connections
        (connections.py). With `installs` they are installed and brought to the hosts as by an operator; else
        they are copied, as such an installation has left them in another lab. `releases` and
        `front_ends`: as of Lab.up; of two, `fe` leads first (`lead`).
        """
        stores = () if cephfs else (STORE,)
        with Lab.up(
            hosts=hosts, stores=stores, ceph=ceph or cephfs, releases=releases, front_ends=front_ends
        ) as lab:
            if cephfs:
                fs.serve(lab.ceph, [lab.fe, *lab.hosts], f"{DATASTORES}/{STORE}")
            lab.install() if installs else lab.put()
            if forks:
                serve(lab)
                connections.share(lab)
            for host in lab.hosts:
                lay_out_boot(host.path(BOOT))
            with Oned.in_lab(lab, Settings(domain_type=lab.virt, vm_mad=lab.virt)) as oned:
                if front_ends > 1:
                    oned.group([node.name for node in lab.front_ends])
                oned.datastore_create(IMAGE_DS, STORE)
                if ceph:
                    oned.datastore_create(lab.ceph.datastore(), RBD_STORE)
                for number in systems:
                    oned.datastore_create(SYSTEM_DS.replace("semi_sys", f"semi_sys_{number}"), number)
                setup = [
                    "/var/lib/one/remotes/lib/semishared/semishared",
                    "setup",
                    "--apply",
                    "--system",
                    f"semi_sys_{systems[0]}",
                ]
                lab.fe.run(setup)
                yield cls(lab, oned)

    def lead(self, name: str) -> Node:
        """Have a front-end lead: oned starts drivers there from now on, and names it; return it."""
        node = self.lab.node(name)
        self.oned.lead(node)
        return node

    # -- images ------------------------------------------------------------------------------------

    def upload_file(self, name: str) -> Path:
        """Return where, seen from outside, the front-end finds /var/tmp/NAME."""
        return self.lab.fe.path(f"/var/tmp/{name}")

    def give(self, path: Path) -> None:
        """Let the drivers' user own a file made by us."""
        os.chown(path, self.lab.uid, self.lab.gid)

    def os_image(
        self,
        name: str = "os",
        *,
        system: System = METAL,
        persistent: bool = False,
        format: str = "raw",
        store: int = STORE,
        **attributes: str,
    ) -> int:
        """Upload a bootable image with the verifier."""
        for host in self.lab.hosts:
            if not host.path(system.os["KERNEL"]).exists():
                lay_out_boot(host.path(BOOT), system)
        write_guest_image(self.upload_file(f"{name}.img"), system)
        image = self._upload(name, format, "OS", persistent, attributes, store)
        self._bootable[str(image)] = system
        return image

    def data_image(
        self,
        name: str,
        content: bytes,
        mib: int = 16,
        *,
        persistent: bool = False,
        format: str = "raw",
        store: int = STORE,
        type: str = "DATABLOCK",  # noqa: A002 - the name of the option
        **attributes: str,
    ) -> int:
        """Upload an image of `mib` MiB that begins with `content`."""
        with self.upload_file(f"{name}.img").open("wb") as file:
            file.write(content)
            file.truncate(mib << 20)
        return self._upload(name, format, type, persistent, attributes, store)

    def _upload(
        self, name: str, format: str, type: str, persistent: bool, attributes: Dict[str, str], store: int
    ) -> int:
        """Upload /var/tmp/NAME.img of the front-end in `format` and remove it."""
        path = self.upload_file(f"{name}.img")
        self.give(path)
        if format == "qcow2":
            self.lab.fe.run(
                [
                    "qemu-img",
                    "convert",
                    "-f",
                    "raw",
                    "-O",
                    "qcow2",
                    f"/var/tmp/{name}.img",
                    f"/var/tmp/{name}.q",
                ]
            )
            path.unlink()
            path = self.upload_file(f"{name}.q")
        more: Dict[str, Any] = {
            "type": type,
            "persistent": persistent,
            "prefix": "vd",
            "attributes": dict(attributes),
        }
        # To be told the store's capacity after each image is for tests that create images themselves.
        image = self.oned.image_create(store, name, path=f"/var/tmp/{path.name}", monitored=False, **more)
        path.unlink()
        return image

    def source(self, image: int) -> str:
        """Return an image's SOURCE."""
        return self.oned.image(image).source

    def read(self, path: str, format: str, count: int, offset: int = 0, node: Optional[Node] = None) -> bytes:
        """Return bytes of an image as a guest would see them, read by qemu-img on `node` (default: the
        front-end).
        """
        node = node or self.lab.fe
        out = f"/var/tmp/read-{os.urandom(4).hex()}"
        argv = [
            "qemu-img",
            "dd",
            "-U",
            "-f",
            format,
            "-O",
            "raw",
            "bs=1024",
            f"skip={offset >> 10}",
            f"count={(offset + count) >> 10}",
            f"if={path}",
            f"of={out}",
        ]
        node.run(argv)
        data = node.path(out).read_bytes()
        node.path(out).unlink()
        return data

    # -- VMs ---------------------------------------------------------------------------------------

    def template(
        self,
        name: str,
        disks: Sequence[Dict[str, str]],
        machine: str = "pc",
        context: bool = True,
        **more: Any,
    ) -> Dict[str, Any]:
        """Return a VM template with a serial console for the verifier.

        Without `context` there is no context ISO, which costs an action on the host whenever the VM starts.

        What boots is what is on its disk, but from a file of the host: an emulated BIOS takes as long to load
        it as all the rest of a boot. The demo, the tutorial and tests/system/test_hypervisor.py boot from
        disks.
        """
        systems = [
            self._bootable[disk["IMAGE_ID"]] for disk in disks if disk.get("IMAGE_ID") in self._bootable
        ]
        machine = self.lab.machine if machine == "pc" else machine
        system = {"ARCH": "x86_64", "MACHINE": machine, **(systems[0].os if systems else {})}
        # What shares a directory with its host shares its memory, and does not move while it runs.
        is_emulated = self.lab.virt != "kvm" and not any("MOUNT_TAG" in disk for disk in disks)
        emulated = odd_memory(str(more.get("MEMORY", MEMORY))) if is_emulated else ""
        return {
            "NAME": name,
            "CPU": "0.1",
            "MEMORY": MEMORY,
            "OS": system,
            "DISK": list(disks),
            "RAW": {"TYPE": "kvm", "DATA": serial_xml(name) + FEW_DEVICES + ONCE + emulated},
            **({"CONTEXT": {"NETWORK": "NO", "SEMI": name}} if context else {}),
            **more,
        }

    def create(
        self, name: str, disks: Sequence[Dict[str, str]], machine: str = "pc", context: bool = True
    ) -> int:
        """Create a VM on hold."""
        return self.oned.vm_create(self.template(name, disks, machine, context))

    def deploy(
        self,
        name: str,
        disks: Sequence[Dict[str, str]],
        host: str = "h1",
        machine: str = "pc",
        context: bool = True,
    ) -> int:
        """Create and deploy a VM; return its id."""
        vm = self.create(name, disks, machine, context)
        self.oned.vm_deploy(vm, host, SYSTEM)
        return vm

    def guest(self, vm: int, timeout: float = 120) -> Guest:
        """Return the verifier in a VM, once it answers on the host where oned has the VM."""
        node = self.lab.node(self.oned.vm(vm).last.host.name)
        guest = self._guests.get(vm)
        if guest is None or guest.node is not node:
            guest = Guest(node, serial_path(self.oned.vm(vm).name))
            self._guests[vm] = guest
        guest.close()
        return guest.wait_up(timeout)

    def limits(self, vm: int, target: str) -> Tuple[int, int]:
        """Return what a disk of a running VM may do in a second, as its QEMU says it: bytes and operations, 0
        for as much as it can.
        """
        record = self.oned.vm(vm)
        argv = ["virsh", "-c", "qemu:///system", "blkdeviotune", record.deploy_id, target]
        said = self.lab.node(record.last.host.name).run(argv).stdout.decode()
        rows = dict(line.replace(" ", "").split(":") for line in said.splitlines() if ":" in line)
        return int(rows["total_bytes_sec"]), int(rows["total_iops_sec"])

    def allocated(self, vm: int) -> Dict[str, int]:
        """Return how many bytes each disk of a running VM takes where its guest writes, by target."""
        record = self.oned.vm(vm)
        node = self.lab.node(record.last.host.name)
        said = node.run(
            ["virsh", "-q", "-c", "qemu:///system", "domblklist", record.deploy_id]
        ).stdout.decode()
        sources = dict(row.split() for row in said.splitlines())
        files = {target: path for target, path in sources.items() if path.startswith("/")}
        blocks = node.run(["stat", "-L", "-c", "%b", *files.values()]).stdout.split()
        found = {target: 512 * int(count) for target, count in zip(files, blocks)}
        images = {target: image for target, image in sources.items() if target not in files}
        return {**found, **(self.lab.ceph.allocated(images) if images else {})}

    def vm_dir(self, vm: int) -> str:
        """Return a VM's directory on its host."""
        return f"{DATASTORES}/{self.oned.vm(vm).last.ds_id}/{vm}"

    def terminate(self, vm: int) -> None:
        """Terminate a VM at once."""
        self.oned.vm_terminate(vm, hard=True)
        guest = self._guests.pop(vm, None)
        if guest:
            guest.close()

    def delete_all(self) -> None:
        """Delete the VMs that a failing test leaves, so that the next one is judged for itself."""
        for vm in list(self.oned.vms.values()):
            if self.oned.state(vm.id)[0] != "DONE":
                self.oned.vm_recover(vm.id, "delete")

    def tm(self, action: str, vm: int, *words: str) -> None:
        """Run a transfer action for the VM on the front-end, with the VM on stdin as oned gives it."""
        argv = [
            f"/var/lib/one/remotes/tm/semishared/{action}",
            f"{self.oned.vm(vm).last.host.name}:{self.vm_dir(vm)}",
            *words,
        ]
        done = self.lab.fe.run(argv, input=self.oned.vm(vm).to_xml().encode(), check=False, timeout=120)
        assert done.returncode == 0, done.stderr.decode()

    def tm_migrate(self, action: str, vm: int, target: str, seq: Optional[int] = None) -> None:
        """Run premigrate, postmigrate or failmigrate for the VM, as if it were to move to another host at
        that SEQ, or at the last one.
        """
        record = self.oned.vm(vm)
        where = [record.last.host.name, target, self.vm_dir(vm), str(vm), str(record.last.ds_id)]
        argv = [f"/var/lib/one/remotes/tm/semishared/{action}", *where]
        known = f"<SEQ>{record.last.seq}</SEQ>"
        xml = record.to_xml(only_last=True).replace(known, known if seq is None else f"<SEQ>{seq}</SEQ>")
        stdin = base64.b64encode(xml.encode())
        done = self.lab.fe.run(argv, user="oneadmin", input=stdin, check=False, timeout=120)
        assert done.returncode == 0, done.stderr.decode()

    # -- what is on disk -----------------------------------------------------------------------------

    def files(self, node: Node, directory: str) -> List[str]:
        """Return all paths below a directory of a node, relative to it; empty if it is not there."""
        base = node.path(directory)
        if not base.is_dir():
            return []
        return sorted(str(path.relative_to(base)) for path in base.rglob("*"))

    def leftovers(self) -> List[str]:
        """Return what is on front-end, hosts and store although no VM is there: directories, leases, clones,
        staged files.

        What was forgiven does not count.
        """
        return [name for name in self._left() if name not in self._forgiven]

    def forgive(self) -> None:
        """Take what is left now for what a failed test has left, so that the next one is judged for
        itself.
        """
        self._forgiven.update(self._left())

    def _left(self) -> List[str]:
        found = []
        for node in [*self.lab.front_ends, *self.lab.hosts]:
            for system in (ds.id for ds in self.oned.datastores.values() if ds.type == 1):
                names = self.files(node, f"{DATASTORES}/{system}")
                found += [
                    f"{node.name}:{system}/{name}"
                    for name in names
                    if name != ".monitor" and not name.startswith(".machine-")
                ]
            for name in self.files(node, f"{DATASTORES}/{RECORDS}"):
                if "/leases/" in name or name.startswith("staging/") or ".staged-" in name:
                    found.append(f"{node.name}:{RECORDS}/{name}")
        for name in self.files(self.lab.fe, f"{DATASTORES}/{STORE}/{RECORDS}"):
            if "/clones/" in name or ".staged-" in name or name.startswith(".uploads/") or ".probe" in name:
                found.append(f"store:{name}")
        return found

    def left_in_pool(self) -> List[str]:
        """Return what VMs that are gone have left on Ceph: images of nobody, snapshots that a user sees,
        locks, watchers, clones.
        """
        known = {
            image.source.partition("/")[2]
            for image in self.oned.images.values()
            if image.datastore_id == RBD_STORE
        }
        found = []
        for name, there in self.lab.ceph.images().items():
            snapshots = [snap["name"] for snap in there["snaps"]]
            in_use = [there[what] for what in ("watchers", "lockers", "children") if there[what]]
            if (
                name not in known
                or in_use
                or len(snapshots) > 1
                or not all(one.startswith("semishared-") for one in snapshots)
                or any(one.startswith("semishared-backup-") for one in snapshots)
            ):
                found.append(f"{name}: {in_use} {snapshots}")
        return found

    def said(self, action: str) -> List[str]:
        """Return what the calls of an action said on stderr, in order."""
        return [call.stderr for call in self.oned.calls if call.action == action]
