# SPDX-License-Identifier: Apache-2.0
"""The `dir` store on what is really shared: what one machine does and another sees, at once.

On NFS, version 4.2 with root_squash; and, marked `long`, on CephFS by the kernel's client (fixture `site`).
"""

from __future__ import annotations

import base64
import json

import pytest

from lab import caches
from lab.kernel_host import ONEADMIN
from nfs.site import LOCATION, PATIENCE_S, SIZE, STORE, Guest, HostSide, NfsSite, Site
from semishared.errors import ImageChanged, MissingImage, SemisharedError
from semishared.model import steps as s
from semishared.plan.care import diagnosis, diagnosis_machines

UNTIL_SAID = """
mkfifo /tmp/never
exec 9<>/tmp/never
until { mapfile -t lines <"$FILE"; } 2>/dev/null && [[ " ${lines[*]-}" == *" $SAID"* ]]; do read -r -t 0.2 -u 9 || true; done
rm /tmp/never
"""  # noqa: E501
"""Waits until a file has a line that begins so, without a program of its own for each look: to start them is
what costs there.
"""
EXAMINE = f"PYTHONPATH={caches.CHECKOUT}/lib /usr/bin/python3 -m semishared.install.preflight"


def test_oneadmin_owns_the_store_and_root_does_not(nfs_site: NfsSite) -> None:
    for host in (nfs_site.fe, *nfs_site.hosts):
        assert host.run(["stat", "-f", "-c", "%T", STORE]).out.strip() == "nfs"
        assert host.run(["touch", f"{STORE}/root"], check=False).code
        host.run(["touch", f"{STORE}/{host.name}"], user=ONEADMIN)
        host.run(["rm", f"{STORE}/{host.name}"], user=ONEADMIN)


def test_a_generation_is_what_all_hosts_take_and_a_session_ends_it_for_all(site: Site) -> None:
    h1, h2 = site.hosts
    image = site.image()
    first = h1.stage(image)
    assert h2.stage(image) == first
    h1.link(image)
    guest = Guest(h1, image.source)
    guest.write(0xB2)
    # Still open there, written past its cache a moment ago.
    second = h2.stage(image)
    assert (
        second != first and h2.holds(h2.base(image, second), 0xB2) and h2.holds(h2.base(image, first), 0xA1)
    )
    guest.write(0xC3)
    third = h2.stage(image)
    assert third not in (first, second) and h2.holds(h2.base(image, third), 0xC3)
    guest.end()
    assert h1.stage(image) == third


@pytest.mark.fault(
    13,
    "a base of an image that is written to, by a host whose clock is behind, is taken for current "
    "by nobody later",
)
def test_writes_of_a_host_whose_clock_is_behind_are_in_the_next_base(site: Site) -> None:
    """CephFS keeps the later of two times of a file: what that host writes changes neither its time nor its
    size.
    """
    h1, h2 = site.hosts
    image = site.image()
    h1.link(image)
    h1.script("date -s @$(($(date +%s) - 3600))")
    try:
        guest = Guest(h1, image.source)
        for pattern in (0xB2, 0xC3):
            guest.write(pattern)
            generation = h2.stage(image)
            assert h2.holds(h2.base(image, generation), pattern), (
                "the base of an earlier content was taken for that of now"
            )
        guest.end()
    finally:
        h1.script("date -s @$(($(date +%s) + 3600))")
    assert h1.stage(image) == generation


@pytest.mark.fault(
    18,
    "a session that began while another host copied ends the generation on NFS too, whatever that "
    "host had seen absent",
)
def test_a_session_that_began_while_another_host_copied_is_seen(site: Site) -> None:
    h1, h2 = site.hosts
    image = site.image()
    late = HostSide(h2, {"SEMISHARED_STOP_AT": "2", "SEMISHARED_TRACE": "/tmp/late"})
    # It has seen that there is no session, and stops when it has copied the image.
    late.begin(s.StageBase(f"{LOCATION}/.semishared", image))
    h2.script(UNTIL_SAID, env={"FILE": "/tmp/late", "SAID": "2 base copied"})
    h1.link(image)
    late.go_on()
    try:
        late.finish()
    except ImageChanged:
        pass  # it has seen the session
    late.end()
    guest = Guest(h1, image.source)
    guest.write(0xD4)
    guest.end()
    generation = h2.stage(image)
    assert h2.holds(h2.base(image, generation), 0xD4), "the base is what was there before the guest wrote"


