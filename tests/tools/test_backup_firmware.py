# SPDX-License-Identifier: Apache-2.0
"""What a full backup has beside disks: the state of a TPM, as OpenNebula's own drivers pack it and its
restores look for it, and UEFI variables.

Unpacked by tar, as `kvm/deploy` does; packed by tar where a stock driver would have. That of a running VM:
tests/system/test_firmware.py.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any, Callable, Iterator, List

import pytest

from increments.stores import Rsync
from lab.oned import ActionFailed
from semishared.disk import firmware
from semishared.errors import NotSupported, TpmUnreadable
from semishared.guest import virsh
from semishared.model import steps as s
from semishared.model.store.image_steps import RestoreTpm
from tools.backup_site import IN_PLACE, OVERLAY, RAW, Backups, backups
from tools.world import World

STATE = "tpm/tpm2-00.permall"
OLD, NEW = b"the state of then" * 100, b"the state of now" * 200
BIOS = "guest_VARS.fd"


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Backups]:
    with backups(tmp_path, Rsync) as site:
        site.mode = "FULL"
        site.site.oned.vm(site.vm).template["TPM"] = {"MODEL": "tpm-crb"}
        yield site


def has(made: Backups, state: bytes) -> None:
    """Lay the state of a TPM out as vtpm_setup does."""
    (made.directory / "tpm").mkdir(exist_ok=True)
    (made.directory / STATE).write_bytes(state)


def unpacked(archive: Path, where: Path) -> List[str]:
    where.mkdir()
    with archive.open("rb") as file:
        # The words of kvm/deploy.
        subprocess.run(["tar", "zxf", "-", "-C", where], stdin=file, check=True)
    return sorted(str(path.relative_to(where)) for path in where.rglob("*"))


@pytest.mark.fault(94, "a full backup has the state of the TPM as stock has it, and a restore gives it back")
def test_tpm_is_in_a_full_backup_and_restored(made: Backups, tmp_path: Path) -> None:
    has(made, OLD)
    (made.directory / BIOS).write_bytes(b"variables")
    made.write(0x11, 512)
    made.back_up()
    kept = made.store.base / str(made.vm) / made.store.chain[0]
    assert {path.name for path in kept.iterdir()} == {
        "disk.0.0",
        "disk.1.0",
        "disk.2.0",
        "disk.tpm.0",
        "nvram.tar.gz",
        "vm.xml",
    }
    assert unpacked(kept / "disk.tpm.0", tmp_path / "tpm") == ["tpm", STATE]
    assert (tmp_path / "tpm" / STATE).read_bytes() == OLD
    assert unpacked(kept / "nvram.tar.gz", tmp_path / "nvram") == [BIOS]
    assert (tmp_path / "nvram" / BIOS).read_bytes() == b"variables"
    has(made, NEW)
    made.write(0x22, 512)
    made.restore(-1, IN_PLACE)
    assert (made.directory / STATE).read_bytes() == NEW, "the TPM comes with the first disk, as on stock"
    made.restore(-1, OVERLAY)
    assert (made.directory / STATE).read_bytes() == OLD
    has(made, NEW)
    made.restore(-1)
    made.check(made.held[0])
    assert (made.directory / STATE).read_bytes() == OLD
    assert os.stat(made.directory / STATE).st_mode & 0o777 == 0o600


@pytest.mark.fault(94, "of a stock backup with the state of a TPM one disk alone can be restored, and all")
def test_stock_backup_with_a_tpm(made: Backups) -> None:
    """Each of stock's increments has the state; its downloader cannot send that of a chain."""
    del made.site.oned.vm(made.vm).template["TPM"]
    made.mode = "INCREMENT"
    for number, state in enumerate((OLD, NEW)):
        made.write(0x30 + number, 768)
        made.back_up()
        has(made, state)
        kept = made.store.base / str(made.vm) / made.store.chain[number]
        subprocess.run(["tar", "zcf", kept / "disk.tpm.0", "-C", made.directory, "tpm"], check=True)
    made.restore(0, RAW)
    made.check({RAW: made.held[0][RAW]})
    made.restore(1)
    made.check(made.held[1])
    has(made, b"")
    made.site.oned.vm(made.vm).template["TPM"] = {"MODEL": "tpm-crb"}
    for increment, state in ((1, NEW), (0, OLD)):
        made.restore(increment)
        made.check(made.held[increment])
        assert (made.directory / STATE).read_bytes() == state


@pytest.mark.fault(94, "increments of a VM with a TPM, which stock cannot merge, are refused by name")
def test_increments_of_a_vm_with_a_tpm_are_refused(made: Backups) -> None:
    has(made, OLD)
    made.mode = "INCREMENT"
    with pytest.raises(ActionFailed, match=rf"SS003 VM {made.vm} has a TPM, .* of MODE = FULL"):
        made.back_up()
    assert not (made.directory / "backup").exists()


