# SPDX-License-Identifier: Apache-2.0
"""A hypervisor action on the VM's host: planned, carried out, then this process becomes the stock script.

plan/vm/hypervisor.py plans. Rehearsed it looks as the action would, and changes nothing (model/rehearsal.py).
The functions are its steps (model/vm/hypervisor_steps.py), and what they may name beside their own fields.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Callable, Dict, NoReturn, Optional

from ..errors import BadArguments, SemisharedError, StoreUnavailable, ToolMissing, here
from ..model.disk import names as disk_names
from ..model.exchange import Exchange, Here, Say, drive
from ..model.vm.hypervisor_steps import BecomeStock, CheckShare
from ..named import NamedTuple
from ..opennebula.report import Report, caught
from ..plan.vm.hypervisor import MESSAGE, PLANNERS, READ, Asked, forwarded, planned
from ..table import carry_out
from ..tools.ending import become, ended
from . import records

if TYPE_CHECKING:
    from ..model.base.steps import Rehearsed, RehearseHypervisor

CHECKPOINT_S = 60
"""Seconds that libvirt may take to read or write the header of a checkpoint."""


class Work(NamedTuple):
    """One action, as its steps see it."""

    scripts: str = ""
    """The directory of the vmm scripts."""
    received: bytes = b""
    """The action's stdin."""
    say: Callable[[str], None] = lambda _: None
    """Writes a line to the log."""
    warn: Callable[[str], None] = lambda _: None
    """The same, of what is wrong."""
    held: Callable[[], bytes] = bytes
    """Returns the lines for the log that are not written yet."""
    names: Dict[str, str] = {}
    """What is at a path, in a user's words."""


def read_vm(vm_dir: str) -> str | None:
    """Return the text of vm.xml, None if there is none."""
    try:
        with open(f"{vm_dir}/vm.xml", "rb") as file:
            return file.read().decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return None
    except OSError as e:
        raise BadArguments(str(e)) from None


def recover(vm_dir: str, domain: str, warn: Callable[[str], None]) -> None:
    """Take the turn, and end what other actions have begun in a VM's disks."""
    from ..disk import recovery
    from ..guest import job_lock
    from ..tools import locks

    locks.say = warn
    # A detach or move that oned does not know of may be at work; it is killed.
    job_lock.take(int(os.path.basename(vm_dir)), vm_dir)
    recovery.recover(vm_dir, domain)


def tidy_marks(vm_dir: str) -> None:
    """Remove what a killed QEMU has left of marks for backups."""
    from ..disk import backup_marks

    backup_marks.tidy(vm_dir)


def lose_marks(vm_dir: str, domain: str) -> None:
    """Remove all bitmaps from a guest, also other programs': QEMU goes back to no system snapshot with one.

    It refuses in its midst, and the guest is gone. What libvirt does not answer here, it answers the stock
    script no better; but where marks are noted, that script must not go on.
    """
    from ..disk import backup_marks
    from ..guest import marks

    is_marked = os.path.lexists(disk_names.marks(vm_dir))
    backup_marks.lose(vm_dir, None, "the VM went back to a system snapshot")
    try:
        marks.drop(domain, foreign=True)
    except SemisharedError:
        if is_marked:
            raise


def check_epoch(vm_dir: str) -> str:
    """Raise StaleDirectory if another host has taken the VM over; return '', or why that is unknown."""
    from ..disk import epoch_check

    name = os.path.basename(vm_dir)
    return epoch_check.check(int(name), vm_dir) if name.isdigit() else ""


def io_limits() -> dict[str, tuple[int, int]]:
    """Return the limits of each I/O class on this host."""
    from ..config import load

    return load().io_limits


def check_share(step: CheckShare, scripts: str, names: Optional[Dict[str, str]] = None) -> tuple[str, bool]:
    """Return the program that serves a share to a guest, and True if it is a registered directory."""
    if names is not None:
        names[step.source] = f"image {step.image}"
    from ..share import attached, inspection
    from ..tools.hung_store import LIMIT_S, unless_its_process_hangs
    from . import virtiofsd

    noted = records.share_note(step.vm_dir)[1].get(step.image, records.Noted())
    wanted = (step.image, step.source, noted.marker, noted.born)
    given = unless_its_process_hangs(lambda: attached.check(*wanted), None, LIMIT_S)
    if given is None:
        raise StoreUnavailable(f"{here(step.source)} hangs: no answer within {LIMIT_S:.0f} s")
    inspection.daemon()
    # A user may change the VM's DISK, but only the owner the image: the image's READONLY counts as it is
    # now, or as it was when the share was made.
    reads = step.readonly or (given.readonly if noted.readonly is None else noted.readonly)
    program = f"{scripts}/{virtiofsd.READ_ONLY if reads else virtiofsd.NAME}"
    return os.path.abspath(program), bool(given.directory)


