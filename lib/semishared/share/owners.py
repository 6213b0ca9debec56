# SPDX-License-Identifier: Apache-2.0
"""Users of the hosts for the users of an owner's guests: a range for each owner, given once, to no other.

The number of a range is its owner's in OpenNebula, so it is the same in all datastores. A range is a file
that says whose it is, published by a link(2), which makes it for one alone; none is ever removed. In roots of
before, which show it by an owner with another number, they were given in turn, and are: without gaps, and who
loses the race for one looks again, and finds its own or the next.
"""

from __future__ import annotations

import os

from ..errors import BadRecord, NoSpace
from ..model.share import names as share_names
from ..model.share.share import UIDS, first_uid
from ..tools import files
from ..tools.effects import point

RANGES = (1 << 31) // UIDS - 2
"""Beyond are users that some programs take for negative."""
TRIES = 100
"""How many races for a range may be lost, one after the other; with gaps, which other hands have made, all
are.
"""


def first_uid_of(root: str, owner: int) -> int:
    """Return the first user of the range of `owner`, who is given one if need be; raise NoSpace,
    BadRecord.
    """
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
        f"{directory} on {os.uname().nodename}: ranges of users are given with gaps, so there is "
        f"none for user {owner}"
    )


def known_uid_of(root: str, owner: int) -> int:
    """Return the first user of the range that `owner` has been given; raise BadRecord without one."""
    given, broken = _given(f"{root}/{share_names.UIDS}")
    for number, who in given.items():
        if who == owner:
            return first_uid(number)
    _refuse(broken)
    raise BadRecord(
        f"{root}/{share_names.UIDS} on {os.uname().nodename} does not say which users those of {owner} are"
    )


def _given(directory: str) -> tuple[dict[int, int], list[str]]:
    """Return whose the ranges are, and the files that do not say it: they cost only who is named by none of
    the others.
    """
    files.refresh(directory)
    given, broken = {}, []
    for name in os.listdir(directory):
        number = share_names.number_of(name)
        if number >= 0:
            data = files.hint(f"{directory}/{name}")  # one that says nothing is told of below
            if isinstance(data.get("owner"), int):
                given[number] = int(str(data["owner"]))
            else:
                broken.append(f"{directory}/{name}")
    return dict(sorted(given.items())), sorted(broken)


def _refuse(broken: list[str]) -> None:
    if broken:
        raise BadRecord(f"{broken[0]} on {os.uname().nodename} does not say whose users these are")


def _give(path: str, owner: int) -> None:
    staged = files.staged_name(path)
    files.write_json(staged, {"version": 1, "owner": owner})
    try:
        os.link(staged, path)
        files.fsync(os.path.dirname(path))
        point("users given")
    except FileExistsError:
        pass  # another was faster, perhaps for the same owner
    finally:
        files.unlink(staged)
