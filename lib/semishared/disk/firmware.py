# SPDX-License-Identifier: Apache-2.0
"""What a VM has in its directory beside its disks, and a full backup takes along: the state of its TPM, and
the variables of its UEFI firmware.

OpenNebula's own drivers keep the TPM, as a tar archive of the directory `tpm` by the name of a disk; their
restores look for that name, and `kvm/deploy` gives libvirt what is in the VM's directory. They keep no
variables. Ours is a name of no disk, which the rsync driver stores and no restore asks for.
"""

from __future__ import annotations

import io
import os
import re
import stat
from typing import Callable, Iterator

from ..errors import NotSupported, ToolFailed, ToolMissing, TpmUnreadable, TransferCorrupt
from ..model.steps import BackUp
from ..model.store.image_steps import RestoreTpm
from ..tools import beneath, files
from ..tools.effects import point
from .epochs import Planned

TPM = "disk.tpm.0"
VARIABLES = "nvram.tar.gz"
FOLDER, STATE = "tpm", "tpm2-00.permall"
LARGEST_TPM = 4 << 20
"""Bytes of a TPM's state, packed or not; swtpm's has some KiB."""
LARGEST_VARIABLES = 64 << 20
"""Bytes of a file of variables: OVMF's have half a MiB, those of the Arm 64 MiB."""


def save(step: BackUp, staged: str, warn: Callable[[str], None]) -> None:
    """Put archives of what is there beside the copies of disks; raise TpmUnreadable."""
    variables = _variables(step.vm_dir, warn)
    if variables:
        _write(f"{staged}/{VARIABLES}", variables)
    if not step.tpm:
        return
    beneath.refuse_link(f"{step.vm_dir}/{FOLDER}")
    if step.domain:
        _refresh(step)
    try:
        state = files.read(f"{step.vm_dir}/{FOLDER}/{STATE}", LARGEST_TPM + 1)
    except FileNotFoundError:
        # It was cut off: its TPM begins anew with its next boot, and there is nothing to keep.
        warn(f"the TPM of VM {step.vm} has no state on {os.uname().nodename}: the backup has none")
        return
    if len(state) > LARGEST_TPM:
        raise TpmUnreadable(f"the state of the TPM of VM {step.vm} has more than {LARGEST_TPM >> 20} MiB")
    _write(f"{staged}/{TPM}", {f"{FOLDER}/{STATE}": state})


def _refresh(step: BackUp) -> None:
    """Have OpenNebula's program copy the state of a running TPM, which is root's, into the VM's directory."""
    from ..guest import domain
    from ..tools.run import run

    path = f"{step.vm_dir}/{FOLDER}/{STATE}"
    program = f"{os.path.abspath(__file__).rsplit('/', 4)[0]}/vtpm_setup"
    words = [program, "backup", domain.uuid(step.domain), step.vm_dir]
    before = _changed(path)
    try:
        said = run(words if os.geteuid() == 0 else ["sudo", "-n", "--", *words], both=True).strip()
    except (ToolFailed, ToolMissing) as e:
        said = e.detail
    # It ends well also where it could copy nothing.
    if _changed(path) == before:
        raise TpmUnreadable(
            f"the state of the TPM of VM {step.vm} cannot be read on {os.uname().nodename}: "
            f"{said or 'vtpm_setup copied nothing'}"
        )
    point("TPM's state copied")


def _changed(path: str) -> int:
    """Return when a file was written, in ns; -1 if it is not there."""
    try:
        return files.changed_ns(os.lstat(path))
    except FileNotFoundError:
        return -1


def _variables(vm_dir: str, warn: Callable[[str], None]) -> dict[str, bytes]:
    """Return the files of UEFI variables in a VM's directory, as OpenNebula names them."""
    found = {}
    for name in sorted(name for name in os.listdir(vm_dir) if re.match(r".{1,200}_VARS\.fd\Z", name)):
        path = f"{vm_dir}/{name}"
        there = os.lstat(path)
        if not stat.S_ISREG(there.st_mode):
            continue
        if there.st_size > LARGEST_VARIABLES:
            warn(f"{name} has {there.st_size >> 20} MiB: it is in no backup")
            continue
        found[name] = files.read(path, LARGEST_VARIABLES)
    return found


def _write(path: str, held: dict[str, bytes]) -> None:
    """Write an archive as `tar zcf` does, with the directories of its files; of the same, the same bytes."""
    import gzip
    import tarfile

    with (
        files.published(path) as staged,
        open(staged, "xb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for folder in sorted({os.path.dirname(name) for name in held} - {""}):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for name, content in held.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o600
            archive.addfile(entry, io.BytesIO(content))


# -- restore ----------------------------------------------------------------------------------------


def restore_tpm(
    step: RestoreTpm, planned: Planned, chunks: Iterator[bytes], sha256: Callable[[], str]
) -> None:
    """Give a VM that is off the state of a TPM, which its next boot begins with; a crash leaves the old one
    or the new one.
    """
    import hashlib

    from . import vm_dir

    packed = bytearray()
    for chunk in chunks:
        packed += chunk
        if len(packed) > LARGEST_TPM:
            raise NotSupported(f"the state of the TPM of VM {step.vm} has more than {LARGEST_TPM >> 20} MiB")
    if hashlib.sha256(packed).hexdigest() != sha256():
        raise TransferCorrupt(f"the state of the TPM of VM {step.vm} did not arrive whole")
    state = _unpacked(step.vm, bytes(packed))
    folder = f"{step.vm_dir}/{FOLDER}"
    with vm_dir.publishing(step.vm, step.vm_dir, planned):
        beneath.refuse_link(folder)
        os.makedirs(folder, exist_ok=True)
        files.remove_staged(folder, STATE)
        files.write(f"{folder}/{STATE}", state, 0o600)
        files.fsync(step.vm_dir)
    point("TPM restored")


def _unpacked(vm: int, packed: bytes) -> bytes:
    """Return the state in an archive; raise NotSupported for any other archive."""
    import tarfile
    import zlib

    try:
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r|gz") as archive:
            for entry in archive:
                name = entry.name[2:] if entry.name.startswith("./") else entry.name
                if entry.isreg() and name == f"{FOLDER}/{STATE}" and entry.size <= LARGEST_TPM:
                    found = archive.extractfile(entry)
                    assert found
                    return found.read()
                if not entry.isdir() or name != FOLDER:
                    break
    except (tarfile.TarError, zlib.error, OSError, EOFError):
        pass
    raise NotSupported(f"{TPM} of VM {vm} is no archive of a TPM's state, {FOLDER}/{STATE}")
