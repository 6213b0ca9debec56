# SPDX-License-Identifier: Apache-2.0
"""A front-end and two hosts that mount one image store, each with a kernel of its own; for NFS the front-end
is the server too.

What is tested is the real host side (hostside.py) as oneadmin there, under root_squash, and the real qemu-io
as guests.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lab import caches
from lab.kernel_host import ONEADMIN, KernelHost, KernelHostError, Program, Wire
from semishared import VERSION
from semishared.errors import from_id
from semishared.model import steps as s

MiB = 1 << 20
LOCATION = "/var/lib/one/datastores"
STORE = f"{LOCATION}/100"
EXPORT = "/srv/one-images"
SIZE = 4 * MiB
PATIENCE_S = 180
"""What takes seconds on an idle machine."""
PROMPT = "qemu-io> "
LEASE_S = 90
"""What nfsd gives by itself. A client renews after two thirds of it at the latest; of 20 s, on a machine that
does forty things at once, too little was left, and guests lost their locks.
"""
FULL = bool(os.environ.get("SEMISHARED_FULL"))
GRACE_S = 20
"""After a restart of the server, for all clients to reclaim what they hold."""
OPTIONS = "vers=4.2,hard"
"""Without lookupcache=positive: what is published must be found by who has looked for it before, too."""
TEAR = """
import os, pathlib, sys
from rot import dated
path = pathlib.Path(sys.argv[1])
was = path.stat()
with open(path, "r+b") as file:
    file.seek(2000000)
    file.write(b"x")
