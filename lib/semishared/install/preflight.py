# SPDX-License-Identifier: Apache-2.0
"""Look at a machine, for install.sh and `semishared doctor`, and print JSON.

Programs, our files, stores, the local disk, libvirt.

This goes to hosts as a program, which need not have anything of ours, or not the same: examine.py puts the
two modules that are imported here into their places. The program's QUESTION is base64 of JSON, see
`Question`. Nothing is changed but a file of our own on each store, which is removed again, and this machine's
signature in what is to be its own; what hangs costs seconds.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

from ..tools.key import compared
from ..tools.os_release import release
from ..tools.signatures import STAGED, boot, sign

NAME = "semishared"
PATH = "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin"
ANSWER_S = 5
"""Seconds that a store or a program gets."""
LIBVIRT_S = 15
"""Seconds that libvirt gets: the first client waits until libvirtd has looked at all its QEMUs."""
# a|b: one of them
NEEDS = {
    "front-end": ("ssh", "rsync", "qemu-img", "setpriv", "tar"),
    "host": ("qemu-img", "virsh", "setpriv", "tar", "rsync"),
}
"""Programs without which nothing works, by what the machine is."""
WANTS = {
    "front-end": ("genisoimage|mkisofs|xorriso", "curl"),
    "host": ("zstd", "lzop", "udp-sender", "udp-receiver", "qemu-io", "qemu-storage-daemon"),
}
"""Programs without which some things do not work."""
VERSIONS = ("qemu-img", "virsh", "zstd", "lzop", "rsync", "rbd", "sudo")
"""Programs with an option --version; of others only their presence is known."""
PARTS = (f"lib/{NAME}", f"tm/{NAME}", f"datastore/{NAME}", f"vmm/{NAME}", f"etc/{NAME}.conf")


class Question(NamedTuple):
    """What to look at besides the programs."""

    roles: Tuple[str, ...] = ("host",)
    """What the machine is: front-end, host, or both; nothing: no programs are looked at."""
    scripts: str = ""
    """Directory with OpenNebula's scripts on this machine: remotes/, or what `onehost sync` made of it."""
    location: str = ""
    """DATASTORE_LOCATION; '' : no stores and no local disk are looked at."""
    stores: Tuple[str, ...] = ()
    """Directories of the image datastores that are mounted."""
    token: str = ""
    """Name of the file that the front-end has put into each store."""
    libvirt: str = ""
    """libvirt's URI, '' where no guests run."""
    ceph: Tuple[Tuple[str, str, str, str], ...] = ()
    """Per Ceph store: pool, user, configuration file, UUID of libvirt's secret."""
    systems: Tuple[str, ...] = ()
    """Directories of the system datastores."""
    versions: bool = False
    """Whether programs are started to say their versions; else it is only looked whether they are there."""
    key: Tuple[str, ...] = ()
    """Of a front-end: the path of its key, and a random word that was not used before."""


def encoded(question: Question) -> str:
    """Return a question as one word that no shell changes."""
    return base64.b64encode(json.dumps(question).encode()).decode()


