# SPDX-License-Identifier: Apache-2.0
"""The hosts' users for the users of an owner's guests: a range of numbers for each owner, for ever.

A range has its owner's number in OpenNebula, so it is the same in all datastores. It is a file that names its
owner, published by link(2), which lets only one process create it; it is never removed. Roots of older
versions gave ranges in turn, without gaps, so that some owner has another number; they continue so. A process
that loses the race for a range looks again, and finds its owner's range or the next one.
"""

from __future__ import annotations

import os

from ..errors import BadRecord, NoSpace, here
from ..model.share import names as share_names
from ..model.share.share import UIDS, first_uid
from ..tools import files
from ..tools.effects import point

RANGES = (1 << 31) // UIDS - 2
"""Beyond these are numbers that some programs take as negative."""
TRIES = 100
"""Lost races before an error; with gaps in the numbers, left by other hands, every race is lost."""


def first_uid_of(root: str, owner: int) -> int:
    """Return the first user of the range of `owner`; create the range if needed. Raise NoSpace, BadRecord."""
    directory = f"{root}/{share_names.UIDS}"
    os.makedirs(directory, mode=0o755, exist_ok=True)
    files.remove_stale(directory)
    for _ in range(TRIES):
        given, broken = _given(directory)
        if owner in given.values():
            return first_uid(next(number for number, who in given.items() if who == owner))
        _refuse(broken)
        number = owner if all(who == number for number, who in given.items()) else len(given)
        if number >= RANGES:
            raise NoSpace(
                f"user {owner} of OpenNebula can have no shares in {root}: ranges of users are "
                f"for the first {RANGES} alone"
            )
        _give(f"{root}/{share_names.uids(number)}", owner)
    raise BadRecord(
        f"{here(directory)}: ranges of users are given with gaps, so there is none for user {owner}"
    )


def known_uid_of(root: str, owner: int) -> int:
    """Return the first user of the existing range of `owner`; raise BadRecord without one."""
    given, broken = _given(f"{root}/{share_names.UIDS}")
    for number, who in given.items():
        if who == owner:
            return first_uid(number)
    _refuse(broken)
    raise BadRecord(
        f"{root}/{share_names.UIDS} on {os.uname().nodename} does not say which users those of {owner} are"
    )


def _given(directory: str) -> tuple[dict[int, int], list[str]]:
    """Return each range's owner, and the unreadable files: they matter only to an owner without a range."""
    files.refresh(directory)
    given, broken = {}, []
    for name in os.listdir(directory):
        number = share_names.number_of(name)
        if number >= 0:
            data = files.hint(f"{directory}/{name}")  # an unreadable one is reported below
            if isinstance(data.get("owner"), int):
                given[number] = int(str(data["owner"]))
            else:
                broken.append(f"{directory}/{name}")
    return dict(sorted(given.items())), sorted(broken)


def _refuse(broken: list[str]) -> None:
    if broken:
        raise BadRecord(f"{here(broken[0])} does not say whose users these are")


def _give(path: str, owner: int) -> None:
    staged = files.staged_name(path)
    files.write_json(staged, {"version": 1, "owner": owner})
    try:
        os.link(staged, path)
        files.fsync(os.path.dirname(path))
        point("users given")
    except FileExistsError:
        pass  # another process was faster, perhaps for the same owner
    finally:
        files.unlink(staged)
