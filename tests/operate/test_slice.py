# SPDX-License-Identifier: Apache-2.0
"""Copies for a backup run in the slice that the backup datastore's attributes name, under systemd itself.

The lab's control groups have no controllers of version 2: where the copies run is seen here, and with which
properties; what the kernel makes of these is not.
"""

from __future__ import annotations

import time

from lab import Lab
from lab.systemd import Systemd

ONEADMIN = 9869
USER = f"""[Service]
User=oneadmin
RuntimeDirectory=user/{ONEADMIN}
Environment=XDG_RUNTIME_DIR=/run/user/{ONEADMIN}
Delegate=yes
ExecStart=/lib/systemd/systemd --user
"""
"""What user@.service is, without a login manager."""
SHIM = """#!/bin/bash
cat /proc/self/cgroup >> /var/tmp/slice/ran
scope=$(sed -n 's|.*/||p' /proc/self/cgroup | tail -n 1)
systemctl --user show -p CPUQuotaPerSecUSec,MemoryMax,IOReadIOPSMax "$scope" >> /var/tmp/slice/ran
exec /usr/bin/qemu-img "$@"
"""
BACK_UP = """
import sys
sys.path.insert(0, {lib!r})
from semishared.disk import backup, epochs, records
from semishared.model import steps as s
from semishared.model.disk.place import COPY
from semishared.model.disk.record import Record
top = "/var/tmp/slice/101/5"
records.write_record(top, Record(0, COPY, "raw", top + "/disk.0"))
step = s.BackUp(5, top, top + "/backup", ("0",), "", "NONE", "PFZNPjwvVk0+", slice="backup.102.slice")
step = step._replace(limits=("CPUQuota=50%", "MemoryMax=512M", "IOReadIOPSMax=/var/tmp 100"))
backup.back_up(step, epochs.arrived(-1, [step], {{}}), None, print)
"""


def test_copies_run_in_the_slice_of_their_datastore() -> None:
    with Lab.up(hosts=1) as lab:
        lab.put()
        host = lab.node("h1")
        for folder in ("/var/tmp/slice/bin", "/var/tmp/slice/101/5/.semishared"):
            host.run(["mkdir", "-p", folder], user="root")
        host.path("/var/tmp/slice/101/5/disk.0").write_bytes(b"disk" * 300_000)
        host.path("/var/tmp/slice/bin/qemu-img").write_text(SHIM)
        host.path("/var/tmp/slice/bin/qemu-img").chmod(0o755)
        host.path("/var/tmp/slice/run.py").write_text(BACK_UP.format(lib="/var/tmp/one/lib"))
        host.run(["chown", "-R", "oneadmin:oneadmin", "/var/tmp/slice"], user="root")
        with Systemd(host) as systemd:
            systemd.put("one.service", USER)
            systemd.systemctl("start", "one.service")
            deadline = time.monotonic() + 120
            while systemd.run("ls", f"/run/user/{ONEADMIN}/systemd/private", check=False).startswith("ls:"):
                assert time.monotonic() < deadline, systemd.journal("-u", "one.service")
                time.sleep(0.1)
            user = ["setpriv", "--reuid=oneadmin", "--regid=oneadmin", "--init-groups", "env"]
            path = "PATH=/var/tmp/slice/bin:/usr/sbin:/usr/bin:/sbin:/bin"
            said = systemd.run(*user, path, "/usr/bin/python3", "/var/tmp/slice/run.py")
        assert said == "", said
        ran = host.path("/var/tmp/slice/ran").read_text()
        copy = host.run(["qemu-img", "info", "/var/tmp/slice/101/5/backup/disk.0.0"]).stdout.decode()
    assert "/backup.102.slice/" in ran, ran
    assert (
        "CPUQuotaPerSecUSec=500ms" in ran and f"MemoryMax={512 << 20}" in ran and "IOReadIOPSMax=" in ran
    ), ran
    assert "file format: qcow2" in copy