dated(path, was)
os.sync()
"""
HOSTSIDE = f"{caches.CHECKOUT}/lib/semishared/hostside.py"


class HostSide:
    """hostside.py on a kernel host: plans in, results out."""

    def __init__(self, host: KernelHost, env: dict[str, str] | None = None) -> None:
        self._host = host
        self._program = host.start_program(
            ["/usr/bin/python3", "-IS", "-B", HOSTSIDE], user=ONEADMIN, env=env
        )
        self._read = 0
        self.moved: dict[str, int] = {}

    def begin(self, *steps: s.Step) -> None:
        """Send a plan; `planned` is for the version before SEQs."""
        plan = {
            "version": VERSION,
            "action": "test",
            "seq": -1,
            "answers": False,
            "last": False,
            "standstill_s": PATIENCE_S,
            "planned": time.time() + 3600,
            "steps": [s.to_data(step) for step in steps],
        }
        self._program.write(json.dumps({"plan": plan}).encode() + b"\n")

    def finish(self, timeout: float = PATIENCE_S) -> list[Any]:
        """Return the results of the plan; raise the error that it ended with."""
        deadline = time.monotonic() + timeout
        while True:
            *lines, _ = self._program.out[self._read :].split("\n")
            for line in lines:
                self._read += len(line) + 1
                event = json.loads(line)
                if event["event"] == "done":
                    self.moved = event["moved"]
                    return list(event["results"])
                if event["event"] == "error":
                    raise from_id(event["id"], event["detail"])
            if self._program.ended or time.monotonic() > deadline:
                raise KernelHostError(f"{self._host.name}: no answer in {timeout} s: {self._program.wait(0)}")
            time.sleep(0.02)

    def on(self, *steps: s.Step, timeout: float = PATIENCE_S) -> list[Any]:
        """Carry out a plan."""
        self.begin(*steps)
        return self.finish(timeout)

    def go_on(self) -> None:
        """Let it go on after it has stopped at a point (tools/effects.py)."""
        self._program.signal(18)

    def end(self) -> None:
        """End it."""
        self._program.signal(9)


class Guest:
    """A qemu-io that has an image open, as a guest's QEMU would: past the page cache, with QEMU's locks."""

    def __init__(self, host: Host, path: str, format: str = "raw", *words: str) -> None:
        self._program: Program = host.start_program(
            ["stdbuf", "-oL", "qemu-io", "-t", "none", "-f", format, *words, path], user=ONEADMIN
        )
        self._done = 0
        self._host = host
        self.path = path

    def do(self, command: str, timeout: float = PATIENCE_S) -> str:
        """Carry out a command of qemu-io; return what it says."""
        self.begin(command)
        return self.finish(timeout)

    def write(self, pattern: int, at: str = "1M") -> None:
        """Write 64 KiB of a pattern, which has to work: whoever has lost a lock fails."""
        said = self.do(f"write -P {pattern:#x} {at} 64k")
        assert "wrote 65536/65536" in said, f"{said}\n{self._host.run(['dmesg']).out[-1500:]}"

    def begin(self, command: str) -> None:
        """Type a command."""
        self._program.write(f"{command}\n".encode())

    def finish(self, timeout: float = PATIENCE_S) -> str:
        """Return what the command said: all up to the next prompt."""
        deadline = time.monotonic() + timeout
        while self.is_waiting():
            if self._program.ended or time.monotonic() > deadline:
                raise KernelHostError(
                    f"qemu-io {self.path} has not ended its command in {timeout} s: {self._program.wait(0)}"
                )
            time.sleep(0.02)
        self._done += 1
        return self._program.out.split(PROMPT)[self._done]

    def is_waiting(self) -> bool:
        """Tell whether the command under way has not ended."""
        return self._program.out.count(PROMPT) < self._done + 2

    def end(self) -> None:
        """Let go of the image."""
        self._program.close()
        self._program.wait(PATIENCE_S)

    def kill(self) -> None:
        """End it as a power cut would."""
        self._program.signal(9)


class Host(KernelHost):
    """A kernel host that mounts the store."""

    def __init__(self, name: str, wire: Wire, *, serves: bool = False) -> None:
        super().__init__(name, wire, disks={"export": 500, "local": 400} if serves else {"local": 400})
        self._side: HostSide | None = None

    def mount(self, server: str, path: str = STORE, options: str = OPTIONS) -> None:
        """Mount the export."""
        source = f"{server}:{EXPORT if 'vers=3' in options else '/'}"
        type = "nfs" if "vers=3" in options else "nfs4"
        self.script(f"mkdir -p {path}; mount -t {type} -o {options} {source} {path}", timeout=PATIENCE_S)

    @property
    def side(self) -> HostSide:
        """Return the conversation with the host side that all plans go through."""
        if not self._side:
            self._side = HostSide(self)
        return self._side

    def on(self, *steps: s.Step, timeout: float = PATIENCE_S) -> list[Any]:
        """Carry out a plan there."""
        return self.side.on(*steps, timeout=timeout)

    def stage(self, image: s.ImageRef) -> str:
        """Have a base of the image; return the generation that the newest has."""
        self.on(s.StageBase(f"{LOCATION}/.semishared", image))
        return self.bases(image)[-1]

    def bases(self, image: s.ImageRef) -> list[str]:
        """Return the generations of an image's bases, the newest last."""
        names = self.script(f"ls -tr {LOCATION}/.semishared/bases").out.split()
        return [name.rpartition("-")[2] for name in names if name.startswith(f"{image.store}-{image.id}-")]

    def base(self, image: s.ImageRef, generation: str) -> str:
        """Return the path of a base."""
        return f"{LOCATION}/.semishared/bases/{image.store}-{image.id}-{generation}/image"

    def holds(self, path: str, pattern: int) -> bool:
        """Tell whether the 64 KiB at 1 MiB of a raw file are this byte."""
        others = f"dd if={path} bs=64k skip=16 count=1 status=none | tr -d '\\{pattern:03o}' | wc -c"
        return self.script(f"set -o pipefail; {others}", user=ONEADMIN).out.strip() == "0"

    def link(self, image: s.ImageRef, vm: int = 9) -> s.DiskRef:
        """Attach an image in place, as tm/ln plans it."""
        disk = self.disk(vm)
        self.on(s.PrepareVm(vm, disk.vm_dir), s.LinkInPlace(disk, image, False, True))
        return disk

    @staticmethod
    def disk(vm: int, number: int = 0) -> s.DiskRef:
        """Return a disk of a VM."""
        return s.DiskRef(vm, number, f"{LOCATION}/101/{vm}")

    def has_lock_refused(self, path: str) -> bool:
        """Tell whether a second writer of a qcow2 image is refused here, by QEMU's own lock."""
        done = self.run(["qemu-io", "-f", "qcow2", "-c", "write -P 9 0 4k", path], user=ONEADMIN, check=False)
        assert done.code == 0 or "lock" in done.err, done
        return done.code != 0


