# SPDX-License-Identifier: Apache-2.0
"""Collect what a report of a fault needs into one file, a tar.xz: without passwords and keys.

It has versions (of semishared with its commit, of OpenNebula, of the front-end's programs), what doctor and
status say as JSON, oned.conf's attributes that concern storage, vmm_execrc's lines of ours, semishared.conf,
what OpenNebula knows of its hosts, mounts, and the last lines of ours in OpenNebula's logs. Nothing is sent,
and hosts are only asked what doctor and status ask them. Names of VMs, images and hosts, and addresses stay
as they are: look at the file before you pass it on.

exit codes: 0 all of it is there; 1 the file is there, and errors.txt in it says what is missing; 2 no file
could be made
"""

from __future__ import annotations

import argparse
import glob
import io
import json
import os
import re
import sys
import tarfile
import time
from collections import deque
from contextlib import contextmanager
from typing import IO, Any, Callable, Iterator

from .. import NAME
from ..errors import BadArguments, SemisharedError
from ..install import commit, edits, next_steps, oned_conf
from ..install.front_end import FrontEnd
from ..opennebula.oned import Oned
from ..tools.redact import Redactor
from ..tools.run import run as run_program
from ..wire.messages import RELEASE
from . import command as on
from .command import argument, put
from .doctor import located

ARGUMENTS = (
    argument("--output", metavar="FILE", default="", help="where to (default: a new file in this directory)"),
    argument("--root", metavar="DIR", default="", help="an OpenNebula whose files are below this directory"),
    on.JSON,
)
OF_STORAGE = re.compile(
    r"(?:TM_MAD|DATASTORE_MAD|VM_MAD|IM_MAD|TM_MAD_CONF|DS_MAD_CONF|SCRIPTS_REMOTE_DIR|DATASTORE_LOCATION"
    r"|DATASTORE_CAPACITY_CHECK|DEFAULT_\w+|INHERIT_\w+|\w+_RESTRICTED_ATTR|HOSTNAME|RAFT_\w+|FEDERATION"
    r"|LOG|MANAGER_TIMER|MONITORING_INTERVAL\w*|MAX_CONN\w*)\Z"
)
"""Attributes of oned.conf: those of the database and of authentication are not among them."""
OURS = re.compile(rf"{NAME}|SS\d{{3}}", re.IGNORECASE)
LOGS = (("oned.log", 2000), ("sched.log", 200), (f"{NAME}*.log", 2000), ("[0-9]*.log", 200))
"""Logs of OpenNebula, VMs' own among them, and how many of our last lines are taken of each."""
NEWEST = 40
"""So many logs of each kind, the newest."""
LAST = 64 << 20
"""Bytes of a log's end that are looked at."""
LIMIT_S = 1800
PROGRAMS = (
    ("uname", "-a"),
    ("qemu-img", "--version"),
    ("virsh", "--version"),
    ("ssh", "-V"),
    ("rsync", "--version"),
    ("rbd", "--version"),
    ("df", "-PT"),
)
SECRETS = ("/etc/ceph/*.keyring",)
"""Files with keys: what is found in them is taken out wherever it appears."""


class Bundle:
    """The parts of a bundle, each without secrets, and what is missing."""

    def __init__(self, redactor: Redactor) -> None:
        self.parts: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self._redactor = redactor

    def add(self, name: str, collected: Callable[[], Any]) -> None:
        """Add a part, text or JSON data; an error is noted in its place."""
        try:
            found = collected()
            if isinstance(found, str):
                self.parts[name] = self._redactor.text(found)
            else:
                self.parts[name] = json.dumps(self._redactor.data(found), indent=1) + "\n"
        except (OSError, ValueError, RecursionError, SemisharedError) as e:
            said = e.line() if isinstance(e, SemisharedError) else f"{type(e).__name__}: {e}"
            self.errors[name] = self._redactor.text(said)

    def write(self, file: IO[bytes], top: str) -> None:
        """Write all parts below the directory `top` of an archive; raise OSError."""
        parts = dict(self.parts)
        if self.errors:
            parts["errors.txt"] = "".join(f"{name}: {why}\n" for name, why in self.errors.items())
        with tarfile.open(fileobj=file, mode="w:xz") as archive:
            for name, text in sorted(parts.items()):
                content = text.encode("utf-8", "surrogateescape")
                member = tarfile.TarInfo(f"{top}/{name}")
                member.size, member.mtime, member.mode = len(content), int(time.time()), 0o600
                archive.addfile(member, io.BytesIO(content))