def examine(question: Question) -> Dict[str, Any]:
    """Return all that was asked for; in the place of an unknown part is an error text."""
    with ThreadPoolExecutor(8) as pool:
        found: Dict[str, Any] = (
            {"programs": pool.submit(programs, question.versions)} if question.roles else {}
        )
        if question.scripts:
            found["tree"] = pool.submit(tree, question.scripts)
        if question.libvirt:
            found["libvirt"] = pool.submit(libvirt, question)
        answers = {name: future.result() for name, future in found.items()}
    answers.setdefault("programs", {})
    needed, wanted = (lacking(table, question, answers) for table in (NEEDS, WANTS))
    answers["lacks"] = {"needed": needed, "wanted": wanted}
    answers["python"] = list(sys.version_info[:3])
    answers["user"], answers["os"] = user(), release()
    answers["boot"], answers["up_s"] = boot(), up_s()
    if question.location:
        answers["local"] = limited(lambda: local(question.location))
        # In threads that may hang for ever: each store has its own, and the answer does not wait for hung
        # ones. A directory that is still to be made counts as the directory of all datastores.
        own = (f"{question.location}/.{NAME}", *question.systems) if question.systems else ()
        places = {path: path if os.path.isdir(path) else question.location for path in own}
        answers["signed"] = {path: limited(partial(sign, place)) for path, place in places.items()}
        states = {store: partial(store_state, store, question.token) for store in question.stores}
        answers["stores"] = {store: limited(state) for store, state in states.items()}
    if question.key:
        answers["key"] = {**compared(*question.key), "on": str(mounted(question.key[0]).get("type"))}
    answers["ceph"] = {row[0]: ceph(*row) for row in question.ceph}
    if question.ceph and not all(importlib.util.find_spec(name) for name in ("rados", "rbd")):
        needed.append("python3-rbd")
    if "host" in question.roles and not importlib.util.find_spec("libvirt"):
        # Needed for a guest that runs, moves or is resumed; all else works without.
        wanted.append("python3-libvirt")
    return answers


def user() -> str:
    """Return the name of this user, its number if it has none."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def up_s() -> float:
    with open("/proc/uptime", encoding="ascii") as file:
        return float(file.read().split()[0])


def limited(work: Callable[[], Any]) -> Any:
    """Return the result of `work`, or an error text, also if it hangs."""
    answer: List[Any] = [{"error": f"hangs: no answer within {ANSWER_S} s"}]

    def run() -> None:
        try:
            answer[0] = work()
        except OSError as e:
            answer[0] = {"error": f"{e.strerror}: {e.filename}"}

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    return answer[0]


def _which(name: str) -> Optional[str]:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{PATH}")


def said(argv: List[str], limit_s: float = ANSWER_S) -> Tuple[int, str]:
    """Run a program and return its exit code and output; 124 if it hangs, 127 if it is not there."""
    path = _which(argv[0])
    if path is None:
        return 127, f"{argv[0]} is not installed"
    try:
        done = subprocess.run(
            [path, *argv[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
            env={**os.environ, "LC_ALL": "C"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, f"{argv[0]} hangs"
    except OSError as e:
        return 126, f"{argv[0]}: {e.strerror}"
    return done.returncode, done.stdout.decode("utf-8", "replace").strip()


def version(name: str, ask: bool) -> Optional[str]:
    """Return a program's version, '' if unknown or not asked for, None if it is not there."""
    if not ask or name not in VERSIONS:
        return "" if _which(name) else None
    code, text = said([name, "--version"])
    match = re.search(r"\d+(?:\.\d+)+", text)
    return None if code == 127 else match.group() if match else ""


def programs(versions: bool) -> Dict[str, Optional[str]]:
    """Return the versions of all programs, or only which of them are there."""
    words = (*(word for table in (NEEDS, WANTS) for row in table.values() for word in row), *VERSIONS)
    return {name: version(name, versions) for word in words for name in word.split("|")}


def lacking(table: Mapping[str, Tuple[str, ...]], question: Question, answers: Dict[str, Any]) -> List[str]:
    """Return the programs of a table that this machine lacks."""
    words = dict.fromkeys(word for role in question.roles for word in table[role])
    return [word for word in words if all(answers["programs"][name] is None for name in word.split("|"))]


def tree(scripts: str) -> Dict[str, Any]:
    """Return the version of our package there, and a hash of each part ('': not there) without byte code."""
    parts = {part: digest(f"{scripts}/{part}") for part in PARTS}
    return {"version": installed(scripts), "parts": parts}


def installed(scripts: str) -> str:
    """Return the version of our package there, '' without a readable one."""
    try:
        with open(f"{scripts}/lib/{NAME}/__init__.py", encoding="utf-8") as file:
            found = re.search(r'^VERSION = "([^"]+)"', file.read(10000), re.MULTILINE)
    except (OSError, UnicodeError):
        return ""
    return found.group(1) if found else ""


