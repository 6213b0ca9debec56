# SPDX-License-Identifier: Apache-2.0
"""What oned is asked of the images of a VM, before another machine's word of them is believed: each object
once.
"""

from __future__ import annotations

from typing import Any, List, Tuple

import pytest

from semishared.errors import ForeignImage
from semishared.model.disk.acquired import Given
from semishared.model.exchange import AskOned, Exchange, drive
from semishared.opennebula.xml import Datastore, Image, Vm
from semishared.plan.image import disk_image

DISK = "<DISK><DISK_ID>{0}</DISK_ID><IMAGE_ID>{1}</IMAGE_ID><TM_MAD>semishared</TM_MAD></DISK>"


def test_each_image_and_datastore_of_a_vm_is_asked_for_once() -> None:
    disks = "".join(DISK.format(number, image) for number, image in enumerate((7, 8, 7, 9)))
    disks += "<DISK><DISK_ID>4</DISK_ID><TYPE>swap</TYPE><IMAGE_ID>7</IMAGE_ID></DISK>"
    vm = Vm.parse(f"<VM><ID>5</ID><TEMPLATE>{disks}</TEMPLATE></VM>")
    asked: List[Tuple[str, int]] = []

    def answer(wanted: Exchange) -> Any:
        assert isinstance(wanted, AskOned)
        asked.append((wanted.what, wanted.id))
        if wanted.what == "datastore":
            return Datastore.parse(
                f"<DATASTORE><ID>{wanted.id}</ID><BASE_PATH>/d/{wanted.id}</BASE_PATH><TEMPLATE/></DATASTORE>"
            )
        store = 101 if wanted.id == 9 else 100
        inside = (
            f"<SOURCE>/d/{store}/{wanted.id}</SOURCE><FORMAT>raw</FORMAT><DATASTORE_ID>{store}</DATASTORE_ID>"
        )
        return Image.parse(f"<IMAGE><ID>{wanted.id}</ID>{inside}<TEMPLATE/></IMAGE>")

    found = drive(disk_image.of_vm(vm), answer)
    assert {disk: given.image.id for disk, given in found.items() if given.image} == {0: 7, 1: 8, 2: 7, 3: 9}
    assert found[4] == Given(None), "a volatile disk is of no image"
    assert asked == [("image", 7), ("datastore", 100), ("image", 8), ("image", 9), ("datastore", 101)]


RBD = "<DISK_TYPE>RBD</DISK_TYPE><CEPH_USER>libvirt</CEPH_USER><CEPH_SECRET>00000000-0000-4000-8000-0000000000cc</CEPH_SECRET>"  # noqa: E501


@pytest.mark.fault(
    25,
    "the image that a disk was cloned from is not changed as if it were the disk, nor a clone in "
    "place of the image",
)
@pytest.mark.parametrize(
    ("is_clone", "source", "other"),
    [("YES", "one/one-7-5-0", "one/one-7"), ("NO", "one/one-7", "one/one-7-5-0")],
)
def test_whether_a_disk_is_the_image_or_its_clone_is_oned_s_word(
    is_clone: str, source: str, other: str
) -> None:
    vm = Vm.parse(
        f"<VM><ID>5</ID><TEMPLATE>{DISK.format(0, 7).replace('</DISK>', f'<CLONE>{is_clone}</CLONE></DISK>')}</TEMPLATE></VM>"  # noqa: E501
    )

    def answer(wanted: Exchange) -> Any:
        assert isinstance(wanted, AskOned)
        if wanted.what == "datastore":
            return Datastore.parse(f"<DATASTORE><ID>100</ID><TEMPLATE>{RBD}</TEMPLATE></DATASTORE>")
        return Image.parse(
            "<IMAGE><ID>7</ID><SOURCE>one/one-7</SOURCE><FORMAT>raw</FORMAT><DATASTORE_ID>100</DATASTORE_ID></IMAGE>"
        )

    said = drive(disk_image.of_disk(vm, vm.disk(0)), answer)
    assert drive(disk_image.confirmed(vm, 0, said._replace(source=source).to_data()), answer).source == source
    with pytest.raises(ForeignImage, match=f"said to be of '{other}'"):
        drive(disk_image.confirmed(vm, 0, said._replace(source=other).to_data()), answer)