@contextmanager
def made(path: str) -> Iterator[IO[bytes]]:
    """Yield a new file that its owner alone may read, which goes again if its maker fails."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise BadArguments(f"{path} is there already: name another file (--output)") from None
    except OSError as e:
        raise BadArguments(f"no file can be made at {path}: {e.strerror} (--output)") from None
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
    except BaseException:
        os.unlink(path)
        raise


def run(arguments: argparse.Namespace) -> int:
    """Carry out `semishared support-bundle`."""
    on.refuse_root(": it has the password of OpenNebula, and asks as the drivers do")
    place = located(arguments.root)
    top = f"{NAME}-support-{os.uname().nodename}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = arguments.output or f"{top}.tar.xz"
    bundle = Bundle(Redactor(known_secrets()))
    with made(path) as file:
        collect(bundle, place, arguments.root)
        bundle.write(file, top)
    if arguments.json:
        on.put_json({"file": os.path.abspath(path), "parts": sorted(bundle.parts), "errors": bundle.errors})
    else:
        for name, why in bundle.errors.items():
            on.warn(f"{name} is missing: {why}")
        put(f"{path}: {len(bundle.parts)} parts. Look at them before you pass them on: tar -xf {path}")
    return 1 if bundle.errors else 0


def collect(bundle: Bundle, place: FrontEnd, root: str = "") -> None:
    """Add all parts."""
    bundle.add("versions.json", lambda: versions(place))
    for name in ("doctor", "status"):
        # status first says nothing on stderr that it has not in its JSON.
        more = ("--root", root) if root and name == "doctor" else ()
        bundle.add(f"{name}.json", lambda words=(name, "--json", *more): own(*words))  # type: ignore[misc]
    bundle.add(f"{NAME}.conf", lambda: read(f"{place.remotes}/etc/{NAME}.conf"))
    if place.etc is not None:
        bundle.add("oned.conf", lambda: of_storage(edits.read(place.oned_conf), place.oned_conf))
        bundle.add("vmm_execrc", lambda: of_execrc(edits.read(place.execrc)))
    bundle.add("hosts.json", hosts)
    bundle.add("mounts.txt", lambda: read("/proc/self/mounts"))
    logs = f"{root}/var/log/one"
    if place.self_contained:
        logs = f"{os.path.dirname(place.remotes)}"
    for path, last in logs_of(logs):
        bundle.add(f"log/{os.path.basename(path)}", lambda path=path, last=last: last_lines(path, last))  # type: ignore[misc]


def known_secrets() -> list[str]:
    """Return the password by which oned is asked, and the keys of Ceph that this user can read."""
    auth = os.environ.get("ONE_AUTH") or f"{os.path.expanduser('~')}/.one/one_auth"
    found = []
    for path in (auth, *(path for pattern in SECRETS for path in glob.glob(pattern))):
        try:
            text = read(path)
        except OSError:
            continue
        keys = re.findall(r"^\s*key\s*=\s*(\S+)", text, re.MULTILINE)
        found += keys if path != auth else [text.strip()]
    return found


def versions(place: FrontEnd) -> dict[str, Any]:
    """Return what runs on the front-end, by name."""
    found: dict[str, Any] = {
        NAME: commit.version(),
        "release": RELEASE,
        "opennebula": ".".join(map(str, place.version())),
        "python": sys.version,
        "os": read("/etc/os-release"),
    }
    for words in PROGRAMS:
        try:
            found[" ".join(words)] = run_program([*words], ok=tuple(range(256))).strip()
        except SemisharedError as e:
            found[" ".join(words)] = e.detail
    return found


def own(*words: str) -> Any:
    """Return the JSON that a verb of this command prints, whatever it has found."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    places = (f"{package}/{NAME}", f"{os.path.dirname(os.path.dirname(package))}/bin/{NAME}")
    command = next(filter(os.path.isfile, places), NAME)
    argv = [sys.executable, "-I", command, *words]
    return json.loads(run_program(argv, ok=(0, 1, 2), timeout_s=LIMIT_S, keep=next_steps.SITE))


def read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read(LAST)


def of_storage(text: str, path: str) -> str:
    """Return the attributes of oned.conf that say how storage is used; raise BadConfiguration."""
    found = (it for it in oned_conf.parse(text, path) if OF_STORAGE.match(it.name.upper()))
    return "".join(f"{text[it.start : it.end]}\n" for it in found)


def of_execrc(text: str) -> str:
    """Return vmm_execrc without its comments."""
    lines = (line for line in text.splitlines(True) if not line.lstrip().startswith("#") and line.strip())
    return "".join(lines)


def hosts() -> list[dict[str, Any]]:
    """Return what OpenNebula knows of hosts that concerns us."""
    rows = []
    for host in Oned().hosts():
        ours = {name: text for name, text in host.attributes().items() if NAME.upper() in name.upper()}
        rows.append(
            {"id": host.id, "name": host.name, "cluster": host.cluster, "vm_mad": host.text("VM_MAD")}
        )
        rows[-1].update(offline=host.is_offline, monitored=host.is_monitored, attributes=ours)
        rows[-1]["told"] = host.fields("TEMPLATE/" + NAME.upper())
    return rows


def logs_of(directory: str) -> Iterator[tuple[str, int]]:
    """Yield the newest logs of each kind, and how many lines are taken of them."""
    for pattern, last in LOGS:
        paths = [
            path for path in glob.glob(f"{glob.escape(directory)}/{pattern}") if not os.path.islink(path)
        ]
        paths = sorted(filter(os.path.isfile, paths), key=os.path.getmtime)[-NEWEST:]
        yield from ((path, last) for path in paths)


def last_lines(path: str, count: int) -> str:
    """Return the last lines of a log that are of ours."""
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - LAST))
        lines = (line.decode("utf-8", "replace") for line in file)
        is_ours = os.path.basename(path).startswith(NAME)
        return "".join(deque((line for line in lines if is_ours or OURS.search(line)), count))
