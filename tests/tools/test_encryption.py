# SPDX-License-Identifier: Apache-2.0
"""Encrypted disks (LUKS_SECRET): what lies anywhere is ciphertext, and QEMU opens it with its secret, or it
is refused.

The executables of this checkout under a simulated oned, real LUKS images, and the XML that libvirt gets.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path
from typing import Any, Iterator
from xml.etree import ElementTree

import pytest

from lab.luks import container, secret
from lab.oned import ActionFailed
from lab.oned.states import Lcm
from tools.oned_site import HERE, STORE, ActionSite
from tools.test_datastore import Store
from tools.test_vmm import Host
from tools.world import MiB

SECRET = "8f2c1a4e-5d0b-4b3e-9a57-0c6f3e2d1b40"
PASSPHRASE = secret(b"passphrase")
NUMBERS: dict[str, str] = {"LUKS_SECRET": SECRET}


def luks(path: Path, size: int = 4 * MiB) -> Path:
    """Make a LUKS image in which the guest sees a pattern at 1 MiB."""
    container(path, size, b"passphrase")
    opened(path, "write -P 0xa7 1M 64k")
    return path


def opened(path: object, command: str) -> None:
    """Do what a guest would, through the decryption of QEMU."""
    argv = [
        "qemu-io",
        *PASSPHRASE,
        "--image-opts",
        "-c",
        command,
        f"driver=luks,key-secret=key,file.driver=file,file.filename={path}",
    ]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    said = done.stdout.decode()
    assert done.returncode == 0 and "verification failed" not in said, said


@pytest.fixture()
def site(tmp_path: Path) -> Iterator[ActionSite]:
    with ActionSite.up(tmp_path) as up:
        yield up


def encrypted(site: ActionSite, *, persistent: bool = False, **attributes: str) -> int:
    path = luks(site.top / "luks.img")
    return site.oned.image_create(
        STORE, "luks", path=str(path), persistent=persistent, attributes={**NUMBERS, **attributes}
    )


def at(site: ActionSite, vm: int) -> str:
    return f"{HERE}:{site.disk(vm)}"


@pytest.mark.fault(11, "no overlay is laid over an encrypted image: QEMU would not open it")
@pytest.mark.parametrize("place", [{}, {"SEMISHARED_PLACE": "shared"}], ids=["overlay", "store-clone"])
def test_overlay_over_an_encrypted_image_is_refused(site: ActionSite, place: dict[str, Any]) -> None:
    vm = site.vm(encrypted(site, **place))
    line = site.refused("SS074", site.make, "clone", vm)
    assert "SEMISHARED_LOCAL = copy" in line
    assert not os.path.lexists(site.disk(vm))


def test_secret_in_the_vms_own_template_counts_as_well(site: ActionSite) -> None:
    vm = site.vm(site.image())
    site.oned.vm(vm).disks[0]["LUKS_SECRET"] = SECRET
    site.refused("SS074", site.make, "clone", vm)


@pytest.mark.parametrize(
    "text", ["x", "8f2c1a4e-5d0b-4b3e-9a57-0c6f3e2d1b40'/><source file='/etc/shadow'/>", "../" + SECRET]
)
@pytest.mark.parametrize("action", ["clone", "ln"])
def test_secret_that_is_no_uuid_is_refused(site: ActionSite, action: str, text: str) -> None:
    vm = site.vm(site.image(persistent=action == "ln"))
    site.oned.vm(vm).disks[0]["LUKS_SECRET"] = text
    assert "disk 0: LUKS_SECRET" in site.refused("SS002", site.make, action, vm)


def test_copy_and_disk_in_place_hold_what_the_secret_opens(site: ActionSite) -> None:
    vm = site.vm(encrypted(site, SEMISHARED_LOCAL="copy"))
    opened(site.make("clone", vm), "read -P 0xa7 1M 64k")
    record = json.loads((site.disk(vm).parent / ".semishared/disk.0.json").read_text())
    assert (record["how"], record["format"]) == ("copy", "raw")


def test_persistent_disk_is_saved_and_kept_as_ciphertext_while_it_is_off(site: ActionSite) -> None:
    image = encrypted(site, persistent=True)
    vm = site.vm(image)
    opened(site.make("ln", vm), "read -P 0xa7 1M 64k")
    saved = site.store / "saved"
    site.tm("cpds", at(site, vm), saved, -1, vm, STORE)
    assert saved.read_bytes() == site.source(image).read_bytes()
    opened(saved, "read -P 0xa7 1M 64k")
    site.tm("snap_create", at(site, vm), 0, vm, STORE)
    opened(f"{site.source(image)}.snap/0", "read -P 0xa7 1M 64k")
    opened(site.source(image), "write -P 0x11 1M 64k")
    site.tm("snap_revert", at(site, vm), 0, vm, STORE)
    opened(site.source(image), "read -P 0xa7 1M 64k")


@pytest.mark.fault(11, "a snapshot of an encrypted copy does not leave the guest with an overlay")
def test_snapshot_that_would_put_an_overlay_over_ciphertext_is_refused(site: ActionSite) -> None:
    vm = site.vm(encrypted(site, SEMISHARED_LOCAL="copy"))
    path = site.make("clone", vm)
    site.refused("SS074", site.tm, "snap_create", at(site, vm), 0, vm, STORE)
    assert os.path.realpath(path).endswith("/disk.0.snap/0")
    opened(path, "read -P 0xa7 1M 64k")


@pytest.mark.parametrize(("action", "words"), [("snap_create_live", (0,)), ("cpds", ("{store}/saved", -1))])
def test_what_a_running_qemu_would_copy_decrypted_is_refused(
    site: ActionSite, action: str, words: tuple[object, ...]
) -> None:
    vm = site.vm(encrypted(site, persistent=True))
    site.make("ln", vm)
    site.oned.vm(vm).lcm = Lcm.SAVEAS if action == "cpds" else Lcm.RUNNING
    with pytest.raises(ActionFailed) as caught:
        site.tm(action, at(site, vm), *(str(word).format(store=site.store) for word in words), vm, STORE)
    assert not (site.store / "saved").exists()
    assert "SS074" in str(caught.value)


def test_volatile_disk_with_a_secret_is_refused(site: ActionSite) -> None:
    vm = site.oned.vm_create(
        {"NAME": "v", "DISK": [{"TYPE": "fs", "SIZE": "4", "FORMAT": "raw", "LUKS_SECRET": SECRET}]}
    )
    site.refused("SS074", site.tm, "mkimage", 4, "raw", at(site, vm), vm, 101)


# -- uploads


@pytest.fixture()
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.mark.fault(
    11, "an encrypted image is stored raw, as libvirt wants it, also where others become qcow2"
)
def test_encrypted_upload_stays_raw(store: Store) -> None:
    store.template["DRIVER"] = "qcow2"
    path = luks(store.uploads / "luks")
    source, format = store.cp(path, SIZE=int(store.ok("stat", PATH=path)), attributes=NUMBERS)
    assert (source.read_bytes(), format) == (path.read_bytes(), "raw")


@pytest.mark.parametrize(
    ("with_header", "with_secret", "word"), [(True, False, "no LUKS_SECRET"), (False, True, "no LUKS header")]
)
def test_header_and_secret_that_do_not_go_together_are_named(
    store: Store, with_header: bool, with_secret: bool, word: str
) -> None:
    path = luks(store.uploads / "image") if with_header else store.image()
    done = store.run("cp", PATH=path, SIZE=40, attributes=NUMBERS if with_secret else {})
    assert done.returncode == 0
    assert word in done.stderr.decode()


# -- what libvirt is told


ENCRYPTION = (
    f"<encryption format='luks'>\n\t\t\t\t<secret type='passphrase' uuid='{SECRET}'/>\n\t\t\t</encryption>"
)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def with_encryption(host: Host, target: str) -> bytes:
    line = f"<target dev='{target}' bus='virtio'/>"
    return host.domain.replace(line.encode(), f"{line}\n\t\t\t{ENCRYPTION}".encode())


@pytest.mark.parametrize("how", ["in-place", "copy"])
def test_domain_keeps_the_secret_of_a_disk(host: Host, how: str) -> None:
    if how == "copy":
        host.add_local(0, "copy", "raw")
    else:
        host.add_in_place(0)
    got = ElementTree.fromstring(
        host.passes("deploy", *host.deploy_argv(), stdin=with_encryption(host, "vda")).stdin
    )
    disk = got.find("devices/disk")
    assert disk is not None
    secret, driver = disk.find("encryption/secret"), disk.find("driver")
    assert secret is not None and secret.get("uuid") == SECRET
    assert driver is not None and driver.get("type") == "raw"


def test_domain_keeps_the_secret_of_a_disk_on_ceph(host: Host) -> None:
    host.write_vm(vda=0)
    host.add_on_ceph(0, "store-clone")
    got = host.passes("deploy", *host.deploy_argv(), stdin=with_encryption(host, "vda")).stdin
    assert got.count(ENCRYPTION.encode()) == 1


def test_overlay_with_a_secret_does_not_get_as_far_as_libvirt(host: Host) -> None:
    host.add_local(0)
    line = host.refuses("deploy", *host.deploy_argv(), stdin=with_encryption(host, "vda"))
    assert "LUKS_SECRET" in line and line.startswith("SS074 ")


def test_hot_attach_keeps_the_secret(host: Host) -> None:
    host.add_in_place(3)
    words = {"DISK_ID": "3", "ATTACH": "YES", "TM_MAD": "semishared", "TYPE": "FILE", "LUKS_SECRET": SECRET}
    disk = f"<DISK>{''.join(f'<{name}>{text}</{name}>' for name, text in words.items())}</DISK>"
    message = (
        f"<VMM_DRIVER_ACTION_DATA><VM><ID>7</ID><TEMPLATE>{disk}</TEMPLATE></VM></VMM_DRIVER_ACTION_DATA>"
    )
    got = host.passes(
        "attach_disk",
        "one-7",
        f"{host.spelled}/disk.3",
        "vdc",
        "2",
        base64.b64encode(message.encode()).decode(),
        "7",
        "h1",
    )
    attached = ElementTree.fromstring(base64.b64decode(got.argv[4]))
    assert attached.findtext("VM/TEMPLATE/DISK/LUKS_SECRET") == SECRET