@pytest.mark.fault(18, "a snapshot that a host has just made of an image is what the front-end flattens to")
def test_a_snapshot_made_elsewhere_a_moment_ago_is_flattened_to(site: Site) -> None:
    (h1, _), fe = site.hosts, site.fe
    image = site.image()
    flatten = (
        "import sys; from semishared.store.dir import snapshots; snapshots.flatten(sys.argv[1], 0, 'raw', 0)"
    )
    # As one without snapshots; now this machine knows that there are none.
    fe.python(flatten, image.source, user=ONEADMIN)
    disk = h1.link(image)
    h1.on(s.CopyOut(disk, 0, "", ""))
    guest = Guest(h1, image.source)
    guest.write(0xE5)
    guest.end()
    fe.python(flatten, image.source, user=ONEADMIN)
    assert fe.holds(image.source, 0xA1), "nothing was reverted, and it was called a success"
    assert fe.run(["ls", f"{image.source}.snap"], check=False).code


def test_what_another_machine_made_or_removed_is_seen_at_once(site: Site) -> None:
    h1, h2 = site.hosts
    image = site.image()
    with pytest.raises(MissingImage):
        h2.stage(image._replace(source=f"{STORE}/later"))
    h1.run(["cp", "--", image.source, f"{STORE}/later"], user=ONEADMIN)
    assert h2.stage(image._replace(source=f"{STORE}/later")) == h1.stage(image)
    disk = h2.disk(31)
    h2.on(s.PrepareVm(31, disk.vm_dir), s.CloneOnStore(disk, image, 0))
    # h1 has never seen it, and looks where it is not yet; as for a VM that is made anew on another host.
    h1.on(s.PrepareVm(31, disk.vm_dir), s.RemoveDisk(h1.disk(31), STORE))
    assert (
        h2.run(
            ["ls", "-A", f"{STORE}/.semishared/{image.source.rpartition('/')[2]}/clones"], user=ONEADMIN
        ).out
        == ""
    )


def test_link_and_rename_are_atomic_between_hosts(site: Site) -> None:
    h1, h2 = site.hosts
    race = """
import os, socket, sys
sys.path.insert(0, sys.argv[3])
from semishared.tools import files
store, me, first = sys.argv[1], sys.argv[2], (sys.argv[4], 7007)
open(f"{store}/race-{me}", "w").close()
if me == "1":
    listening = socket.create_server(first)
    print("ready", flush=True)
    other, _ = listening.accept()
else:
    print("ready", flush=True)
    sys.stdin.readline()
    other = socket.create_connection(first)
other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
won, torn = 0, 0
for i in range(20):
    # Both at the same time, each time.
    other.sendall(b"x")
    assert other.recv(1) == b"x"
    try:
        os.link(f"{store}/race-{me}", f"{store}/race.{i}")
        won += 1
    except FileExistsError:
        pass
    files.write(f"{store}/race.text", (me * 5000).encode())
    with open(f"{store}/race.text") as file:
        text = file.read()
    torn += text not in ("1" * 5000, "2" * 5000)
print("won", won, "torn", torn)
"""
    racers = [
        host.start_program(
            ["/usr/bin/python3", "-IS", "-c", race, STORE, str(number), f"{caches.CHECKOUT}/lib", h1.address],
            user=ONEADMIN,
        )
        for number, host in enumerate(site.hosts, 1)
    ]
    for racer in racers:
        racer.wait_for("ready", PATIENCE_S)
    for racer in racers:
        racer.write(b"\n")
    said = [racer.wait(PATIENCE_S) for racer in racers]
    words = [done.out.split() for done in said]
    assert all(done.code == 0 for done in said), said
    assert sum(int(row[2]) for row in words) == 20 and [row[4] for row in words] == ["0", "0"], said
    h1.script(f"rm {STORE}/race*", user=ONEADMIN)
    assert h2.script(f"ls {STORE}").out.count("race") == 0


def test_a_base_is_not_taken_from_a_torn_image(site: Site) -> None:
    h1, h2 = site.hosts
    # With something that no other base of h2 has: what one has is not read from the store.
    image = site.image(pattern=0x5E)
    h1.stage(image)
    # Where it can be, behind the clients' back; with size and time kept: only the hash tells.
    site.tear(image)
    with pytest.raises(ImageChanged):
        h2.stage(image)
    assert h2.script(f"ls {LOCATION}/.semishared/staging").out == ""


