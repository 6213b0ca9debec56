# SPDX-License-Identifier: Apache-2.0
"""One base onto N hosts: ours by multicast, chain and unicast, against scp, qemu-img convert from the store
and bare udpcast.

Every cable of the lab has 100 Mbit/s both ways, so that the network is measured: above that it would be this
machine's CPU, which copies every packet for every host. Each host stays on one core, as it would have its
own. The image is random data and as large as a link carries in 20 s; a time is from the command until the
last host (or, with a slow and a killed one, the last healthy host) has it. scp and the others verify nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections import defaultdict
from typing import Callable, Dict, List, Sequence

import stage_figures
from figures import Figure, rounds_within
from stage_figures import MBIT, Samples

from lab import Node
from lab.cloud import DATASTORES, RECORDS, STORE, Cloud

LINK = MBIT * 1_000_000 / 8
RATE, LIMIT = "11800k", 11800 << 10
"""A little below the link: 97 Mbit/s, as LAB measured for udpcast without loss."""
SECONDS = 20
COUNTS = (1, 4, 16)
ONLY = {"unicast": (1,), "scp": (1,), "convert": (), "chain": (1, 4), "udpcast": (1, 16)}
"""What takes N times a link's time is known after one; a chain keeps the cores busy from 8 on.
`SEMISHARED_FULL=1`: all of them.
"""
COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"
TARGET = "/var/tmp/bench-copy.img"
SENDING = 8
"""What a multicast sender's core has to do, by what a receiver's has to (measured on two cores with 16
receivers).
"""
FAULTS_SECONDS = 40
"""With a slow and a killed receiver the image is larger: each costs the others about 2 s, whatever its
size.
"""
BASELINES = ("scp", "convert", "udpcast")


class Rig:
    """A cloud of one sender (h1, which has the base), N receivers, and slow cables."""

    def __init__(self, cloud: Cloud, mib: int) -> None:
        self.cloud, self.lab = cloud, cloud.lab
        self.rates: Dict[str, List[float]] = defaultdict(list)
        self.upload(mib)
        # What the sender sends is carried to all by its core: that is as much as some receivers do.
        loads = [0] * (os.cpu_count() or 1)
        for host, load in zip(self.lab.hosts, (SENDING, *[1] * len(self.lab.hosts))):
            core = loads.index(min(loads))
            host.stay_on(core)
            loads[core] += load

    def upload(self, mib: int) -> None:
        """Make an image of `mib` MiB the one that is staged, and have it on the sender."""
        for node in (self.lab.fe, *self.lab.hosts):
            node.limit(None)
        path = self.cloud.upload_file("stage.img")
        subprocess.run(
            ["dd", "if=/dev/urandom", f"of={path}", "bs=1M", f"count={mib}", "status=none"], check=True
        )
        self.cloud.give(path)
        self.image = self.cloud.oned.image_create(
            STORE, f"stage-{mib}", path="/var/tmp/stage.img", type="OS", prefix="vd"
        )
        path.unlink()
        self.bytes, self.source = mib << 20, self.cloud.source(self.image)
        self.command("stage", "--hosts", "h1")
        for node in (self.lab.fe, *self.lab.hosts):
            node.limit(MBIT)

    def command(self, verb: str, *words: str) -> Dict[str, object]:
        """Run our command for the image; return its summary."""
        done = self.lab.fe.run([COMMAND, verb, str(self.image), *words, "--json"], check=False, timeout=1500)
        last = done.stdout.decode().splitlines()[-1:] or [done.stderr.decode()]
        found: Dict[str, object] = json.loads(last[0])
        return found

    def receivers(self, count: int) -> List[Node]:
        return self.lab.hosts[1 : 1 + count]

    def forget(self, count: int) -> None:
        """Empty the base stores of the receivers."""
        for host in self.receivers(count):
            for part in ("bases", "staging"):
                shutil.rmtree(host.path(f"{DATASTORES}/{RECORDS}/{part}"), ignore_errors=True)
            host.path(TARGET).unlink(missing_ok=True)
        shutil.rmtree(self.lab.fe.path(f"{DATASTORES}/{RECORDS}/holders"), ignore_errors=True)

    def sent(self, node: Node) -> int:
        return int(node.path("/sys/class/net/eth0/statistics/tx_bytes").read_text())

    # -- the ways ------------------------------------------------------------------------------------

    def stage(self, transport: str, count: int) -> float:
        """Stage from h1 to `count` hosts; return the seconds."""
        names = ",".join(["h1", *(host.name for host in self.receivers(count))])
        started, ended = time.monotonic(), threading.Event()
        watch = threading.Thread(target=self._watch, args=(transport, ended))
        watch.start()
        try:
            found = self.command(
                "stage", "--hosts", names, "--transport", transport, "--rate", RATE, "--compress", "none"
            )
        finally:
            ended.set()
            watch.join()
        seconds = time.monotonic() - started
        if not found.get("complete"):
            raise RuntimeError(f"{transport} to {count} hosts: {found}")
        return seconds

    def _watch(self, transport: str, ended: threading.Event) -> None:
        """Note at what rate the sender's card sends in the middle of a session."""
        if ended.wait(SECONDS * 0.3):
            return
        before, at = self.sent(self.lab.hosts[0]), time.monotonic()
        if not ended.wait(SECONDS * 0.4):
            self.rates[transport].append((self.sent(self.lab.hosts[0]) - before) / (time.monotonic() - at))

    def all_at_once(
        self, count: int, argv: Callable[[Node], Sequence[str]], at: Callable[[Node], Node]
    ) -> float:
        """Run one program per receiver, all at once; return the seconds."""
        started = time.monotonic()
        running = [at(host).popen(list(argv(host)), stderr=subprocess.PIPE) for host in self.receivers(count)]
        for process in running:
            _, said = process.communicate(timeout=1500)
            if process.returncode:
                raise RuntimeError(said.decode())
        return time.monotonic() - started

    def scp(self, count: int) -> float:
        """Copy from h1, which has the file, to each host."""
        base = next(self.lab.hosts[0].path(f"{DATASTORES}/{RECORDS}/bases").iterdir()).name
        path = f"{DATASTORES}/{RECORDS}/bases/{base}/image"
        h1 = self.lab.hosts[0]
        return self.all_at_once(
            count, lambda host: ["scp", "-q", path, f"{host.name}:{TARGET}"], lambda host: h1
        )

    def convert(self, count: int) -> float:
        """Let each host convert from the store over its network: an NBD server stands for the store's."""
        server = self.lab.fe.popen(
            ["qemu-nbd", "-r", "-f", "raw", "-e", "32", "--persistent", "-p", "10809", self.source]
        )
        try:
            self.lab.fe.wait_for(["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/10809"], 10)
            argv = ["qemu-img", "convert", "-f", "raw", "-O", "raw", f"nbd://{self.lab.fe.ip}:10809", TARGET]
            return self.all_at_once(count, lambda host: argv, lambda host: host)
        finally:
            server.kill()
            server.wait()

    def udpcast(self, count: int) -> float:
        """Cast from h1 with nothing around it."""
        base = next(self.lab.hosts[0].path(f"{DATASTORES}/{RECORDS}/bases").iterdir()).name
        path = f"{DATASTORES}/{RECORDS}/bases/{base}/image"
        common = ["--nokbd", "--interface", "eth0", "--portbase", "9800"]
        started = time.monotonic()
        receive = ["udp-receiver", *common, "--no-progress", "--rcvbuf", "4194304", "--file", TARGET]
        running = [host.popen(receive, stderr=subprocess.DEVNULL) for host in self.receivers(count)]
        try:
            self.lab.hosts[0].run(
                [
                    "udp-sender",
                    *common,
                    "--min-receivers",
                    str(count),
                    "--max-wait",
                    "10",
                    "--start-timeout",
                    "30",
                    "--nopointopoint",
                    "--retries-until-drop",
                    "30",
                    "--max-bitrate",
                    "94400k",
                    "--file",
                    path,
                ],
                timeout=600,
            )
            for process in running:
                process.wait(60)
        finally:
            for process in running:
                process.kill()
        return time.monotonic() - started

    def take(self, method: str, count: int) -> float:
        """Measure one way to `count` hosts."""
        self.forget(count)
        if method in BASELINES:
            return float(getattr(self, method)(count))
        return self.stage(method, count)

    def healthy(self, count: int) -> float:
        """Stage with a receiver at a tenth of the speed and one killed midway; return the seconds of the
        others.
        """
        self.forget(count)
        slow, killed = self.receivers(count)[-2:]
        slow.limit(MBIT / 10)
        names = ",".join(["h1", *(host.name for host in self.receivers(count))])
        argv = [
            COMMAND,
            "stage",
            str(self.image),
            "--hosts",
            names,
            "--transport",
            "multicast",
            "--rate",
            RATE,
            "--compress",
            "none",
        ]
        started, seconds, done = time.monotonic(), 0.0, set()
        wanted = {host.name for host in self.receivers(count)} - {slow.name, killed.name}
        process = self.lab.fe.popen([*argv, "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout
        try:
            for line in process.stdout:
                event = json.loads(line)
                if (
                    killed.up
                    and event["event"] == "host"
                    and event["have"] > 2
                    and time.monotonic() - started > SECONDS / 2
                ):
                    killed.kill()
                if event["event"] == "host" and event["done"] and event["host"] in wanted:
                    done.add(event["host"])
                    seconds = time.monotonic() - started
                if done == wanted:
                    break
        finally:
            process.kill()
            process.wait()
            killed.start()
            killed.limit(MBIT)
            slow.limit(MBIT)
        if done != wanted:
            raise RuntimeError(f"only {sorted(done)} have it")
        return seconds


def stage(quick: bool) -> List[Figure]:
    """Compare the ways for growing N; then with loss, and with a slow and a killed receiver."""
    counts = (1, 2) if quick else COUNTS
    mib = 32 if quick else int(SECONDS * LINK) >> 20
    ways = ("multicast", "chain", "unicast", *BASELINES)
    samples: Samples = defaultdict(list)
    extra: Dict[str, List[float]] = defaultdict(list)
    with Cloud.up(hosts=max(counts) + 1 + (2 if quick else 0)) as cloud:
        rig = Rig(cloud, mib)
        for count in counts:
            for method in ways:
                if (
                    not quick
                    and count not in ONLY.get(method, counts)
                    and not os.environ.get("SEMISHARED_FULL")
                ):
                    continue
                print(f"  {method} to {count}", flush=True)
                samples[method, count].append(rig.take(method, count))
        most = max(counts)
        print(f"  multicast to {most} with loss", flush=True)
        for host in rig.receivers(most):
            host.drop("numgen random mod 1000 < 10")
        extra["loss 1.0 %"].append(rig.take("multicast", most))
        for host in rig.receivers(most):
            host.drop("")
        rig.forget(most)
        shutil.rmtree(rig.lab.hosts[0].path(f"{DATASTORES}/{RECORDS}/bases"))
        before = {node.name: rig.sent(node) for node in (rig.lab.fe, *rig.lab.hosts)}
        found = rig.command(
            "stage", "--hosts", ",".join(host.name for host in rig.lab.hosts[: most + 1]), "--rate", RATE
        )
        amounts = found["bytes"]
        assert isinstance(amounts, dict)
        extra["store"].append(amounts["store"] / rig.bytes)
        print("  a slow and a killed one", flush=True)
        if not quick:
            rig.upload(int(FAULTS_SECONDS * LINK) >> 20)
        extra["large to one"].append(rig.take("multicast", 1))
        extra["slow and killed"].append(rig.healthy(most if not quick else 4))
        for transport, rates in rig.rates.items():
            extra[f"rate {transport}"] = [rate / LIMIT for rate in rates]
        extra["front-end"].append((rig.sent(rig.lab.fe) - before["fe"]) / rig.bytes)
    return stage_figures.figures(list(counts), ways, samples, extra, mib, rig.bytes >> 20)


FIO = [
    "fio",
    "--name=guest",
    "--filename=/var/tmp/bench-guest.img",
    "--size=256M",
    "--rw=randrw",
    "--bs=4k",
    "--direct=1",
    "--ioengine=psync",
    "--numjobs=1",
    "--time_based",
    "--runtime={seconds}",
    "--output-format=json",
]


def interference(quick: bool) -> List[Figure]:
    """Measure a host's I/O, as a guest's with cache=none does it, while the host receives at 10 MB/s, and
    without.
    """
    rounds, seconds, mib = (1, 3, 64) if quick else (5, 8, 160)
    busy: List[float] = []
    idle: List[float] = []
    with Cloud.up(hosts=2) as cloud:
        rig = Rig(cloud, mib)
        host = rig.lab.hosts[1]
        for node in (rig.lab.fe, *rig.lab.hosts):
            node.limit(None)

        def iops() -> float:
            argv = [word.format(seconds=seconds) for word in FIO]
            job = json.loads(host.run(argv, timeout=seconds * 10 + 60).stdout)["jobs"][0]
            return float(job["read"]["iops"] + job["write"]["iops"])

        iops()
        for _ in rounds_within(120, rounds):
            idle.append(iops())
            rig.forget(1)
            argv = [
                COMMAND,
                "stage",
                str(rig.image),
                "--hosts",
                "h1,h2",
                "--rate",
                "10M",
                "--compress",
                "none",
                "--json",
            ]
            process = rig.lab.fe.popen(argv, stdout=subprocess.DEVNULL)
            time.sleep(2)
            busy.append(iops())
            process.wait(120)
    return [
        Figure(
            "stage/interference",
            "4 KiB random I/O on a host, direct as a guest's, while it receives at 10 MB/s",
            "IOPS",
            busy,
            "without",
            idle,
            expected=0.95,
            because="idle class of I/O; its pages are dropped behind it. The reference of 2014 lost 12.5 %",
        )
    ]
