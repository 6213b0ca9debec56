# SPDX-License-Identifier: Apache-2.0
"""A Ceph cluster of this machine's own, below one directory: monitor, manager and one OSD on loopback, as
plain processes, with the programs of the root that a platform says (lab/roots.py).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, List

import rados

from lab import roots

CONF = """\
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{port}/0]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
run dir = {top}/run
log file = /dev/null
mon cluster log file = /dev/null
log to stderr = false
debug none = 0/0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon allow pool delete = true
mgr initial modules =
[client]
keyring = {top}/$cluster.$name.keyring
admin socket =
log file =
[mon]
mon data = {top}/mon
pid file = {top}/run/mon.pid
mon data avail warn = 2
mon data avail crit = 1
paxos propose interval = 0.05
[mgr]
mgr data = {top}/mgr
pid file = {top}/run/mgr.pid
mgr disabled modules = restful nfs iostat alerts prometheus dashboard zabbix influx telegraf insights localpool osd_perf_query osd_support
mgr tick period = 1
mgr stats period = 2
[osd]
osd data = {top}/osd0
pid file = {top}/run/osd0.pid
osd objectstore = bluestore
osd class dir = /usr/lib/x86_64-linux-gnu/rados-classes
bluestore block size = 6442450944
bluestore block create = true
bluestore cache autotune = false
bluestore cache size = 67108864
osd op num shards = 2
osd op num threads per shard = 1
osd class update on start = false
osd client watch timeout = {watch_s}
osd crush initial weight = 1
osd max pg log entries = 200
osd min pg log entries = 100
bdev aio max queue depth = 256
"""  # noqa: E501


class LocalCluster:
    """Made by the constructor, which takes about 5 s; `end` stops it and removes nothing.

    `watch_s`: after how many seconds a client that was killed loses the images it had open (30 on real
    clusters).
    """

    def __init__(self, top: Path, watch_s: int = 30) -> None:
        self.top = top
        self.conf = f"{top}/ceph.conf"
        self._mgr: subprocess.Popen[bytes] | None = None
        self._within = roots.within(roots.of_cluster())
        for name in ("mon", "mgr", "run", "osd0"):
            (top / name).mkdir(parents=True)
        port = _free_port()
        fsid, osd = str(uuid.uuid4()), str(uuid.uuid4())
        Path(self.conf).write_text(CONF.format(fsid=fsid, port=port, top=top, watch_s=watch_s))
        self._keys()
        self._run(
            "monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v2:127.0.0.1:{port}]", f"{top}/monmap"
        )
        self._run(
            "ceph-mon",
            "-c",
            self.conf,
            "--mkfs",
            "-i",
            "a",
            "--monmap",
            f"{top}/monmap",
            "--keyring",
            f"{top}/seed",
        )
        self._run("ceph-mon", "-c", self.conf, "-i", "a")
        # Every key is in the keyring the monitor is made with, and the OSD's store needs no monitor.
        make = ["--mkfs", "-i", "0", "--osd-uuid", osd, "--no-mon-config", "--monmap", f"{top}/monmap"]
        self._run("ceph-osd", "-c", self.conf, *make)
        self._admin(
            (
                "config set",
                {"who": "mgr", "name": "mgr/devicehealth/enable_monitoring", "value": "false", "force": True},
            ),
            ("osd new", {"uuid": osd, "id": 0}),
        )
        self.start("mgr", "osd")
        self._admin(
            ("osd pool create", {"pool": "one", "pg_num": 8}),
            ("osd pool application enable", {"pool": "one", "app": "rbd"}),
        )
        self.wait()

    def _keys(self) -> None:
        seed = f"{self.top}/seed"
        self._run("ceph-authtool", "-C", seed, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        for name, path, caps in (
            ("client.admin", "ceph.client.admin.keyring", ("mon", "osd", "mgr")),
            ("mgr.a", "mgr/keyring", ("osd",)),
            ("osd.0", "osd0/keyring", ("osd",)),
        ):
            words = [word for kind in caps for word in ("--cap", kind, "allow *")]
            if name != "client.admin":
                words += ["--cap", "mon", f"allow profile {name.split('.')[0]}"]
            if name == "osd.0":
                words += ["--cap", "mgr", "allow profile osd"]
            self._run("ceph-authtool", "-C", f"{self.top}/{path}", "--gen-key", "-n", name, *words)
            self._run("ceph-authtool", seed, "--import-keyring", f"{self.top}/{path}")

    def _env(self) -> dict[str, str]:
        # Debian builds Ceph without tcmalloc: with many arenas its daemons grow.
        return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "MALLOC_ARENA_MAX": "2"}

    def _run(self, *argv: str) -> None:
        with open(f"{self.top}/log", "ab") as log:
            done = subprocess.run(
                [*self._within, *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env(),
                check=False,
                timeout=60,
            )
        assert done.returncode == 0, f"{argv}: {Path(self.top / 'log').read_text()[-1000:]}"

    def _admin(self, *commands: Any) -> List[Any]:
        cluster = rados.Rados(conffile=self.conf, rados_id="admin")
        cluster.connect(timeout=30)
        try:
            answers = []
            for prefix, words in commands:
                code, out, said = cluster.mon_command(
                    json.dumps({"prefix": prefix, "format": "json", **words}), b"", timeout=30
                )
                assert code == 0, said
                answers.append(json.loads(out) if out.strip() else None)
            return answers
        finally:
            cluster.shutdown()

    def start(self, *daemons: str) -> None:
        """Start daemons (default: all); they serve after `wait`."""
        for daemon in daemons or ("mon", "mgr", "osd"):
            if daemon == "mgr":
                # Its modules print, and die without a stderr: it stays in the foreground.
                with open(f"{self.top}/log", "ab") as log:
                    self._mgr = subprocess.Popen(
                        [*self._within, "ceph-mgr", "-f", "-c", self.conf, "-i", "a"],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=self._env(),
                        start_new_session=True,
                    )
            else:
                self._run(f"ceph-{daemon}", "-c", self.conf, "-i", "0" if daemon == "osd" else "a")

    def stop(self, *daemons: str) -> None:
        """End daemons (default: all) by their own pid files; data is kept."""
        for daemon in daemons or ("mgr", "osd", "mon"):
            path = self.top / "run" / ("osd0.pid" if daemon == "osd" else f"{daemon}.pid")
            if daemon == "mgr" and self._mgr:
                self._mgr.kill()
                self._mgr.wait()
            elif path.exists():
                pid = int(path.read_text())
                if _runs(pid) and self.conf.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
                path.unlink()
                deadline = time.monotonic() + 10
                while _runs(pid) and time.monotonic() < deadline:
                    time.sleep(0.02)

    def wait(self) -> None:
        """Wait until the cluster serves, `df` included."""
        deadline = time.monotonic() + 60
        while True:
            (stat, df, mgr) = self._admin(("osd stat", {}), ("df", {}), ("mgr stat", {}))
            if stat["num_up_osds"] and mgr["available"] and df["stats"]["total_bytes"]:
                return
            assert time.monotonic() < deadline, (stat, mgr)
            time.sleep(0.1)

    def end(self) -> None:
        self.stop()


def _free_port() -> int:
    """Return a port that nobody has, nor is given while the monitor is made: below those of outgoing
    connections.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(lowest - 10000, lowest)
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def _runs(pid: int) -> bool:
    """Tell whether a process runs; a zombie that init has not seen yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def running(watch_s: int = 30) -> Iterator[LocalCluster]:
    """Yield a cluster in a directory of its own, with a short path, since sockets lie in it; remove both."""
    top = Path(tempfile.mkdtemp(prefix="ceph-", dir="/var/tmp"))
    cluster = LocalCluster(top / "c", watch_s)
    try:
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(top)