def test_a_direct_read_gets_what_another_client_has_just_written(site: Site) -> None:
    h1, h2 = site.hosts
    image = site.image()
    writer, reader = Guest(h1, image.source), Guest(h2, image.source, "raw", "-r", "-U")
    assert "verification failed" not in reader.do("read -P 0xa1 1M 64k")
    for pattern in (0xB6, 0xC6):
        assert "wrote 65536/65536" in writer.do(f"write -P {pattern} 1M 64k")
        said = reader.do(f"read -P {pattern} 1M 64k")
        assert "read 65536/65536" in said and "verification failed" not in said
    for guest in (writer, reader):
        guest.end()


def test_qemus_locks_hold_between_clients(site: Site) -> None:
    h1, h2 = site.hosts
    image = site.image("qcow2")
    guest = Guest(h1, image.source, "qcow2")
    guest.do("write -P 1 0 4k")
    assert h2.has_lock_refused(image.source) and h1.has_lock_refused(image.source)
    guest.end()
    assert not h2.has_lock_refused(image.source)


@pytest.mark.fault(12, "ln refuses an image that a guest on another client of NFS, or CephFS, writes to")
def test_ln_sees_the_writer_on_another_client(site: Site) -> None:
    h1, h2 = site.hosts
    image = site.image("qcow2")
    h1.link(image)
    guest = Guest(h1, image.source, "qcow2")
    guest.do("write -P 1 0 4k")
    with pytest.raises(Exception, match=f"written to by another client of the {site.kind} file system"):
        h2.link(image)
    guest.end()
    h2.link(image)


def examined(site: Site, *stores: str) -> dict[str, list[diagnosis.Finding]]:
    """Have doctor's examination run on h2, and judge what it says of each store as doctor does."""
    question = [["host"], "/var/tmp/one", LOCATION, stores, "none", "", []]
    word = base64.b64encode(json.dumps(question).encode()).decode()
    answer = json.loads(site.hosts[1].script(f"{EXAMINE} {word}", user=ONEADMIN).out)
    for store in stores:
        answer["stores"][store]["same"] = True
    found = diagnosis_machines.of_machines(
        {"h2": answer}, diagnosis.Site("fe"), diagnosis.Cloud(), ("none", "none")
    )
    return {store: [item for item in found if f"store {store}:" in item.what] for store in stores}


@pytest.mark.fault(18, "doctor warns of an NFS mount that remembers what it saw absent")
def test_doctor_reads_the_real_mount(nfs_site: NfsSite) -> None:
    h2 = nfs_site.hosts[1]
    h2.mount(nfs_site.fe.address, "/mnt/positive", "vers=4.2,hard,lookupcache=positive,nosharecache")
    found = examined(nfs_site, STORE, "/mnt/positive")
    h2.run(["umount", "/mnt/positive"])
    assert found["/mnt/positive"] == []
    assert [(item.severity, "lookupcache=positive" in item.what) for item in found[STORE]] == [
        (diagnosis.WARNING, True)
    ]


@pytest.mark.fault(9, "what lies below the mount point of an NFS store that is not mounted is no image")
def test_a_store_that_is_not_mounted_is_no_store(site: Site) -> None:
    h2, fe = site.hosts[1], site.fe
    image = site.image()
    if hasattr(image.access, "marker"):
        word = "0123456789abcdef" * 2
        fe.python(
            "import sys; from semishared.store.dir import marker; marker.write(*sys.argv[1:])",
            STORE,
            word,
            user=ONEADMIN,
        )
        image = image._replace(access=image.access._replace(marker=word))
    h2.stage(image)
    h2.run(["umount", "-l", STORE])
    try:
        # What somebody has put there when it was not mounted either.
        h2.script(
            f"mkdir -p {STORE}; head -c {SIZE} /dev/zero >{image.source}; chown -R {ONEADMIN[0]} {STORE}"
        )
        disk = h2.disk(51)
        with pytest.raises(SemisharedError, match="h2.*marker"):
            h2.stage(image)
        with pytest.raises(SemisharedError, match="h2.*marker"):
            h2.on(s.PrepareVm(51, disk.vm_dir), s.LinkInPlace(disk, image, False, True))
        assert h2.run(["ls", "-A", STORE]).out.split() == [image.source.rpartition("/")[2]]
    finally:
        h2.run(["rm", "-rf", "--one-file-system", STORE], check=False)
        site.mount(h2)
    h2.stage(image)