def digest(directory: str) -> str:
    """Return a hash of names, contents and executable bits below, or of one file; '' if it is not there."""
    total = hashlib.sha256()
    if os.path.isfile(directory):
        with open(directory, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    for folder, names, files in os.walk(directory):
        names[:] = sorted(name for name in names if name != "__pycache__")
        for name in sorted(files):
            path = os.path.join(folder, name)
            try:
                with open(path, "rb") as file:
                    content = hashlib.sha256(file.read()).hexdigest()
            except OSError as e:
                content = str(e.strerror)
            total.update(
                f"{os.path.relpath(path, directory)} {os.access(path, os.X_OK)} {content}\n".encode()
            )
    return total.hexdigest() if os.path.isdir(directory) else ""


def local(location: str) -> Dict[str, Any]:
    """Return space and rights of the disk that has the base store."""
    base = f"{location}/.{NAME}"
    where = base if os.path.isdir(base) else location
    stat = os.statvfs(where)
    return {
        "where": where,
        "free": stat.f_bavail * stat.f_frsize,
        "total": stat.f_blocks * stat.f_frsize,
        "inodes": stat.f_favail,
        "no_inodes": not stat.f_files,
        "writable": os.access(where, os.W_OK | os.X_OK),
        "read_only": bool(stat.f_flag & os.ST_RDONLY),
    }


def mount_of(path: str, mountinfo: str) -> Dict[str, Any]:
    """Return type and options of the mount of `path`, without links; `mountinfo`: /proc/self/mountinfo."""
    found: Dict[str, Any] = {}
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        row, rest = before.split(), after.split()
        if len(row) < 6 or len(rest) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), row[4])
        is_above = path == point or path.startswith(f"{point.rstrip('/')}/")
        # Of two mounts on one point the later one covers the other.
        if is_above and len(point) >= len(found.get("point", "")):
            options = list(dict.fromkeys((*row[5].split(","), *rest[2].split(","))))
            found = {"point": point, "type": rest[0], "options": options}
    return found


