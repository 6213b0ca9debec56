# SPDX-License-Identifier: Apache-2.0
"""Images of a datastore whose driver was changed to ours: with the stock drivers' snapshots they are refused,
by each action.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Iterator

import pytest

from lab.oned import ActionFailed
from semishared.cli import doctor
from semishared.opennebula.xml import Image
from semishared.plan.care import diagnosis
from tools.oned_site import HERE, ROOT, STORE, ActionSite
from tools.world import qemu_io

PAGE = ROOT / "docs/how-to/stock-images.md"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ActionSite]:
    with ActionSite.up(tmp_path) as up:
        yield up


def shell(script: str, **env: str) -> None:
    subprocess.run(
        ["bash", "-ec", script],
        check=True,
        env={"PATH": os.environ["PATH"], **env},
        stdout=subprocess.DEVNULL,
    )


def attach(source: Path, disk: Path) -> None:
    """Do what tm/qcow2/ln of OpenNebula 7.4 does on the host."""
    disk.parent.mkdir(parents=True, exist_ok=True)
    shell(
        """
        SNAP_DIR=$SRC_PATH.snap; SNAP_NAME=$(basename $SRC_PATH).snap
        mkdir -p "${SNAP_DIR}"
        if [ ! -L "${SNAP_DIR}/${SNAP_NAME}" ]; then ln -s . "${SNAP_DIR}/${SNAP_NAME}"; fi
        SNAP="$(ls ${SNAP_DIR} | grep '^[[:digit:]]*$' | sort -n | tail -n 1 || :)"
        if [ -z "${SNAP}" ]; then SNAP=0; ln -sf "$SRC_PATH" "$SNAP_DIR/0"; fi
        rm -f "${DST_PATH}"; ln -sf "$SNAP_DIR/$SNAP" "$DST_PATH"; rm -rf "${DST_PATH}.snap"
        """,
        SRC_PATH=str(source),
        DST_PATH=str(disk),
    )


def snapshot(source: Path, disk: Path, number: int) -> None:
    """Do what tm/qcow2/snap_create does for a persistent qcow2 image."""
    shell(
        """
        SNAP_DIR=$SRC_PATH.snap; SNAP_PATH=$SNAP_DIR/$((SNAP_ID+1))
        PREVIOUS_SNAP=$(readlink $DISK); cd "${SNAP_DIR}"
        qemu-img create -q -f qcow2 -o backing_fmt=qcow2 -b "${PREVIOUS_SNAP}" "${SNAP_PATH}"
        ln -sf $SNAP_PATH $DISK
        """,
        SRC_PATH=str(source),
        DISK=str(disk),
        SNAP_ID=str(number),
    )


def stock(site: ActionSite, name: str = "stock", snapshots: int = 2) -> int:
    """Return a persistent image as the stock qcow2 driver leaves it: in snapshot 0 0xa1, in 1 0xb1, now 0xc1
    is at 1 MiB.
    """
    image = site.image(name, "qcow2", persistent=True)
    source, disk = site.source(image), site.top / "stock-host" / name
    subprocess.run(["rm", "-r", str(site.store / ".semishared" / source.name)], check=True)
    attach(source, disk)
    for number in range(snapshots):
        snapshot(source, disk, number)
        qemu_io(disk, "qcow2", f"write -P {0xB1 + 0x10 * number} 1M 64k")
    disk.unlink()
    site.oned.image(image).snapshots.update(
        NEXT_SNAPSHOT=str(snapshots),
        SNAPSHOT=[{"ID": str(n), "SIZE": "8", "DATE": "1", "PARENT": "-1"} for n in range(snapshots)],
    )
    return image


def content(site: ActionSite) -> dict[str, bytes | str]:
    return {
        str(path.relative_to(site.store)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in site.store.rglob("*")
        if path.is_symlink() or (path.is_file() and ".semishared" not in path.parts)
    }


@pytest.mark.fault(10, "a guest is never given the oldest layer of an image with stock snapshots")
@pytest.mark.parametrize("action", ["ln", "clone", "clone shared", "clone copy"])
def test_disk_of_a_layered_image_is_refused(site: ActionSite, action: str) -> None:
    image = stock(site)
    if action != "ln":
        site.oned.image_persistent(image, False)
        attributes = {
            "clone shared": {"SEMISHARED_PLACE": "shared"},
            "clone copy": {"SEMISHARED_LOCAL": "copy"},
        }.get(action, {})
        site.oned.image_update(image, dict(attributes))
    vm = site.vm(image)
    before = content(site)
    said = site.refused("SS086", site.make, action.split()[0], vm)
    assert str(site.source(image)) in said and "docs/how-to/stock-images.md" in said
    assert content(site) == before and not os.path.lexists(site.disk(vm))


@pytest.mark.fault(10, "no image action touches or copies the layers of a stock driver")
def test_image_actions_on_a_layered_image_are_refused(site: ActionSite) -> None:
    image = stock(site)
    before = content(site)
    for action in ("snap_revert", "snap_delete", "snap_flatten"):
        site.refused("SS086", site.oned.image_snapshot, image, action, 0)
    site.refused("SS086", site.oned.image_clone, image, "copy")
    held = site.oned.image(image)
    site.refused("SS086", site.oned._ds_action, site.oned.datastore(STORE), "export", str(image), held)
    assert content(site) == before
    site.oned.image_delete(image)
    assert content(site) == {}


def test_stock_images_of_one_file_work(site: ActionSite) -> None:
    """Attached once under the stock driver, without snapshots: what that left beside it means nothing, and no
    snapshot of ours.
    """
    image = stock(site, snapshots=0)
    source = site.source(image)
    assert sorted(os.listdir(f"{source}.snap")) == sorted(["0", f"{source.name}.snap"])
    vm = site.vm(image)
    disk = site.make("ln", vm)
    site.tm("snap_create", f"{HERE}:{disk}", 0, vm, STORE)
    assert os.listdir(f"{source}.snap") == ["0"] and not os.path.islink(f"{source}.snap/0")
    qemu_io(disk, "qcow2", "write -P 0xee 1M 64k")
    site.tm("snap_revert", f"{HERE}:{disk}", 0, vm, STORE)
    qemu_io(disk, "qcow2", "read -P 0xa1 1M 64k")
    raw = site.image("raw", persistent=True)
    os.mkdir(f"{site.source(raw)}.snap")
    subprocess.run(["cp", str(site.source(raw)), f"{site.source(raw)}.snap/0"], check=True)
    site.make("ln", site.vm(raw))


def test_content_of_a_raw_snapshot_is_no_sign_of_layers(site: ActionSite) -> None:
    """What a guest writes into its raw disk may look like a layer: no reason to refuse the image."""
    image = site.image(persistent=True)
    source = site.source(image)
    shell(
        f"qemu-img create -q -f qcow2 {site.top}/b 8M; qemu-img create -q -f qcow2 -b "
        f"{site.top}/b -F qcow2 {site.top}/evil"
    )
    vm = site.vm(image)
    disk = site.make("ln", vm)
    subprocess.run(["dd", f"if={site.top}/evil", f"of={disk}", "conv=notrunc", "status=none"], check=True)
    site.tm("snap_create", f"{HERE}:{disk}", 0, vm, STORE)
    site.tm("mvds", f"{HERE}:{disk}", source, vm, STORE)
    site.make("ln", vm)


def test_after_a_deleted_snapshot_doubt_is_refused(site: ActionSite) -> None:
    """The stock driver may have left one standalone layer that is not SOURCE."""
    image = stock(site, snapshots=1)
    layers = Path(f"{site.source(image)}.snap")
    subprocess.run(
        ["qemu-img", "rebase", "-f", "qcow2", "-b", "", str(layers / "1")],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (layers / "0").unlink()
    site.refused("SS086", site.make, "ln", site.vm(image))


def test_the_page_takes_one_over_with_its_snapshots(site: ActionSite) -> None:
    image = stock(site, snapshots=3)
    source = site.source(image)
    # Snapshot 1 was deleted while the guest ran: 2 was committed into it.
    layers = f"{source}.snap"
    subprocess.run(["qemu-img", "commit", "-q", "-f", "qcow2", f"{layers}/2"], check=True)
    subprocess.run(
        ["qemu-img", "rebase", "-u", "-f", "qcow2", "-F", "qcow2", "-b", f"{layers}/1", f"{layers}/3"],
        check=True,
    )
    Path(f"{layers}/2.current").write_text(f"{layers}/1\n")
    os.unlink(f"{layers}/2")
    first = re.findall(r"(?ms)^```sh\n(.*?)^```", PAGE.read_text())[0]
    script = re.sub(r"(?m)^SOURCE=.*$", f"SOURCE={source}", first)
    assert script != first
    shell(script)
    vm = site.vm(image)
    disk = site.make("ln", vm)
    qemu_io(disk, "qcow2", "read -P 0xd1 1M 64k")
    site.tm("mvds", f"{HERE}:{disk}", source, vm, STORE)
    site.oned._release(site.oned.vm(vm), site.oned.vm(vm).disks[0])
    for number, pattern in ((2, 0xC1), (0, 0xA1)):
        site.oned.image_snapshot(image, "snap_revert", number)
        qemu_io(source, "qcow2", f"read -P {pattern} 1M 64k")
    assert sorted(os.listdir(source.parent)) == sorted(
        [".semishared", source.name, f"{source.name}.old", f"{source.name}.snap"]
    )


def test_doctor_lists_them(site: ActionSite) -> None:
    image = stock(site)
    site.image("other", "qcow2", persistent=True)
    images = [Image.parse(held.to_xml()) for held in site.oned.images.values()]
    (found,) = diagnosis.of_stock_images(doctor.stock_images(diagnosis.Cloud(images=images)), "fe")
    assert (
        f"image {image} (stock) has snapshots of OpenNebula's own drivers" in found.what
        and found.severity == diagnosis.BROKEN
    )


def test_the_old_way_of_failing_is_known(site: ActionSite) -> None:
    """What is refused is refused before anything says that a session began."""
    image = stock(site)
    with pytest.raises(ActionFailed):
        site.make("ln", site.vm(image))
    assert not (site.store / ".semishared" / site.source(image).name).exists()
