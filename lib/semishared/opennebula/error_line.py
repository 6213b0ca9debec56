# SPDX-License-Identifier: Apache-2.0
"""The line of a failed action as oned gets it: the error's id, what it is about, the reason; paths last.

oned keeps the first 100 characters of a VM's error, 39 of them its own ("Error executing image transfer
script: "). In the 61 that remain a user has to find which error it is, which VM, disk, image or datastore it
is about, and why. Code deep in a store or on a host knows the path of an image alone, and its detail names
that. oned's arguments say what is at that path: so the words are put in its place here, once for all details,
and the path at the end.

    SS020 image 7 is not there on h1; check the path ... [clone; /var/lib/one/datastores/100/4b25f89f25c3c370]

Only the first SHOWN characters are changed: a path behind them is in no reason's way.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Mapping

from ..errors import SemisharedError
from ..model.disk import names as disk_names

if TYPE_CHECKING:
    from .args import Subject

SHOWN = 61
"""Characters of the user's line that oned keeps."""
SHORT = 16
"""Characters of a path or name that may stay before the reason."""
LONGEST_SERVER = 30
"""Characters of a server's name that stay."""
_REST = r"[^\s,;'\"()\[\]]+"
_ALONE = r"(?<![\w./:@~\-])"
_PATH = rf"{_ALONE}/{_REST}"
_URL = rf"[a-z][a-z0-9+.\-]*://{_REST}"
_HASH = r"[0-9a-f]{32,}"
_STORE = r"(/.*)/datastores/(\d+)"
_COMMAND = r"(\S+)( .*?)?: (exit code \d+|killed by signal \d+): (?=.)"
_PART = r"(?:(?:the|no) )?[\w*]+(?: \d+| = \S+)?(?: of disk \d+)?"
_NOUN = r"(?:VM|image|datastore|backup) \d+\b|host [A-Za-z0-9]|disk \d+ of VM \d+\b"


def rendered(error: SemisharedError, action: str, subject: Subject | None) -> str:
    """Return the line for an error of `action`; `subject` is None as long as that is unknown."""
    reason, command = _reason_first(error.reason)
    noun = subject.noun if subject else action
    # What stands before the reason counts, whichever form it will have.
    said, paths = _paths_last(reason, subject.names if subject else {}, SHOWN - len(f"{error.id} "))
    last = "; ".join([action, *command, *paths])
    return f"{error.id} {_with_noun(said, noun)}; {error.remedy} [{last}]"


def _with_noun(said: str, noun: str) -> str:
    """Return what is said with `noun` before it, unless it begins with one that a user knows."""
    said = re.sub(r"\Adisk (\d+): (?=VM \d+ disk \1\b)", "", said)
    if re.match(_NOUN, said) or said.startswith(noun):
        return said
    vm = re.match(r"VM \d+", noun)
    if vm and re.match(r"disk \d+\b", said):
        return f"{vm.group()} {said}"
    return f"{noun}: {_once(said, noun)}"


def _once(said: str, noun: str) -> str:
    """Return what is said behind a noun without that noun at its beginning: `SIZE of image 7 is 0`.

    That would be up to 15 of the SHOWN characters. What is no attribute, number or part stays: `a copy
    of image 7` is not the image's.
    """
    of, _, disk = noun.partition(" disk ")
    same = rf"(?:{re.escape(noun)}|disk {disk}(?: of {of})?)" if disk.isdigit() else re.escape(noun)
    return re.sub(rf"\A({_PART}) of {same}(?![\w-]| disk \d| of )", r"\1", said)


def _reason_first(detail: str) -> tuple[str, list[str]]:
    """Return a detail, and the command line in it that stood before what the program has said."""
    match = re.match(_COMMAND, detail)
    if not match or not match.group(2):
        return detail, []
    program = os.path.basename(match.group(1).strip("'"))
    said = detail[match.end() :]
    said = said if said.startswith(f"{program}:") else f"{program}: {said}"
    return f"{said} ({match.group(3)})", [match.group(1) + match.group(2)]


def _paths_last(detail: str, names: Mapping[str, str], shown: int) -> tuple[str, list[str]]:
    """Return a detail with words in the place of long paths among its first characters, and these paths."""
    known = "".join(_pattern(name) for name in sorted(names, key=len, reverse=True))
    said, at, paths = "", 0, []
    for match in re.finditer(f"{known}{_URL}|{_PATH}|{_HASH}", detail):
        path = match.group().rstrip(".:")
        said, at = said + detail[at : match.start()], match.start()
        if len(said) >= shown:
            break
        words = _words(path, names)
        if words:
            kind = f"{words.partition(' ')[0]} "
            said = said[: -len(kind)] if said.endswith(kind) else said
            said, at = said + words, at + len(path)
            paths += [path] if path not in paths else []
    return said + detail[at:], paths


def _pattern(name: str) -> str:
    """Return what matches a name and, if it is a path, what is below it."""
    below = rf"(?:(?:{re.escape(disk_names.layers(''))})?/{_REST})?" if name.startswith("/") else ""
    return rf"{_ALONE}{re.escape(name)}{below}(?![\w/\-])|"


def _words(path: str, names: Mapping[str, str]) -> str:
    """Return words for a path, URL or hash, '' if it can stay."""
    for name in sorted(names, key=len, reverse=True):
        if path == name:
            return names[name]
        if path.startswith((f"{name}/", f"{name}{disk_names.layers('')}")):
            return _below(name, path, names[name])
    if len(path) <= SHORT:
        return ""
    store = re.fullmatch(_STORE, path)
    if store and _has_datastores(store.group(1), names):
        return f"datastore {store.group(2)}"
    if re.fullmatch(_HASH, path):
        return f"{path[:8]}.."
    if "://" in path:
        return path.partition("://")[2].partition("/")[0].rpartition("@")[2][:LONGEST_SERVER]
    return _short(os.path.basename(path) or path)


def _has_datastores(directory: str, names: Mapping[str, str]) -> bool:
    """Tell whether OpenNebula has its datastores below a directory, which a user's path may look like."""
    known = {match.group(1) for match in map(re.compile(rf"{_STORE}(?:/|\Z)").match, names) if match}
    return not known or directory in known


def _below(name: str, path: str, noun: str) -> str:
    """Return words for a path below `name`, which has `noun`."""
    disk = disk_names.disk_file(path)
    if disk and disk.vm_dir == name:
        return f"{noun} disk {disk.disk}{f' layer {disk.layer}' if disk.layer else ''}"
    layer = disk_names.layer_of(path)
    if layer and path == disk_names.layer(name, layer):
        return f"{noun} snapshot {layer}"
    return f"{noun}: {_short(os.path.basename(path))}"


def _short(name: str) -> str:
    return name if len(name) <= SHORT else f"{name[: SHORT - 2]}.."
