# SPDX-License-Identifier: Apache-2.0
"""Offline devices of this host's pool: not mounted, replaced, read-only, broken (I/O errors), or hung.

A device that fails costs the VMs whose layers it has. No other VM may fail because of it: for them its files
do not exist.
"""

from __future__ import annotations

import errno
import os
import time
from typing import Container, Iterable, List, Optional, Sequence

from ..model.device import names as device_names
from ..model.disk import names as disk_names
from ..named import NamedTuple
from ..tools import files
from ..tools.effects import point
from . import devices
from . import label as device_label

NOT_THERE, OTHER, READ_ONLY, BROKEN = (
    "not there",
    "not there: another one is mounted in its place",
    "read-only",
    "broken",
)
HUNG, FOREIGN = "hung", "not there: it is in the pool of"


def state(root: str, uuid: str) -> str:
    """Return what is wrong with a device, '' for nothing; for a broken one with the error."""
    directory = device_names.device(root, uuid)
    try:
        if device_names.is_aside(os.readlink(directory)):
            return HUNG
        # A file system that was shut down fails here, while statvfs and links still work.
        os.listdir(directory)
        is_read_only = os.statvfs(directory).f_flag & os.ST_RDONLY or not _answers(
            device_names.label(directory)
        )
    except (FileNotFoundError, NotADirectoryError):
        return NOT_THERE
    except OSError as e:
        return f"{BROKEN}: {e.strerror}"
    said = device_label.read(directory)
    if said.get("uuid") != uuid:
        return OTHER if said else NOT_THERE
    if device_label.whose(directory, said):
        return f"{FOREIGN} {device_label.whose(directory, said)}"
    return READ_ONLY if is_read_only else ""


def _answers(label: str) -> bool:
    """Return True if the device itself, and not only its file system's cache, takes writes; raise OSError.

    An ext4 that became read-only after an error shows it by nothing else (Linux 6.15 and newer). Nothing is
    written.
    """
    import mmap

    from ..tools import extents

    try:
        fd = extents.open_direct(label, os.O_RDWR | os.O_NOFOLLOW)
    except OSError as e:
        if e.errno in (errno.EACCES, errno.EPERM):
            return True  # another user's label: read it all the same
        if e.errno != errno.EROFS:
            raise
        return False
    try:
        with mmap.mmap(-1, 4096) as page:
            os.preadv(fd, [page], 0)
    except OSError as e:
        if e.errno != errno.EINVAL:  # tmpfs of Linux before 6.6 has no direct I/O
            raise
    finally:
        os.close(fd)
    return True


# Devices that hang: a process that touches one waits for ever, and no other process of the host may wait too.
#
#     <root>/devices/<uuid>  -> <mount>/.semishared         while it answers
#                            -> hung:<mount>/.semishared    once it has not: paths through this link lead
#                                                           nowhere, so the device counts as not mounted
#                    <uuid>.asked                           the process that asked it and survives SIGKILL;
#                                                           while it waits, no other one asks
#
# A process that is about to follow links to devices looks at them first: each plan, the monitoring probe, and
# the start of a guest. A program reads the label past the page cache: a program in a hung system call cannot
# be killed, and a thread in one would keep this process from ending. The mtime of the link is the time of the
# last look. A hung device is asked again periodically, and at once for a VM that lies on it, and is back when
# it answers. A host on which no program ends in time, because its own disk stalls or it swaps, decides
# nothing about devices.
#
# A crash leaves one link or the other; the next look corrects it.


PATIENCE_S, ANSWER_S = 30.0, 8.0
"""Seconds to read a block, for a device that has answered and one that has not: disks spin up."""
SOON_S = 0.5
"""Seconds; if all answer by then, the host itself is not tested."""
FRESH_S, AGAIN_S = 5.0, 60.0
"""Seconds for which an answer counts, and for which a hung device is not asked again."""
KILLED_S = 0.5
"""Seconds that a killed program may take to end."""
READ = [
    "sh",
    "-c",
    """exec <"$1"
dd count=0 iflag=nocache status=none
exec dd bs=4096 count=1 iflag=direct of=/dev/null status=none""",
    "sh",
]
"""Opens and reads a label, direct and not from btrfs's cache, which answers direct reads (Linux 6.18)."""


class Question(NamedTuple):
    """A device's directory to read within `limit_s`; `note`: the file that names a waiting process."""

    side: str
    limit_s: float
    note: str


def look_before(steps: Iterable[object]) -> None:
    """Look at the devices of the base stores of these steps, again at hung ones below their VMs."""
    doubted: dict[str, set[str]] = {}
    for step in steps:
        root, vm_dir = _root(step), _vm_dir(step)
        if root and os.path.isdir(device_names.devices(root)):
            doubted.setdefault(root, set()).update(_devices_of(vm_dir) if vm_dir else ())
    for root in sorted(doubted):
        look(root, doubted[root])


def _vm_dir(step: object) -> str:
    return str(getattr(step, "vm_dir", "") or getattr(getattr(step, "disk", None), "vm_dir", ""))