def read_checkpoint(path: str) -> str | None:
    """Return the domain XML in a checkpoint, None if that is no file."""
    if not os.path.isfile(path):
        return None
    from ..guest import libvirtd

    secure = libvirtd.binding().VIR_DOMAIN_SAVE_IMAGE_XML_SECURE
    what = f"save-image-dumpxml {path}"
    return libvirtd.call(
        what, lambda libvirt: str(libvirt.saveImageGetXMLDesc(path, secure)), timeout_s=CHECKPOINT_S
    )


def write_checkpoint(path: str, xml: str) -> None:
    """Replace the domain XML in a checkpoint."""
    from ..guest import libvirtd

    what = f"save-image-define {path}"
    libvirtd.call(what, lambda libvirt: libvirt.saveImageDefineXML(path, xml, 0), timeout_s=CHECKPOINT_S)


def become_stock(step: BecomeStock, scripts: str, received: bytes, held: Callable[[], bytes]) -> NoReturn:
    """Replace this process by the action's stock script.

    OpenNebula 6.10 shows a user the beginning of stderr: if the script fails, that has to be its reason, and
    the lines of this process come after it.
    """
    argv, stock = list(step.argv), f"{scripts}/../kvm/{step.action}"
    if step.message:
        import base64

        argv[MESSAGE] = base64.b64encode(step.message.encode()).decode()
    given = step.stdin.encode() or received
    if given:
        _stdin_is(given)
    words = [stock, *argv]
    lines = held() if os.access(stock, os.X_OK) else b""
    if lines:
        from ..tools.run import DIES_WITH_US

        words = [*DIES_WITH_US, *words]
    try:
        become(words, lines)
    except OSError as e:
        raise ToolMissing(f"OpenNebula's own script {os.path.normpath(stock)}: {e.strerror}") from None


def _stdin_is(data: bytes) -> None:
    """Make `data` the standard input of this process and of the script that replaces it."""
    fd = os.memfd_create("domain")
    os.pwrite(fd, data, 0)
    os.dup2(fd, 0)
    os.close(fd)


def run(here: str, argv: list[str]) -> int:
    """Run action `argv[0]` with the arguments that follow; `here` is the directory of the vmm scripts.

    Not by entry.run: the stock script must not inherit a umask of this suite.
    """
    name = argv[0] if argv else ""

    def act(report: Report) -> int:
        asked = Asked(name, tuple(argv[1:]), sys.stdin.buffer.read() if name in READ else b"")
        names: Dict[str, str] = {}
        report.subject = lambda: asked.subject(names)
        work = Work(here, asked.stdin, report.info, report.warn, report.held, names)

        def do(wanted: Exchange) -> Any:
            if isinstance(wanted, Here):
                return carry_out(wanted.step, work)
            assert isinstance(wanted, Say)
            for level, text in wanted.lines(*wanted.about):
                getattr(report, level)(text)
            return None

        drive(planned(asked), do)
        return 0

    return ended(caught(name if name in PLANNERS else "with_records", act))


def rehearse(step: RehearseHypervisor) -> Rehearsed:
    """Return what the action would do; raise what the action would raise."""
    from ..model.base.steps import Rehearsed, RehearsedMessage
    from ..model.rehearsal import rehearsed
    from ..model.vm.hypervisor_steps import look_instead

    asked, work = Asked(step.action, step.argv, step.stdin.encode("utf-8", "surrogateescape")), Work()

    def do(wanted: Exchange) -> Any:
        assert isinstance(wanted, Here)
        return carry_out(wanted.step, work)

    # The vmm scripts decide by this, too.
    is_ours = os.path.lexists(disk_names.records(asked.vm_dir))
    found = rehearsed(planned(asked) if is_ours else forwarded(asked), do, look_instead)
    messages = [RehearsedMessage(**message.to_data()) for message in found.messages]
    return Rehearsed(messages, found.is_open, found.answer)