class Site:
    """Front-end `fe` and hosts `h1` and `h2`, which all mount one store."""

    kind = ""
    """The type of the file system, as the kernel names it."""

    def __init__(self, fe: Host, hosts: Sequence[Host]) -> None:
        self.fe = fe
        self.hosts = list(hosts)
        self._images = 0

    def prepare(self) -> None:
        """Have the store and mount it."""
        machines = (self.fe, *self.hosts)
        self.provide()
        with ThreadPoolExecutor(3) as pool:
            for begun in [pool.submit(self.prepare_host, host) for host in machines]:
                begun.result()
            self.begin()
            for begun in [pool.submit(self.mount, host) for host in machines]:
                begun.result()

    def provide(self) -> None:
        """Make ready what does not run on a machine of ours."""

    def prepare_host(self, host: Host) -> None:
        """Make a machine ready, but for the store itself."""
        host.mount_disk("local", LOCATION)
        host.run(["install", "-d", "-o", str(ONEADMIN[0]), "-g", str(ONEADMIN[1]), f"{LOCATION}/101"])

    def begin(self) -> None:
        """Let the store be served, once the machines are ready."""

    def mount(self, host: Host) -> None:
        """Mount the store on a host."""
        raise NotImplementedError

    def tear(self, image: s.ImageRef) -> None:
        """Change a byte of an image by other means than a client's writes where there are any; its size and
        times stay.
        """
        self.fe.python(TEAR, self.origin(image))

    def expire(self, host: Host) -> None:
        """Let pass the time after which the servers give up a host that is cut off, where that can be; else
        it is waited for.
        """

    def origin(self, image: s.ImageRef) -> str:
        """Return the path of an image on the front-end, past the client where that can be."""
        return image.source

    def image(self, format: str = "raw", pattern: int = 0xA1) -> s.ImageRef:
        """Make an image without a session; a raw one has a pattern in the 64 KiB at 1 MiB."""
        self._images += 1
        path = f"{STORE}/image{self._images}"
        if format == "raw":
            fill = (
                f"head -c 64k /dev/zero | tr '\\0' '\\{pattern:03o}' | dd of={path} bs=64k seek=16 "
                f"iflag=fullblock status=none"
            )
            self.fe.script(f"{fill}; truncate -s {SIZE} {path}; chmod 660 {path}", user=ONEADMIN)
        else:
            self.fe.script(f"qemu-img create -q -f {format} {path} {SIZE}; chmod 660 {path}", user=ONEADMIN)
        return s.ImageRef(100, self._images, format, path)


class NfsSite(Site):
    """A front-end that is the server too."""

    kind = "nfs4"

    def prepare_host(self, host: Host) -> None:
        """Make a machine ready; the front-end to export."""
        super().prepare_host(host)
        if host != self.fe:
            host.run(["modprobe", "nfsv4"])
            return
        self.fe.mount_disk("export", EXPORT)
        # Its state does not survive a reboot; nor does this server.
        self.fe.script(
            "mount -t tmpfs tmpfs /var/lib/nfs; mkdir -p /var/lib/nfs/sm /var/lib/nfs/sm.bak "
            "/var/lib/nfs/v4recovery\n"
            "touch /var/lib/nfs/etab /var/lib/nfs/rmtab; modprobe nfsd; mount -t nfsd nfsd /proc/fs/nfsd\n"
            f"echo '{EXPORT} *(rw,sync,no_subtree_check,root_squash,fsid=0)' >/etc/exports\n"
            f"echo {LEASE_S} >/proc/fs/nfsd/nfsv4leasetime; echo {GRACE_S} >/proc/fs/nfsd/nfsv4gracetime\n"
            "exportfs -ra; rpc.mountd -N 3"
        )

    def begin(self) -> None:
        """Start the server."""
        self.serve(grace=False)

    def mount(self, host: Host) -> None:
        """Mount the export where the store is."""
        host.mount(self.fe.address)

    def mount_anew(self, host: Host) -> None:
        """Let a host be another client of the server than the one whose lease has ended: that may find it out
        late, and lose more.
        """
        host.script(
            f"for _ in $(seq 60); do umount {STORE} && exit 0; sleep 1; done; umount -l {STORE}",
            timeout=PATIENCE_S,
        )
        self.mount(host)

    def serve(self, *, grace: bool = True) -> None:
        """Start the server; after a restart clients have `GRACE_S` to reclaim what they hold."""
        self.fe.script("rpc.nfsd -N 3 4" + ("" if grace else "; echo Y >/proc/fs/nfsd/v4_end_grace"))

    def stop_serving(self) -> None:
        """Stop the server; it forgets who holds what."""
        self.fe.script("rpc.nfsd 0")

    def expire(self, host: Host) -> None:
        """End the lease of a host that is cut off (not in full runs: there it ends by itself)."""
        if not FULL:
            self.fe.script(
                'for info in $(grep -l "address: .$ADDRESS:" /proc/fs/nfsd/clients/*/info); do '
                'echo expire >"${info%/*}/ctl"; done',
                env={"ADDRESS": host.address},
            )

    def origin(self, image: s.ImageRef) -> str:
        """Return the path of an image on the server."""
        return image.source.replace(STORE, EXPORT)
