# SPDX-License-Identifier: Apache-2.0
"""What locks over real NFSv4.2 (and CephFS, at length) say of a host that is to be fenced: held, they forbid;
gone, they prove nothing.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from lab.kernel_host import ONEADMIN
from nfs.cephfs import CephSite
from nfs.site import LEASE_S, PATIENCE_S, STORE, Guest, Host, NfsSite, Site

FENCE = """
import json, os, sys, time
from xml.etree import ElementTree
from semishared.config import Config
from semishared.errors import NotFenced
from semishared.front.fence import Fence
from semishared.opennebula.xml import Datastore, Host, Image, Vm
from semishared.tools import key

path, wait_s, cases = json.loads(sys.argv[1])
HISTORY = "<HISTORY_RECORDS><HISTORY><SEQ>0</SEQ><HOSTNAME>h1</HOSTNAME><HID>1</HID></HISTORY></HISTORY_RECORDS>"
FROM = "<IMAGE_ID>7</IMAGE_ID><DATASTORE_ID>100</DATASTORE_ID><PERSISTENT>YES</PERSISTENT>"
DISK = f"<DISK><DISK_ID>0</DISK_ID>{FROM}<SOURCE>{path}</SOURCE></DISK>"

class Oned:
    # What one front-end asks of oned, and what it is told.
    def hosts(self): return [Host.parse("<HOST><ID>1</ID><NAME>h1</NAME><CLUSTER_ID>0</CLUSTER_ID><TEMPLATE/></HOST>")]
    def datastores(self): return [Datastore.parse(
        "<DATASTORE><ID>100</ID><NAME>img</NAME><TYPE>0</TYPE><TM_MAD>semishared</TM_MAD><CLUSTERS><ID>0</ID></CLUSTERS><TEMPLATE/></DATASTORE>")]
    def vm(self, number): return Vm.parse(f"<VM><ID>3</ID><STATE>3</STATE>{HISTORY}<TEMPLATE>{DISK}</TEMPLATE></VM>")
    def vms(self): return [self.vm(3)]
    def images(self): return [Image.parse(
        f"<IMAGE><ID>7</ID><PERSISTENT>1</PERSISTENT><DATASTORE_ID>100</DATASTORE_ID><SOURCE>{path}</SOURCE><VMS><ID>3</ID></VMS></IMAGE>")]
    key = "/tmp/front-end.key"
    def front_ends(self): return []
    def documents(self, type): return []
    def create_document(self, text, type): pass

if not os.path.exists(Oned.key):
    key.make(Oned.key)

def fence(off, command):
    try:
        return [Fence(Oned(), Config(fence_command=command), locks_s=0).fence("h1", off).off, ""]
    except NotFenced as e:
        return ["", e.detail]

end = time.monotonic() + wait_s
while wait_s and fence(True, "none")[1] and time.monotonic() < end:
    time.sleep(0.5)
print(json.dumps([fence(*case) for case in cases]))
"""  # noqa: E501


def fence(front_end: Host, path: str, *cases: tuple[bool, str], wait_s: int = 0) -> list[tuple[str, str]]:
    """Fence h1 from the front-end, (somebody said that it is off, fencing command) each; return how it is
    known to be off, or why not.

    With `wait_s`, the locks on the image may go until then.
    """
    done = front_end.python(FENCE, json.dumps([path, wait_s, cases]), user=ONEADMIN, timeout=wait_s + 180)
    found: Any = json.loads(done.out)
    return [(str(off), str(why)) for off, why in found]


def guest_that_writes(site: Site, path: str) -> Guest:
    """Return a guest on h1 that has an image open for writing; while its lock is seen, h1 is not off.

    A machine that this one's other work starves for LEASE_S loses its lock: then the guest cannot write, and
    another one begins.
    """
    for _ in range(3):
        guest = Guest(site.hosts[0], path)
        guest.write(1)
        found = fence(site.fe, path, (True, "none"), (False, "/bin/true"))
        seen = f"{path} is written to by another client of the {site.kind} file system"
        if all(not off and seen in why for off, why in found):
            return guest
        assert "wrote" not in guest.do("write -P 1 1M 64k"), f"a host that writes is off: {found}"
        guest.kill()
    raise AssertionError(f"the lock of a guest does not last for two looks: {found}")


def cut_off(site: Site, path: str) -> None:
    """Have h1, whose guest has an image open, cut off until nobody sees its lock any more; none of that is
    enough.
    """
    fe, h1 = site.fe, site.hosts[0]
    h1.cut()
    site.expire(h1)
    try:
        found = fence(
            fe, path, (False, "none"), (False, "/bin/false"), (True, "none"), wait_s=LEASE_S + PATIENCE_S
        )
    finally:
        h1.mend()
    assert "a host writes to a mounted store until it is off" in found[0][1]
    assert "the fencing command failed" in found[1][1]
    assert found[2] == ("confirmed", ""), "the lock of who is cut off does not go"


def writes_again(host: Host, path: str) -> None:
    """Have somebody on a host that was cut off open the image again, and write."""
    again = Guest(host, path)
    assert "wrote 65536/65536" in again.do("write -P 3 1M 64k")
    assert host.holds(path, 3)
    again.end()


def test_a_lock_that_is_held_forbids_and_one_that_is_gone_proves_nothing(nfs_site: NfsSite) -> None:
    h1, path = nfs_site.hosts[0], nfs_site.image().source
    guest = guest_that_writes(nfs_site, path)
    cut_off(nfs_site, path)
    assert "wrote" not in guest.do("write -P 2 1M 64k"), "who has lost a lock knows it"
    guest.kill()
    writes_again(h1, path)
    nfs_site.mount_anew(h1)


@pytest.mark.long
def test_on_cephfs_who_mounts_it_again_writes_again(cephfs_site: CephSite) -> None:
    h1, path = cephfs_site.hosts[0], cephfs_site.image().source
    guest = guest_that_writes(cephfs_site, path)
    cut_off(cephfs_site, path)
    assert "wrote" not in guest.do("write -P 2 1M 64k"), "the metadata server has shut its client out"
    guest.kill()
    h1.script(f"umount -f {STORE} || umount -l {STORE}", timeout=PATIENCE_S)
    cephfs_site.mount(h1)
    writes_again(h1, path)
