# SPDX-License-Identifier: Apache-2.0
"""A mounted store with BRIDGE_LIST: the front-end has no mount of it, its hosts h1 and h2 change its images,
each spoken to by ssh.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shlex
from typing import Any, Dict, Iterator
from xml.etree import ElementTree

import pytest

from lab.cloud import DATASTORES, STORE, SYSTEM, Cloud
from lab.guest import content
from lab.oned import IMAGE_DS, ActionFailed

PATH = f"{DATASTORES}/{STORE}"
DATA = content("base", 0, 64)
BRIDGES = "h1 h2"


@pytest.fixture(scope="module")
def bridged() -> Iterator[Cloud]:
    """Put up a cloud whose front-end lets go of the store's mount; its bridge marks it."""
    with Cloud.up(hosts=2) as cloud:
        cloud.lab.fe.wait_for(["umount", PATH], 30, user="root")
        cloud.lab.node("h1").path(f"{PATH}/.semishared/store").unlink()
        store = cloud.oned.datastores[STORE]
        del store.template["SEMISHARED_STORE"]
        more: Dict[str, Any] = {"BRIDGE_LIST": BRIDGES, "STAGING_DIR": "/var/tmp/staging"}
        cloud.oned.datastore_update(STORE, more)
        said = semishared(cloud, "setup", "--apply", "--system", f"semi_sys_{SYSTEM}")
        assert "The store is marked" in said and store.template["SEMISHARED_STORE"]
        yield cloud


def semishared(cloud: Cloud, *words: str, code: int = 0) -> str:
    """Run the operator's command on the front-end."""
    argv = ["/var/lib/one/remotes/lib/semishared/semishared", *words]
    done = cloud.lab.fe.run(argv, check=False, timeout=120)
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout.decode()


def below_the_mount_point(cloud: Cloud) -> bytes:
    return cloud.lab.fe.run(["find", PATH, "-mindepth", "1"]).stdout


def exported(cloud: Cloud, image: int) -> Dict[str, str]:
    """Return what `export` says of an image, as a marketplace's driver has it."""
    one, store = cloud.oned.image(image), cloud.oned.datastores[STORE]
    inside = "".join(f"<{name}>{value}</{name}>" for name, value in store.template.items())
    xml = (
        f"<DS_DRIVER_ACTION_DATA><IMAGE><ID>{image}</ID><SOURCE>{one.source}</SOURCE><SIZE>{one.size}</SIZE>"
    )
    xml += f"<FORMAT>{one.format}</FORMAT></IMAGE><DATASTORE><ID>{STORE}</ID><BASE_PATH>{PATH}</BASE_PATH>"
    xml += f"<TEMPLATE>{inside}</TEMPLATE></DATASTORE></DS_DRIVER_ACTION_DATA>"
    argv = ["/var/lib/one/remotes/datastore/semishared/export", str(image)]
    done = cloud.lab.fe.run(argv, input=base64.b64encode(xml.encode()))
    return {child.tag: str(child.text) for child in ElementTree.fromstring(done.stdout)}


def test_another_machine_makes_copies_exports_and_removes_the_images(bridged: Cloud) -> None:
    cloud, h2 = bridged, bridged.lab.node("h2")
    for format in ("raw", "qcow2"):
        image = cloud.data_image(f"one-{format}", DATA, format=format)
        copy = cloud.oned.image_clone(image, f"copy-{format}")
        empty = cloud.oned.image_create(STORE, f"empty-{format}", size=16, type="DATABLOCK", format=format)
        sources = [cloud.source(number) for number in (image, copy, empty)]
        for source, data in zip(sources, (DATA, DATA, bytes(len(DATA)))):
            assert cloud.read(source, format, len(DATA), node=h2) == data
        # For such a URL datastore_mad/remotes/downloader.sh runs `ssh HOST "cat 'PATH'"`.
        found = exported(cloud, image)
        host, _, path = found["IMPORT_SOURCE"].removeprefix("ssh://").partition(":")
        assert host in BRIDGES.split() and path == sources[0]
        fetched = cloud.lab.fe.run(["ssh", host, f"cat {shlex.quote(path)}"]).stdout
        assert hashlib.md5(fetched).hexdigest() == found["MD5"] and found["FORMAT"] == format
        for number in (image, copy, empty):
            cloud.oned.image_delete(number)
        assert [source for source in sources if h2.path(source).exists()] == []
    cloud.oned.datastore_monitor(STORE)
    (used,) = [line for line in cloud.oned.calls[-1].stdout.split() if line.startswith("TOTAL_MB=")]
    assert int(used.partition("=")[2]) > 0
    assert below_the_mount_point(cloud) == b""


