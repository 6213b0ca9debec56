# SPDX-License-Identifier: Apache-2.0
"""What OpenNebula's monitoring of a host gets from us, run as its probes are; with stores that hang or are
not mounted.
"""

from __future__ import annotations

import base64
import re
import time
from contextlib import contextmanager
from typing import Iterator

from lab import Node
from lab.cloud import DATASTORES, STORE, Cloud

PROBES = "/var/tmp/one/im/kvm-probes.d/host/system"
SETTINGS = b"<MONITOR><DATASTORE_LOCATION>/var/lib/one//datastores/.</DATASTORE_LOCATION></MONITOR>"
# A FUSE file system whose server never reads a request: whoever asks it anything waits until it is gone.
HANG = """
import ctypes, os, sys, time
fd = os.open("/dev/fuse", os.O_RDWR)
libc = ctypes.CDLL(None, use_errno=True)
options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
if libc.mount(b"hung", sys.argv[1].encode(), b"fuse", 0, options):
    sys.exit(os.strerror(ctypes.get_errno()))
print("mounted", flush=True)
time.sleep(600)
"""


@contextmanager
def hung(node: Node, path: str) -> Iterator[None]:
    """Let everything below `path` hang on one host."""
    server = node.popen(["/usr/bin/python3", "-c", HANG, path], user="root", stdout=-1)
    assert server.stdout
    try:
        assert server.stdout.readline() == b"mounted\n"
        yield
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
        node.run(["umount", "-l", path], user="root")


@contextmanager
def hidden(node: Node, path: str) -> Iterator[None]:
    """Put an empty directory over `path` on one host, as if nothing were mounted there."""
    node.run(["mount", "-t", "tmpfs", "none", path], user="root")
    try:
        yield
    finally:
        node.run(["umount", path], user="root")


def template(node: Node) -> dict[str, str]:
    """Run all probes of the directory, as monitord-client does: none may fail; return what ours says."""
    said = b""
    for name in sorted(path.name for path in node.path(PROBES).iterdir()):
        said += node.run([f"{PROBES}/{name}", "kvm"], input=SETTINGS, timeout=30).stdout
    assert b"HOSTNAME=" in said
    match = re.search(r"SEMISHARED = \[ (.*) \]$", said.decode(), re.MULTILINE)
    assert match, said
    return dict(re.findall(r'([A-Z_]+) = "([^"]*)"', match.group(1)))


def sizes(node: Node, vm: int) -> list[str]:
    """Return what monitor_ds says of a VM, asked as the probe monitor_ds_vm.rb asks."""
    driver = node.path(f"{DATASTORES}/101/.monitor").read_text().strip()
    text = node.run([f"/var/tmp/one/tm/{driver}/monitor_ds", f"{DATASTORES}/101"], timeout=20).stdout.decode()
    rows = dict(re.findall(r'^VM = \[ ID = ([0-9]+), MONITOR = "([A-Za-z0-9+/=]+)" \]$', text, re.MULTILINE))
    return base64.b64decode(rows[str(vm)]).decode().splitlines()


def test_host_when_a_store_hangs_or_is_gone_is_still_monitored_and_says_so(cloud: Cloud) -> None:
    host, store = cloud.lab.node("h2"), f"{DATASTORES}/{STORE}"
    mine, cow = (
        cloud.data_image("seen-mine", b"x", persistent=True),
        cloud.data_image("seen-cow", b"y" * (3 << 20)),
    )
    beside = cloud.data_image("seen-beside", b"z", SEMISHARED_PLACE="shared")
    earlier = template(host)
    vm = cloud.create("seen", [{"IMAGE_ID": str(image)} for image in (mine, cow, beside)])
    cloud.oned.vm_deploy(vm, "h2", 101)
    found = template(host)
    assert (found["HEALTH"], found["STORES"], found["LEASES"]) == ("OK", "100", "1")
    # Other tests have left bases on this host, as tests may.
    assert int(found["BASES"]) == int(earlier["BASES"]) + 1
    assert int(found["BASES_MB"]) - int(earlier["BASES_MB"]) in (3, 4)
    assert 0 < int(found["FREE_MB"]) < int(found["TOTAL_MB"])
    before = sizes(host, vm)
    assert {
        line.split("SIZE")[1].split("ID=")[1].split(",")[0] for line in before if line.startswith("DISK")
    } >= {"0", "1", "2"}
    here = [line for line in before if not re.search(r"\[ ID=[02], |DISK_ID=[02],", line)]
    """Of what lies on the host; oned keeps what it knows of the others."""
    assert 0 < len(here) < len(before)
    host.run(["mkdir", f"{DATASTORES}/101/999"])
    host.run(["ln", "-s", "/nowhere/at/all", f"{DATASTORES}/101/999/disk.0"])
    try:
        with hidden(host, store):
            assert template(host)["HEALTH"] == "store 100 is not mounted"
            assert sizes(host, vm) == here
        started = time.monotonic()
        with hung(host, store):
            assert template(host)["HEALTH"] == "store 100 hangs"
            assert sizes(host, vm) == here
        assert time.monotonic() - started < 25
        assert template(host)["HEALTH"] == "OK"
    finally:
        host.run(["rm", "-r", f"{DATASTORES}/101/999"])
        cloud.terminate(vm)
    assert cloud.leftovers() == []