def mounted(path: str) -> Dict[str, Any]:
    """Return type and options of the mount that `path` lies on here."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        return mount_of(os.path.realpath(path), file.read())


def marker(store: str) -> str:
    """Return the id in the store's marker (store/dir/marker.py), '' without a readable one."""
    try:
        side = os.open(f"{store}/.{NAME}", os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fd = os.open("store", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=side)
        finally:
            os.close(side)
        with open(fd, "rb") as file:
            found = json.loads(file.read(4096))["id"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    return found if isinstance(found, str) else ""


def store_state(store: str, token: str) -> Dict[str, Any]:
    """Return whether a store is there, is the front-end's own, and is writable; and how it is mounted."""
    answer: Dict[str, Any] = {
        "empty": not os.listdir(store),
        "same": os.path.exists(f"{store}/{token}"),
        "writable": False,
        "marker": marker(store),
        "passable": bool(os.stat(store).st_mode & 0o001),
    }
    answer["mount"] = mounted(store)
    # If this is killed in between, `semishared gc` knows the name.
    path = f"{store}/{STAGED}doctor.{os.uname().nodename}-{os.getpid()}"
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        os.unlink(path)
        answer["writable"] = True
    except OSError as e:
        answer["reason"] = e.strerror
    return answer


def libvirt(question: Question) -> Dict[str, Any]:
    """Return libvirt's and QEMU's versions, confinement and known secrets; an error if libvirt is silent."""
    code, text = said(["virsh", "-c", question.libvirt, "version"], LIBVIRT_S)
    if code:
        return {"error": text.splitlines()[-1] if text else f"virsh ended with {code}"}
    rows = re.findall(r"^(?:Using library: libvirt|Running hypervisor: \w+) ([\d.]+)$", text, re.MULTILINE)
    secrets = said(["virsh", "-c", question.libvirt, "secret-list"])[1] if question.ceph else ""
    capabilities = said(["virsh", "-c", question.libvirt, "capabilities"], LIBVIRT_S)[1]
    return {
        "libvirt": rows[0] if rows else "",
        "qemu": rows[1] if len(rows) > 1 else "",
        "secrets": re.findall(r"[0-9a-f-]{36}", secrets),
        "virtiofs": knows_virtiofs(said(["virsh", "-c", question.libvirt, "domcapabilities"], LIBVIRT_S)),
        "confines": confines(capabilities),
        "user": qemu_user(capabilities),
        "processor": processor(),
        "passed_through": passed_through(),
    }


def processor(path: str = "/proc/cpuinfo") -> Dict[str, Any]:
    """Return what the kernel says of this machine's first processor: of which kind it is, its name, and what
    it has.

    Two kernels may have other words for what it has, so the kernel is said too.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        rows = re.findall(r"^([^\t:\n]+?)[\t ]*: *(.*)$", file.read().partition("\n\n")[0], re.MULTILINE)
    said = dict(rows)
    # x86, or ARM.
    names = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU variant", "CPU part")
    kind = " ".join(said[name] for name in names if name in said)
    has = said.get("flags") or said.get("Features") or ""
    name = said.get("model name") or kind
    return {"kind": kind, "name": name, "has": sorted(set(has.split())), "kernel": os.uname().release}


def passed_through() -> int:
    """Return how many guests run here whose CPU is this machine's own (host-passthrough)."""
    found = 0
    for entry in os.scandir("/proc"):
        try:
            with open(f"{entry.path}/cmdline", "rb") as file:
                words = file.read().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue  # it has ended, or is hidden from others
        cpu = words[words.index(b"-cpu") + 1 :][:1] if b"-cpu" in words and b"qemu" in words[0] else []
        found += any(word.split(b",")[0] == b"host" for word in cpu)
    return found


def knows_virtiofs(answer: Tuple[int, str]) -> Optional[bool]:
    """Return whether the domain capabilities offer directories by virtiofs; None if they do not say."""
    if answer[0] or "<filesystem" not in answer[1]:
        return None
    found = re.search(r"<filesystem supported='yes'>.*?</filesystem>", answer[1], re.DOTALL)
    return bool(found and "<value>virtiofs</value>" in found.group())


def confines(capabilities: str) -> List[str]:
    """Return how libvirt confines QEMU (apparmor, selinux) besides users and groups, by its capabilities."""
    host = capabilities.partition("<guest>")[0]
    models = re.findall(r"<secmodel>\s*<model>(\w+)</model>", host)
    return [model for model in models if model not in ("dac", "none")]


def qemu_user(capabilities: str) -> str:
    """Return the user as which libvirt runs QEMU, by its capabilities; its number if it has no name here, ''
    if they do not say.
    """
    models = re.findall(r"<secmodel>\s*<model>dac</model>(.*?)</secmodel>", capabilities, re.DOTALL)
    found = re.search(r"<baselabel type='\w+'>\+(\d{1,9}):", models[0]) if models else None
    try:
        return pwd.getpwuid(int(found.group(1))).pw_name if found else ""
    except KeyError:
        return found.group(1) if found else ""


def ceph(pool: str, user: str, conf: str, _secret: str) -> Dict[str, Any]:
    """Return why `user` cannot list the pool from here, '' if it can."""
    options = ["-c", conf] if conf else []
    # Ceph itself waits for minutes; said() ends it sooner.
    code, text = said(["rbd", "--id", user, *options, "ls", pool])
    return {"error": "" if not code else (text.splitlines()[-1] if text else f"rbd ended with {code}")}


if __name__ == "__main__":
    asked = Question(*json.loads(base64.b64decode(sys.argv[1])))
    print(json.dumps(examine(asked)), flush=True)
    # Not sys.exit: threads may hang in a store.
    os._exit(0)