def _devices_of(vm_dir: str) -> Iterable[str]:
    try:
        found = [
            devices.link_of(f"{vm_dir}/{name}") for name in filter(disk_names.are_layers, os.listdir(vm_dir))
        ]
        return [link.uuid for link in found if link]
    except OSError:
        return ()


def _root(step: object) -> str:
    root, location, vm_dir = getattr(step, "root", ""), getattr(step, "location", ""), _vm_dir(step)
    if location or vm_dir:
        root = disk_names.base_store(location) if location else disk_names.base_store_of(vm_dir)
    return str(root)


def look(root: str, doubted: Container[str] = ()) -> None:
    """Ask this host's devices; mark those that do not answer as hung, and the others as back.

    `doubted`: UUIDs of devices that are asked again even if they were hung just now.
    """
    now, asked = time.time(), {}
    for uuid in devices.registered(root):
        link = device_names.device(root, uuid)
        try:
            target, since = os.readlink(link), now - os.lstat(link).st_mtime
        except OSError:
            continue  # just removed from the pool
        believed_s = FRESH_S if not device_names.is_aside(target) else 0.0 if uuid in doubted else AGAIN_S
        if not 0 <= since < believed_s:
            asked[link] = target
    for (link, target), answer in zip(
        asked.items(), _device_answers([_question(link, target) for link, target in asked.items()])
    ):
        side = device_names.side_of(target)
        if answer is not None:
            _note(link, target, side if answer else device_names.aside(side))


def _question(link: str, target: str) -> Question:
    limit_s = ANSWER_S if device_names.is_aside(target) else PATIENCE_S
    return Question(device_names.side_of(target), limit_s, device_names.asked_beside(link))


def _note(link: str, was: str, target: str) -> None:
    try:
        if os.readlink(link) != was:
            return  # another process has looked, or declared the device anew
        if was == target:
            os.utime(link, follow_symlinks=False)
            return
        files.symlink(target, link)
        point("device put aside, or back")
    except OSError:
        pass  # the next look does it


def unanswered(root: str, sides: Sequence[str]) -> list[str]:
    """Return the devices' directories that do not answer in time; an error is an answer."""
    links = [device_names.device(root, uuid) for uuid in devices.registered(root)]
    notes = {device_names.side_of(os.readlink(link)): device_names.asked_beside(link) for link in links}
    answers = _device_answers([Question(side, PATIENCE_S, notes.get(side, "")) for side in sides])
    return [side for side, answer in zip(sides, answers) if answer is False]


def _device_answers(questions: Sequence[Question]) -> List[Optional[bool]]:
    """Return whether each device answers in time, None if that is unknown."""
    from ..tools import run
    from ..tools.ending import ended_within

    labels = {question.side: device_names.label(question.side) for question in questions}
    try:
        programs = [
            None if _is_waited_for(asked) else run.unheard([*READ, labels[asked.side]]) for asked in questions
        ]
        soon = time.monotonic() + SOON_S
        if all(
            [
                not program or ended_within(program, soon - time.monotonic()) is not None
                for program in programs
            ]
        ):
            return [program is not None for program in programs]
        # The same read without a device: if even that takes long, the host is the cause, perhaps for all.
        host = run.unheard([*READ, "/dev/zero"])
    except OSError:
        return [None for _ in questions]
    is_known = ended_within(host, PATIENCE_S) is not None
    if not is_known:
        host.kill()
    found: List[Optional[bool]] = []
    began = time.monotonic()
    for question, program in zip(questions, programs):
        left_s = began + question.limit_s - time.monotonic() if is_known else 0.0
        if program is None or ended_within(program, left_s) is not None:
            found.append(program is not None)
            continue
        program.kill()
        if ended_within(program, KILLED_S) is None:
            _waits(question, program.pid)
        found.append(False if is_known else None)
    return found


def _waits(question: Question, pid: int) -> None:
    """Record the process that waits for an answer and survives SIGKILL."""
    from ..tools import owner

    try:
        if question.note:
            files.write_json(
                question.note, {"pid": pid, "started": owner.started(pid), "mount": _mounted(question.side)}
            )
    except OSError:
        pass  # the next look starts another process


def _is_waited_for(question: Question) -> bool:
    """Return True if a process still waits for an answer of the present mount.

    A process that waits for an earlier mount there may wait for ever, and does not count.
    """
    from ..tools import owner

    said = files.hint(question.note) if question.note else {}
    if not said:
        return False
    pid = said.get("pid")
    if (
        type(pid) is int
        and said.get("started") == owner.waiting(pid)
        and said.get("mount") == _mounted(question.side)
    ):
        return True
    try:
        os.unlink(question.note)
    except OSError:
        pass
    return False


def _mounted(side: str) -> str:
    """Return the id of the mount of a device, '' if nothing is mounted."""
    from ..tools import mounts

    found = mounts.under(os.path.dirname(side), mounts.listed())
    return found.id if found.point == os.path.dirname(side) else ""