def test_vm_that_was_cut_off_has_no_state_to_keep(made: Backups) -> None:
    made.back_up()
    kept = made.store.base / str(made.vm) / made.store.chain[0]
    assert not (kept / "disk.tpm.0").exists()
    assert any("the TPM of VM" in call.stderr for call in made.site.oned.calls)
    made.restore(-1)
    assert not (made.directory / "tpm").exists()


# -- what runs --------------------------------------------------------------------------------------

COPIES = '#!/bin/sh\n[ "$1" = backup ] && mkdir -p "$3/tpm" && printf %s "$2" > "$3/tpm/tpm2-00.permall"\n'
SAYS_NOTHING = "#!/bin/sh\nmkdir -p $3/tpm\n"
DENIED = "#!/bin/sh\necho cp: cannot stat permall >&2\n"


@pytest.fixture
def running(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], List[str]]]:
    """Yield what saves the state of a domain of libvirt's test driver by such a vtpm_setup."""
    scripts = world.top / "scripts"
    monkeypatch.setattr(firmware, "__file__", str(scripts / "lib/semishared/disk/firmware.py"))
    monkeypatch.setattr(virsh, "_site", [virsh.Site(uri="test:///default")])
    scripts.mkdir()
    vm_dir, staged = world.system / "5", world.system / "5/.staged-backup"
    staged.mkdir(parents=True)

    def save(program: str) -> List[str]:
        (scripts / "vtpm_setup").write_text(program)
        (scripts / "vtpm_setup").chmod(0o755)
        step = s.BackUp(5, str(vm_dir), str(vm_dir / "backup"), ("0",), "test", "NONE", "", tpm=True)
        said: List[str] = []
        firmware.save(step, str(staged), said.append)
        return said

    yield save


def test_state_of_a_running_tpm_is_what_opennebula_copies(
    running: Callable[[str], List[str]], world: World, tmp_path: Path
) -> None:
    assert running(COPIES) == []
    assert unpacked(world.system / "5/.staged-backup/disk.tpm.0", tmp_path / "out") == ["tpm", STATE]
    # The UUID of that domain, by which libvirt knows the state.
    assert (tmp_path / "out" / STATE).read_bytes() == b"6695eb01-f6a4-8304-79aa-97f2502e193f"


@pytest.mark.parametrize(("program", "why"), [(SAYS_NOTHING, "copied nothing"), (DENIED, "cannot stat")])
def test_running_tpm_that_cannot_be_read_is_no_backup(
    running: Callable[[str], List[str]], world: World, program: str, why: str
) -> None:
    """Also not with what an earlier shutdown has left there."""
    (world.system / "5/tpm").mkdir()
    (world.system / "5" / STATE).write_bytes(OLD)
    with pytest.raises(TpmUnreadable, match=f"of VM 5 cannot be read .*{why}"):
        running(program)


# -- what arrives -----------------------------------------------------------------------------------


LINK, FOLDER = tarfile.SYMTYPE.decode(), tarfile.DIRTYPE.decode()


def archive(*entries: Any) -> bytes:
    """Return an archive of (name, content), or of (name, type in letters)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in entries:
            entry = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
            else:
                entry.type, entry.linkname = content.encode(), "/etc/passwd"
                tar.addfile(entry)
    return out.getvalue()


def arrives(world: World, data: bytes) -> None:
    directory = world.system / "5"
    directory.mkdir(exist_ok=True)
    sha256 = hashlib.sha256(data).hexdigest()
    pieces = [data[at : at + (1 << 20)] for at in range(0, len(data), 1 << 20)]
    world.on(RestoreTpm(5, str(directory)), data=pieces, sha256=sha256)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no archive",
        archive(),
        archive((STATE, LINK)),
        archive(("../x", b"x"), (STATE, OLD)),
        archive(("tpm", LINK), (STATE, OLD)),
        archive(("/tpm/tpm2-00.permall", OLD)),
        archive((STATE, OLD))[:-40],
        archive((STATE, bytes(5 << 20))),
        bytes(5 << 20),
    ],
    ids=["empty", "text", "nothing", "link", "outside", "folder", "absolute", "cut off", "bomb", "large"],
)
def test_what_is_no_archive_of_a_tpm_changes_nothing(world: World, data: bytes) -> None:
    arrives(world, archive(("tpm", FOLDER), (STATE, OLD)))
    with pytest.raises(NotSupported, match="TPM"):
        arrives(world, data)
    found = sorted(str(path.relative_to(world.system)) for path in (world.system / "5").rglob("*"))
    assert found == ["5/tpm", f"5/{STATE}"]
    assert (world.system / "5" / STATE).read_bytes() == OLD


def test_folder_that_is_a_link_is_not_followed(world: World) -> None:
    (world.top / "elsewhere").mkdir()
    (world.system / "5").mkdir()
    (world.system / "5/tpm").symlink_to(world.top / "elsewhere")
    with pytest.raises(Exception, match="symbolic link"):
        arrives(world, archive((STATE, OLD)))
    assert list((world.top / "elsewhere").iterdir()) == []
