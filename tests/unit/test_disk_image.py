# SPDX-License-Identifier: Apache-2.0
"""What oned is asked of the images of a VM, before another machine's word of them is believed: each object once."""

from __future__ import annotations

from typing import Any, List, Tuple

from semishared.model.exchange import AskOned, Exchange, drive
from semishared.opennebula.xml import Datastore, Image, Vm
from semishared.plan import disk_image

DISK = "<DISK><DISK_ID>{0}</DISK_ID><IMAGE_ID>{1}</IMAGE_ID><TM_MAD>semishared</TM_MAD></DISK>"


def test_each_image_and_datastore_of_a_vm_is_asked_for_once() -> None:
    disks = "".join(DISK.format(number, image) for number, image in enumerate((7, 8, 7, 9)))
    vm = Vm.parse(f"<VM><ID>5</ID><TEMPLATE>{disks}<DISK><DISK_ID>4</DISK_ID><TYPE>swap</TYPE></DISK></TEMPLATE></VM>")
    asked: List[Tuple[str, int]] = []

    def answer(wanted: Exchange) -> Any:
        assert isinstance(wanted, AskOned)
        asked.append((wanted.what, wanted.id))
        if wanted.what == "datastore":
            return Datastore.parse(f"<DATASTORE><ID>{wanted.id}</ID><BASE_PATH>/d/{wanted.id}</BASE_PATH><TEMPLATE/></DATASTORE>")
        store = 101 if wanted.id == 9 else 100
        inside = f"<SOURCE>/d/{store}/{wanted.id}</SOURCE><FORMAT>raw</FORMAT><DATASTORE_ID>{store}</DATASTORE_ID>"
        return Image.parse(f"<IMAGE><ID>{wanted.id}</ID>{inside}<TEMPLATE/></IMAGE>")

    found = drive(disk_image.of_vm(vm), answer)
    assert {disk: image.id for disk, image in found.items()} == {0: 7, 1: 8, 2: 7, 3: 9}
    assert asked == [("image", 7), ("datastore", 100), ("image", 8), ("image", 9), ("datastore", 101)]
