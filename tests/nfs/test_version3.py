# SPDX-License-Identifier: Apache-2.0
"""Why version 3 is refused: between two of its clients QEMU's image locks do not hold, with lockd and all."""

from __future__ import annotations

import pytest

from lab.kernel_host import KernelHost
from nfs.site import Guest, NfsSite
from nfs.test_store import examined
from semishared.plan.care import diagnosis

RPC = (
    "mkdir -p /run/rpcbind /var/lib/nfs/sm /var/lib/nfs/sm.bak; chmod 777 /run/rpcbind; rpcbind -w; "
    "rpc.statd; modprobe nfsv3"
)
V3 = "/mnt/version3"


def _lockd(host: KernelHost) -> None:
    host.script(RPC)


@pytest.mark.long
@pytest.mark.fault(18, "doctor calls a store on NFSv3 broken: two of its clients write to one image")
def test_between_clients_of_version_3_a_second_writer_is_not_refused(nfs_site: NfsSite) -> None:
    h1, h2 = nfs_site.hosts
    for host in (nfs_site.fe, h1, h2):
        _lockd(host)
    nfs_site.fe.script("rpc.nfsd 0; rpc.mountd; rpc.nfsd -V 3 4; echo Y >/proc/fs/nfsd/v4_end_grace")
    for host in (h1, h2):
        host.mount(nfs_site.fe.address, V3, "vers=3,hard,lookupcache=positive")
    image = nfs_site.image("qcow2")
    path = f"{V3}/{image.source.rpartition('/')[2]}"
    guest = Guest(h1, path, "qcow2")
    guest.do("write -P 1 0 4k")
    assert h1.has_lock_refused(path), "on one client it does hold"
    assert not h2.has_lock_refused(path), "it is not as broken as we say: mend the docs and the doctor"
    guest.end()
    found = examined(nfs_site, V3)[V3]
    assert [(item.severity, "NFS version 3" in item.what) for item in found] == [(diagnosis.BROKEN, True)]
    for host in (h1, h2):
        host.run(["umount", V3])
