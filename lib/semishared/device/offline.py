# SPDX-License-Identifier: Apache-2.0
"""Devices of this host's pool that are gone, exchanged, read-only, broken (I/O errors), or hung.

A device that dies costs the VMs whose layers it has. No other VM may fail on it: for all but those VMs, what
lies on such a device is not there.
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
    """Return what is wrong with a device, '' if nothing is; of a broken one also how it answers."""
    directory = device_names.device(root, uuid)
    try:
        if device_names.is_aside(os.readlink(directory)):
            return HUNG
        # A file system that has been shut down answers this with an error, and statvfs and links not yet.
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
    """Tell whether the device itself, which a file system knows by heart until somebody writes, takes writes;
    raise OSError as it reads.

    ext4 that has found an error says by nothing else that it has become read-only (Linux 6.15 and newer).
    Nothing is written.
    """
    import mmap

    from ..tools import extents

    try:
        fd = extents.open_direct(label, os.O_RDWR | os.O_NOFOLLOW)
    except OSError as e:
        if e.errno in (errno.EACCES, errno.EPERM):
            return True  # somebody else's label: it is read all the same
        if e.errno != errno.EROFS:
            raise
        return False
    try:
        with mmap.mmap(-1, 4096) as page:
            os.preadv(fd, [page], 0)
    except OSError as e:
        if e.errno != errno.EINVAL:  # there is none, behind tmpfs of Linux before 6.6
            raise
    finally:
        os.close(fd)
    return True


def where(root: str, path: str) -> str:
    """Return where the device is mounted to which the link `path` leads, its UUID if it is none of the pool;
    '' if that is no link.
    """
    uuid = devices.device_of(path)
    return devices.mount(root, uuid) if uuid in devices.registered(root) else uuid


def abandon(path: str) -> None:
    """Take away a link to a device that cannot be written to, with what of the rest can be removed."""
    if takes_nothing(path):
        devices.remove(path)


def takes_nothing(path: str) -> bool:
    """Tell whether `path`, a base or layers, lies on a device that cannot be written to."""
    link = devices.link_of(path)
    return link is not None and bool(state(path.rsplit("/", 2)[0], link.uuid))


# Devices that hang: whoever touches one waits for ever, and nobody else on the host may wait with him.
#
#     <root>/devices/<uuid>  -> <mount>/.semishared         as long as it answers
#                            -> hung:<mount>/.semishared    when it has not: what leads through this link
#                            leads
#                            nowhere then, so
#                                                           that for everybody the device is as one that is
#                                                           not mounted
#                    <uuid>.asked                           who asked it, and cannot be ended even by SIGKILL:
#                    nobody asks beside him
#
# Who is about to follow links to devices looks first: each plan, what monitoring asks, and whoever starts a
# guest. The label is read past the page cache, by a program: one in a hung system call cannot be killed, and
# a thread in one would keep us from ending. When a device was looked at last is the time of its link; one
# that hangs is asked again every so often, and at once for a VM that lies on it, and is back when it answers.
# A host on which nothing ends in its time, since its own disk stalls or it swaps, says nothing about devices.
#
# What each crash leaves: one link or the other, either of which the next look puts right.


PATIENCE_S, ANSWER_S = 30.0, 8.0
"""Within which a device that has answered reads one block, and one that has not: disks that stand still take
their time, above all many.
"""
SOON_S = 0.5
"""Whoever answers by then is not worth a question to the host itself."""
FRESH_S, AGAIN_S = 5.0, 60.0
"""Seconds for which it is believed that a device answers, and that it hangs."""
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
"""What opens a label reads it, too: one is waited for. Not as btrfs has it cached, which it answers direct
reads from (Linux 6.18).
"""


class Question(NamedTuple):
    """Whether what is ours on a device can be read within so many seconds; `note`: where it is known who
    waits for that.
    """

    side: str
    limit_s: float
    note: str


def look_before(steps: Iterable[object]) -> None:
    """Look at the devices of the base stores with which steps have to do, and again at those on which their
    VMs lie.
    """
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
        return filter(
            None,
            [
                devices.device_of(f"{vm_dir}/{name}")
                for name in os.listdir(vm_dir)
                if disk_names.are_layers(name)
            ],
        )
    except OSError:
        return ()


def _root(step: object) -> str:
    root, location, vm_dir = getattr(step, "root", ""), getattr(step, "location", ""), _vm_dir(step)
    if location or vm_dir:
        root = disk_names.base_store(location) if location else disk_names.base_store_of(vm_dir)
    return str(root)


def look(root: str, doubted: Container[str] = ()) -> None:
    """See which devices of this host's pool answer; let those that do not be as if they were not there, and
    the others be back.

    `doubted`: UUIDs of those of which it is not believed for a moment that they hang.
    """
    now, asked = time.time(), {}
    for uuid in devices.registered(root):
        link = device_names.device(root, uuid)
        try:
            target, since = os.readlink(link), now - os.lstat(link).st_mtime
        except OSError:
            continue  # it has just been let go of
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
            return  # somebody else has looked meanwhile, or declared it anew
        if was == target:
            os.utime(link, follow_symlinks=False)
            return
        files.symlink(target, link)
        point("device put aside, or back")
    except OSError:
        pass  # the next look does it


def unanswered(root: str, sides: Sequence[str]) -> list[str]:
    """Return which directories of ours on devices do not answer in their time; what answers with an error has
    answered.
    """
    links = [device_names.device(root, uuid) for uuid in devices.registered(root)]
    notes = {device_names.side_of(os.readlink(link)): device_names.asked_beside(link) for link in links}
    answers = _device_answers([Question(side, PATIENCE_S, notes.get(side, "")) for side in sides])
    return [side for side, answer in zip(sides, answers) if answer is False]


def _device_answers(questions: Sequence[Question]) -> List[Optional[bool]]:
    """Return who answers in its time, None where that is not known."""
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
        # The same but for the device: where even that takes long it is not the device, and what it is can
        # have held up the others too.
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
    """Note who waits for an answer and cannot be ended."""
    from ..tools import owner

    try:
        if question.note:
            files.write_json(
                question.note, {"pid": pid, "started": owner.started(pid), "mount": _mounted(question.side)}
            )
    except OSError:
        pass  # the next one waits beside him


def _is_waited_for(question: Question) -> bool:
    """Tell whether somebody waits for an answer yet, of what is mounted there now: who waits for what was
    there before may for ever.
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
    """Return the id of what is mounted where a device is, empty if nothing is."""
    from ..tools import mounts

    found = mounts.under(os.path.dirname(side), mounts.listed())
    return found.id if found.point == os.path.dirname(side) else ""
