# SPDX-License-Identifier: Apache-2.0
"""Faults of real NFS: a server that restarts, hangs, forgets; a client that is cut off and comes back."""

from __future__ import annotations

import time

import pytest

from lab import caches
from lab.kernel_host import ONEADMIN, KernelHost
from nfs.site import EXPORT, LEASE_S, LOCATION, PATIENCE_S, SIZE, STORE, Guest, NfsSite
from semishared.errors import MissingImage
from semishared.model import steps as s

HEALTH = f"{caches.CHECKOUT}/lib/semishared/host/probe.py"


def wait_for(what: str, is_so: object, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.5)


def health(host: KernelHost) -> str:
    """Return what OpenNebula's monitoring gets from our probe there."""
    said = f"<X><DATASTORE_LOCATION>{LOCATION}</DATASTORE_LOCATION></X>".encode()
    return host.run(["/usr/bin/python3", "-IS", "-B", HEALTH], stdin=said, user=ONEADMIN).out


def test_a_server_that_restarts_gives_its_locks_back_to_who_had_them(nfs_site: NfsSite) -> None:
    h1, h2 = nfs_site.hosts
    image = nfs_site.image("qcow2")
    guest = Guest(h1, image.source, "qcow2")
    guest.do("write -P 1 0 4k")
    gone = nfs_site.image()
    loser = Guest(h1, gone.source)
    loser.do("write -P 1 1M 64k")
    nfs_site.stop_serving()
    nfs_site.fe.run(["rm", gone.source.replace(STORE, EXPORT)])
    guest.begin("write -P 2 0 64k")
    time.sleep(2)
    assert guest.is_waiting()
    nfs_site.serve()
    assert "wrote 65536/65536" in guest.finish()
    assert h2.has_lock_refused(image.source), "the lock was lost in the restart"
    assert "verification failed" not in guest.do("read -P 2 0 64k")
    guest.end()
    first = h2.stage(image)
    assert h1.stage(image) == first
    # Its handle is stale: what does not remember who has a file open does not keep one that was removed.
    assert "wrote" not in loser.do("write -P 2 1M 64k")
    loser.kill()
    with pytest.raises(MissingImage) as raised:
        h1.stage(gone)
    assert raised.value.detail == f"image {gone.source} is not there on h1"


def test_a_server_that_hangs_is_waited_for_and_the_monitoring_says_so(nfs_site: NfsSite) -> None:
    h1, _ = nfs_site.hosts
    image = nfs_site.image()
    h1.link(image, vm=41)
    guest = Guest(h1, image.source)
    guest.do("write -P 1 1M 64k")
    nfs_site.fe.freeze()
    try:
        guest.begin("write -P 7 1M 64k")
        assert "store 100 hangs" in health(h1)
        assert guest.is_waiting()
    finally:
        nfs_site.fe.thaw()
    assert "wrote 65536/65536" in guest.finish()
    guest.end()
    assert h1.holds(image.source, 7)
    # Where everything is slow, one look may take longer than the probe waits for it.
    wait_for("the store is well", lambda: 'HEALTH = "OK"' in health(h1), PATIENCE_S)
    h1.on(s.EndSession(h1.disk(41)))


def test_a_host_that_was_cut_off_cannot_write_when_it_is_back(nfs_site: NfsSite) -> None:
    h1, h2 = nfs_site.hosts
    image = nfs_site.image("qcow2")
    guest = Guest(h1, image.source, "qcow2")
    guest.do("write -P 1 1M 64k")
    h1.cut()
    nfs_site.expire(h1)
    try:
        # Its locks outlive its lease for as long as nobody else asks for them.
        wait_for("h2 may write", lambda: not h2.has_lock_refused(image.source), 3 * LEASE_S + 120)
        new = Guest(h2, image.source, "qcow2")
        new.do("write -P 8 1M 64k")
    finally:
        h1.mend()
    assert "wrote" not in guest.do("write -P 5 1M 64k")
    said = new.do("read -P 8 1M 64k")
    assert "read 65536/65536" in said and "verification failed" not in said
    assert h1.has_lock_refused(image.source), "nobody's lock is left"
    new.end()
    guest.kill()
    nfs_site.mount_anew(h1)


def test_an_image_that_was_replaced_on_the_server_is_read_anew(nfs_site: NfsSite) -> None:
    h1, fe = nfs_site.hosts[0], nfs_site.fe
    image = nfs_site.image()
    before = h1.stage(image)
    path = image.source.replace(STORE, EXPORT)
    # The file that h1 knows is gone for good: its handle is stale.
    fe.script(
        f"new={path}.new; head -c 64k /dev/zero | tr '\\0' '\\006' | dd of=$new bs=64k seek=16 "
        f"iflag=fullblock status=none\n"
        f"truncate -s {SIZE} $new; chown --reference={path} $new; chmod 660 $new; mv $new {path}"
    )
    after = h1.stage(image)
    assert after != before and h1.holds(h1.base(image, after), 6)