def test_a_vm_lives_from_it(bridged: Cloud) -> None:
    cloud = bridged
    kept = cloud.data_image("kept", DATA, persistent=True)
    vm = cloud.deploy(
        "bridged", [{"IMAGE_ID": str(cloud.os_image())}, {"IMAGE_ID": str(kept)}], context=False
    )
    guest = cloud.guest(vm)
    guest.write("vdb", "bridged", 0, 64)
    saved = cloud.oned.disk_saveas(vm, 1, "saved")
    cloud.oned.vm_terminate(vm)
    source = cloud.source(saved)
    assert cloud.lab.node("h1").path(source).exists() and below_the_mount_point(cloud) == b""
    assert cloud.read(cloud.source(kept), "raw", 64 << 10, node=cloud.lab.node("h2")) == content(
        "bridged", 0, 64
    )


def test_a_clone_from_it_is_made_where_both_stores_are(bridged: Cloud) -> None:
    """OpenNebula 7.4 sends SOURCE_BRIDGE_LIST then; under 6.10 the front-end says that PATH is not there."""
    cloud, other = bridged, 120
    path = f"{DATASTORES}/{other}"
    shared = cloud.lab.node("h1").path(PATH)
    (shared / "other").mkdir()
    os.chown(shared / "other", cloud.lab.uid, cloud.lab.gid)
    for node in cloud.lab.hosts:
        node.run(["mkdir", "-p", path])
        node.run(["mount", "--bind", f"{PATH}/other", path], user="root")
    cloud.lab.fe.run(["mkdir", "-p", path])
    cloud.oned.datastore_create(IMAGE_DS.replace("semi_img", "other"), other)
    image = cloud.data_image("cloned", DATA)
    with pytest.raises(ActionFailed, match=f"nothing would tell whether {path} is mounted there"):
        cloud.oned.image_clone(image, "unmarked", other)
    more: Dict[str, Any] = {"BRIDGE_LIST": "h2", "STAGING_DIR": "/var/tmp/staging"}
    cloud.oned.datastore_update(other, more)
    semishared(cloud, "setup", "--apply", "--image", "other", "--system", f"semi_sys_{SYSTEM}", "--is-store")
    copy = cloud.oned.image_clone(image, "copy", other)
    assert cloud.read(cloud.source(copy), "raw", len(DATA), node=cloud.lab.node("h1")) == DATA
    assert cloud.lab.fe.run(["find", path, "-mindepth", "1"]).stdout == b""
    cloud.oned.image_delete(copy)
    del cloud.oned.datastores[other]  # its mounts go with h1 and h2, which are off in the next test


@pytest.mark.fault(62, "a bridge that does not answer is passed over for the next one")
def test_a_bridge_that_is_off_is_passed_over(bridged: Cloud) -> None:
    cloud, h1, h2 = bridged, bridged.lab.node("h1"), bridged.lab.node("h2")
    image = cloud.data_image("before", DATA)
    h1.kill()
    try:
        made = [cloud.data_image(f"without-{number}", DATA) for number in range(2)]
        said = [call.stderr for call in cloud.oned.calls if call.action == "cp"][-2:]
        passed = [text for text in said if f"bridge h1 of datastore {STORE} is passed over: " in text]
        assert len(passed) == 1, "one of two numbers is the first bridge's"
        for number in made:
            assert cloud.read(cloud.source(number), "raw", len(DATA), node=h2) == DATA
        assert exported(cloud, image)["IMPORT_SOURCE"].startswith("ssh://h2:")
        for number in (image, *made):
            cloud.oned.image_delete(number)
        h2.kill()
        try:
            with pytest.raises(ActionFailed, match=f"no bridge of datastore {STORE} answers, of h"):
                cloud.data_image("nowhere", DATA)
        finally:
            h2.start()
    finally:
        h1.start()
    assert below_the_mount_point(cloud) == b""


@pytest.mark.fault(62, "gc looks into such a store on a bridge")
def test_gc_looks_into_it_on_a_bridge(bridged: Cloud) -> None:
    cloud = bridged
    left = cloud.lab.node("h1").path(f"{PATH}/.staged-{'a' * 32}-1-1-left")
    left.write_bytes(b"left")
    found = json.loads(semishared(cloud, "gc", "--dry-run", "--now", "--json", code=1))
    assert found["errors"] == []
    assert [row["machine"] for row in found["findings"] if row["path"].startswith(PATH)] == ["h1"]
    semishared(cloud, "gc", "--now", "--yes")
    assert not left.exists()
