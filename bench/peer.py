# SPDX-License-Identifier: Apache-2.0
"""A base from a peer: against a plain TCP stream that is written, synced and hashed as well; against the
store; on 8 cold hosts at once.

What is measured of ours is the whole clone action, as oned calls it. Links are limited at the lab's switch,
and the store, on a file system of its own, by a control group that all nodes are in: the page cache forgets
its image before each copy, and the peer's base.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Dict, List, Sequence

import block
import peer_figures
from figures import Figure, rounds_within
from meter import cpu_of
from throttle import Device, MiB, Throttle, sectors_read

from lab import Node, moved
from lab.cloud import DATASTORES, RECORDS, STORE, SYSTEM, Cloud
from lab.hosts import REMOTES

COPY = "/var/tmp/plain_copy.py"
TARGET = "/var/tmp/plain.img"
PORT = 9777
GBIT = 1000
SLOW_PEER = 300
"""Mbit/s of a peer that is throttled."""
SLOW_STORE = 40 * MiB
COLD = 8
COLD_MBIT = 100
"""Of each cable when many hosts are cold: above that it would be this machine's cores, which carry every
packet for all of them.
"""
SECONDS = 20
"""How long such a cable, or the store at the same rate, takes for the image of that case."""
CONF = f"{REMOTES}/etc/semishared.conf"
WAYS_S = {"1 Gbit/s": 115, "unshaped": 65}
"""For all rounds over a link."""
WAYS = {"ssh": "no", "trusted": "yes"}
"""How a peer sends, and what is said of the network for that."""
KNOWN_STORE = f"store {STORE}"


class Rig:
    """A cloud with its store on a device that can be slow, an image, and h1, which has its base."""

    def __init__(self, cloud: Cloud, device: Device) -> None:
        self.cloud, self.lab, self.device = cloud, cloud.lab, device
        self.peer, *self.cold = cloud.lab.hosts
        self.vms: List[int] = []
        self._move_store()
        for node in self.lab.hosts:
            shutil.copy(Path(__file__).with_name("plain_copy.py"), node.path(COPY))

    def _move_store(self) -> None:
        """Have what is in the store on the device, and that in place of the store on every node."""
        folder = f"{DATASTORES}/{STORE}"
        subprocess.run(["cp", "-a", f"{self.lab.fe.path(folder)}/.", self.device.mount], check=True)
        os.chown(self.device.mount, self.lab.uid, self.lab.gid)
        found = os.stat(self.device.loop).st_rdev
        name = "/dev/bench-store"
        script = f"mknod {name} b {os.major(found)} {os.minor(found)} && mount -t xfs {name} {folder}"
        for node in (self.lab.fe, *self.lab.hosts):
            node.run(["sh", "-c", script], user="root")

    def leave_store(self) -> None:
        """Let go of the device."""
        for node in (self.lab.fe, *self.lab.hosts):
            node.run(["umount", "-l", f"{DATASTORES}/{STORE}"], user="root", check=False)

    def upload(self, mib: int) -> None:
        """Make an image of `mib` MiB of random data the one that is cloned; h1 has its base afterwards."""
        path = self.cloud.upload_file("peer.img")
        block.fill(path, mib << 20)
        self.cloud.give(path)
        self.image = self.cloud.oned.image_create(
            STORE, f"peer-{mib}", path="/var/tmp/peer.img", type="OS", prefix="vd"
        )
        path.unlink()
        self.mib = mib
        self.vms = [
            self.cloud.create(f"peer-{mib}-{host.name}", [{"IMAGE_ID": str(self.image)}])
            for host in self.lab.hosts
        ]
        self.clone(self.peer)
        bases = (path.name for path in self.peer.path(f"{DATASTORES}/{RECORDS}/bases").iterdir())
        (self.base,) = [name for name in bases if name.startswith(f"{STORE}-{self.image}-")]

    def clone(self, host: Node) -> float:
        """Have a disk of the image on a host; return the seconds."""
        vm = self.vms[self.lab.hosts.index(host)]
        place = f"{host.name}:{DATASTORES}/{SYSTEM}/{vm}/disk.0"
        words = ["clone", "semishared", f"fe:{self.cloud.source(self.image)}", place, str(vm), str(STORE)]
        started = time.monotonic()
        self.cloud.oned.drivers.tm(words)
        return time.monotonic() - started

    def come(self, host: Node, holders: Sequence[str], rates: Dict[str, float]) -> float:
        """Have a disk on a host that has no base: these are said to have it, and so many bytes a second are
        remembered there.
        """
        self.forget(host, holders)
        known = host.path(f"{DATASTORES}/{RECORDS}/holders")
        known.mkdir(parents=True, exist_ok=True)
        (known / "rates").write_text(json.dumps({name: [rate, time.time()] for name, rate in rates.items()}))
        for path in (known.parent, known, known / "rates"):
            os.chown(path, self.lab.uid, self.lab.gid)
        return self.clone(host)

    def forget(self, host: Node, holders: Sequence[str] = ()) -> None:
        """Take disk and base from a host; let the page cache forget the image, and the base of the peer."""
        # By hand, as nothing of this is measured.
        shutil.rmtree(
            host.path(f"{DATASTORES}/{SYSTEM}/{self.vms[self.lab.hosts.index(host)]}"), ignore_errors=True
        )
        for part in ("bases", "staging", "holders"):
            shutil.rmtree(host.path(f"{DATASTORES}/{RECORDS}/{part}"), ignore_errors=True)
        hints = self.lab.fe.path(f"{DATASTORES}/{RECORDS}/holders/{self.base}")
        hints.write_text(json.dumps({"holders": list(holders), "arriving": []}))
        self.cloud.give(hints)
        host.path(TARGET).unlink(missing_ok=True)
        for path in (self.lab.fe.path(self.cloud.source(self.image)), self.peer.path(self.base_path)):
            if path.exists():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    @property
    def base_path(self) -> str:
        return f"{DATASTORES}/{RECORDS}/bases/{self.base}/image"

    def rates(self, host: Node) -> Dict[str, float]:
        """Return what a host remembers of its sources."""
        found = json.loads(host.path(f"{DATASTORES}/{RECORDS}/holders/rates").read_text())
        return {name: float(pair[0]) for name, pair in found.items()}

    def by_peer(self, host: Node) -> float:
        """Have a base from h1, whatever the store would cost."""
        return self.come(host, [self.peer.name], {self.peer.name: 1e9, KNOWN_STORE: 1.0})

    def by_store(self, host: Node) -> float:
        """Have a base that nobody else is known to have."""
        return self.come(host, [], {})

    def from_store(self, calls: int) -> int:
        """Return how many bytes clones since then say that they have read from the store."""
        said = [call.stderr for call in self.cloud.oned.calls[calls:] if call.action == "clone"]
        return sum(moved.total(text, "store_read") for text in said)

    def by_tcp(self, host: Node) -> float:
        """Copy the base by one plain stream."""
        self.forget(host)
        send, receive = (
            f"{COPY} send {self.base_path} {PORT}",
            f"{COPY} receive {self.peer.name} {PORT} {TARGET}",
        )
        # By its receiver's own clock: neither ssh nor an interpreter's start is in it.
        _, said = self._all((self.peer, send), (host, receive))
        return float(said.split()[1])

    def by_ssh(self, host: Node) -> float:
        """Copy the base through ssh with AES-GCM."""
        self.forget(host)
        started = time.monotonic()
        ssh = "ssh -o BatchMode=yes -o Compression=no -c aes128-gcm@openssh.com"
        self._all((host, f"{ssh} {self.peer.name} cat {self.base_path} | python3 -I {COPY} take {TARGET}"))
        return time.monotonic() - started

    def _all(self, *commands: "tuple[Node, str]") -> List[str]:
        """Run commands on hosts, all at once: through ssh, so that each is of its host; return what each
        says.
        """
        running = [
            self.lab.fe.popen(
                [
                    "ssh",
                    "-o",
                    "BatchMode=yes",
                    host.name,
                    command if "|" in command else f"python3 -I {command}",
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for host, command in commands
        ]
        found = []
        for process in running:
            said, error = process.communicate(timeout=600)
            if process.returncode:
                raise RuntimeError(error.decode())
            found.append(said.decode())
        return found

    def trust(self, answer: str) -> None:
        """Say on all machines whether the network is trusted."""
        conf = self.lab.fe.path(CONF)
        conf.write_text(re.sub(r"trusted_network = \w+", f"trusted_network = {answer}", conf.read_text()))
        self.lab.sync()


def peer(quick: bool) -> List[Figure]:
    """Measure a base from a peer by way and link, the choice of the source, and many cold hosts."""
    mib, cold_mib = (96, 64) if quick else (512, int(SECONDS * COLD_MBIT * 1e6 / 8) >> 20)
    samples: peer_figures.Samples = defaultdict(list)
    with ExitStack() as stack:
        top, throttle = (
            stack.enter_context(TemporaryDirectory(prefix="bench-peer-", dir="/var/tmp")),
            stack.enter_context(Throttle()),
        )
        device = Device(Path(top), "store", 512 if quick else 1024)
        stack.callback(device.end)
        rig = Rig(stack.enter_context(Cloud.up(hosts=COLD + 1)), device)
        stack.callback(rig.leave_store)
        stack.callback(throttle.reads, device, None)
        rig.upload(mib)
        _ways(rig, 1 if quick else 5, samples)
        _choice(rig, throttle, 1 if quick else 5, samples)
        rig.upload(cold_mib)
        _many(rig, throttle, 1 if quick else 4, samples)
    return peer_figures.figures(samples, mib, cold_mib)


def _ways(rig: Rig, rounds: int, samples: peer_figures.Samples) -> None:
    """Measure copies by each way in turns, at 1 Gbit/s and as fast as it goes: MiB a second, CPU seconds of
    both ends for a GiB.
    """
    host = rig.cold[0]
    for link, mbit in (("1 Gbit/s", GBIT), ("unshaped", None)):
        for node in (rig.peer, host):
            node.limit(mbit)
        print(f"  {link}", flush=True)
        for _ in rounds_within(WAYS_S[link], rounds):
            for way in ("tcp", "aes", *WAYS):
                if way in WAYS:
                    rig.trust(WAYS[way])
                # Nothing but the copy itself may be in the count.
                rig.forget(host)
                before = [cpu_of(rig.lab, [node]) for node in (rig.peer, host)]
                seconds = {"tcp": rig.by_tcp, "aes": rig.by_ssh}.get(way, rig.by_peer)(host)
                used = [cpu_of(rig.lab, [node]) - was for node, was in zip((rig.peer, host), before)]
                samples[way, f"rate {link}"].append(rig.mib / seconds)
                for end, cpu in zip(("sender", "receiver", "both"), (*used, sum(used))):
                    samples[way, f"{end} {link}"].append(cpu * 1024 / rig.mib)
    rig.trust("no")


def _choice(rig: Rig, throttle: Throttle, rounds: int, samples: peer_figures.Samples) -> None:
    """Let one host ask, with the peer and the store in turns throttled: what it takes from each alone, and of
    its own choice.
    """
    host = rig.cold[0]
    cases = {
        "as they are": (GBIT, None),
        "the peer slow": (SLOW_PEER, None),
        "the store slow": (GBIT, SLOW_STORE),
    }
    for case, (mbit, rate) in cases.items():
        print(f"  {case}", flush=True)
        rig.peer.limit(mbit)
        host.limit(GBIT)
        throttle.reads(rig.device, rate)
        known: Dict[str, float] = {}
        alone = {"peer": (rig.peer.name, rig.by_peer), "store": (KNOWN_STORE, rig.by_store)}
        took = {}
        for what, (name, way) in alone.items():
            took[what] = way(host)
            known[name] = rig.rates(host)[name]
            samples[case, what].append(took[what])
        better = min(took, key=lambda what: took[what])
        # In turns, and the other way round each second time: what one leaves to be written slows the next.
        for number, _ in enumerate(rounds_within(60, rounds)):
            for kind in (better, "known", "new")[:: -1 if number % 2 else 1]:
                calls = len(rig.cloud.oned.calls)
                if kind == better:
                    samples[case, "better"].append(alone[kind][1](host))
                    continue
                samples[case, kind].append(rig.come(host, [rig.peer.name], known if kind == "known" else {}))
                samples[case, f"{kind} part"].append(rig.from_store(calls) / (rig.mib * MiB))
    throttle.reads(rig.device, None)


def _many(rig: Rig, throttle: Throttle, rounds: int, samples: peer_figures.Samples) -> None:
    """Let one cold host, and then all at once, clone what nobody has; the store gives as much as one cable
    carries.
    """
    rig.forget(rig.peer)
    for number, node in enumerate(rig.lab.hosts):
        node.limit(COLD_MBIT)
        node.stay_on(number % (os.cpu_count() or 1))
    throttle.reads(rig.device, int(COLD_MBIT * 1e6 / 8))
    device = rig.device
    print(f"  {COLD} cold hosts", flush=True)
    samples["cold", "one"].append(rig.by_store(rig.cold[0]))
    for _ in rounds_within(115, rounds):
        for host in rig.cold:
            rig.forget(host)
        calls, given, started = len(rig.cloud.oned.calls), sectors_read(device), time.monotonic()
        with ThreadPoolExecutor(COLD) as pool:
            list(pool.map(rig.clone, rig.cold))
        samples["cold", "last"].append(time.monotonic() - started)
        samples["cold", "sectors"].append((sectors_read(device) - given) / (rig.mib * MiB))
        samples["cold", "store"].append(rig.from_store(calls) / (rig.mib * MiB))
    samples["cold", "one"].append(rig.by_store(rig.cold[0]))
