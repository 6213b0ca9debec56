# SPDX-License-Identifier: Apache-2.0
"""Update of a datastore in Sunstone, as FireEdge sends it (tests/neighbours/sunstone.py), to a real oned.

What is done then is right, or is refused by one line; `doctor --fix` puts back what was lost.
"""

from __future__ import annotations

from typing import Callable

import pytest

from lab.cloud import DATASTORES, RBD_STORE, STORE
from lab.oned import ActionFailed, Lcm
from lab.oned.states import Img
from lab.oned.template import Template
from neighbours import sunstone
from real.conftest import SEMISHARED, RealCloud
from real.injected import DATA, Disks, nothing_to_remove

VERSIONS = sorted(sunstone.VERSIONS)
REFUSED = "SS089 .*as by Update in Sunstone.*semishared doctor --fix"


def said(cloud: RealCloud, number: int) -> Template:
    """Return a datastore's template."""
    return cloud.oned.datastore(number).template


def click(cloud: RealCloud, version: str, number: int) -> Template:
    """Click Update and Finish; return the template from before."""
    store = cloud.oned.datastore(number)
    sent = sunstone.update(version, {**store.template, "NAME": store.name})
    assert sent is not None
    cloud.oned.datastore_replace(number, dict(sent))
    assert "DISK_TYPE" not in said(cloud, number), "oned has put it back by itself"
    return store.template


def fix(cloud: RealCloud, number: int, before: Template) -> None:
    """Run `doctor --fix`, and see that all is back."""
    done = cloud.lab.fe.run([SEMISHARED, "doctor", "--fix", "--yes"], check=False, timeout=300)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    assert {name: said(cloud, number).get(name) for name in before} == before


def is_done(call: Callable[[], object], version: str) -> bool:
    """Tell whether something was done; if not, it is refused as it has to be, and after 7.2's Update only."""
    try:
        call()
    except ActionFailed as failed:
        assert version == "7.2.0", failed
        with pytest.raises(ActionFailed, match=REFUSED):
            raise
        return False
    return True


@pytest.mark.parametrize("version", VERSIONS)
def test_a_mounted_image_datastore(cloud: RealCloud, os_image: int, version: str) -> None:
    disks, other = (
        Disks(cloud, os_image, f"clicked-{version}").started(),
        Disks(cloud, os_image, f"new-{version}"),
    )
    before = click(cloud, version, STORE)
    try:
        assert "SEMISHARED_STORE" in before
        is_whole = version != "7.2.0"
        name = f"uploaded-{version}"
        assert is_done(lambda: cloud.data_image(name, DATA), version) == is_whole
        assert is_done(other.deploy, version) == is_whole
        is_ended = is_done(lambda: cloud.oned.vm_terminate(disks.vm, hard=True), version)
    finally:
        fix(cloud, STORE, before)
    if not is_ended:
        assert disks.at == ("ACTIVE", Lcm.EPILOG_FAILURE)
        cloud.oned.vm_recover(disks.vm, "retry")
    if not is_whole:
        cloud.oned.vm_recover(other.vm, "retry")
    assert other.at == ("ACTIVE", Lcm.RUNNING)
    other.write()
    other.gone()
    disks.gone()
    # What is refused is refused by `stat`, before there is an image.
    uploaded = [image for image in cloud.oned.images.values() if image.name == name]
    assert [image.state for image in uploaded] == ([Img.READY] if is_whole else [])
    for image in uploaded:
        cloud.oned.image_delete(image.id)
    nothing_to_remove(cloud)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_system_datastore(cloud: RealCloud, os_image: int, version: str) -> None:
    cloud.lab.fe.run([SEMISHARED, "publish"], timeout=300)  # as its timer does
    before = click(cloud, version, 101)
    disks = Disks(cloud, os_image, f"system-{version}")
    try:
        # Nothing of what places a VM is lost: all of it works.
        disks.started()
        cloud.oned.vm_migrate(disks.vm, "h2")
        disks.check()
        disks.gone()
    finally:
        fix(cloud, 101, before)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_datastore_on_ceph_is_never_a_mounted_one(cloud: RealCloud, version: str) -> None:
    """Of one with CEPH_HOST the form cannot be finished: without it libvirt asks ceph.conf."""
    whole = said(cloud, RBD_STORE)
    assert sunstone.update(version, {**whole, "NAME": "semi_rbd"}) is None
    name = f"rbd-{version}"
    cloud.oned.datastore_replace(
        RBD_STORE, {key: value for key, value in whole.items() if key != "CEPH_HOST"}
    )
    image = cloud.data_image(f"{name}-before", DATA, store=RBD_STORE)  # its words are noted
    files = cloud.files(cloud.lab.fe, f"{DATASTORES}/{RBD_STORE}")
    before = click(cloud, version, RBD_STORE)
    try:
        is_whole = version != "7.2.0"
        assert is_done(lambda: cloud.data_image(name, DATA, store=RBD_STORE), version) == is_whole
        assert cloud.files(cloud.lab.fe, f"{DATASTORES}/{RBD_STORE}") == files
    finally:
        fix(cloud, RBD_STORE, before)
        cloud.oned.datastore_replace(RBD_STORE, whole)
    uploaded = [one for one in cloud.oned.images.values() if one.name == name]
    assert [one.state for one in uploaded] == ([Img.READY] if is_whole else [])
    for one in uploaded:
        assert cloud.lab.ceph.read(one.source.partition("/")[2], len(DATA)) == DATA
    for number in (image, *(one.id for one in uploaded)):
        cloud.oned.image_delete(number)
    assert cloud.left_in_pool() == []
