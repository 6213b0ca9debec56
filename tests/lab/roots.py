# SPDX-License-Identifier: Apache-2.0
"""Make roots of other Debian releases, whose programs a node of the lab may have in the place of this
machine's.

A root has its own libvirtd, QEMU, Python, sshd and Ceph. mmdebstrap makes it from the mirrors that apt
on this machine uses, once: it is kept in build/roots, which `make clean` leaves. The kernel is this
machine's.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.caches import CHECKOUT, EMULATORS, HERE

FOLDER = Path(os.environ.get("SEMISHARED_LAB_ROOTS", CHECKOUT / "build/roots"))
PACKAGES = HERE / "packages-root.txt"
MACHINE = Path("/")
"""The root of nodes for which no release is said."""
CODENAMES = {11: "bullseye", 13: "trixie"}
PYTHONS = {11: "3.9", 13: "3.13"}
POCKETS = {11: ("",), 13: ("", "-security")}
"""Where a release's packages are. The security archive has lists of a release that is out of support, whose
packages it no longer has.
"""
SEPARATE_USR = (11,)
"""Releases that mmdebstrap gives a /bin of its own, where their own installer merges it with /usr."""
MACHINES = {11: "pc-i440fx-5.2", None: "pc-i440fx-7.2", 13: "pc-i440fx-10.0"}
"""The newest machine type of each release's QEMU, the oldest release first; None is this machine's."""
PLATFORM = "SEMISHARED_PLATFORM"
"""Of the environment: which releases the nodes of labs have, if those that put them up do not say."""
LIBVIRT_7_0 = "11" in os.environ.get(PLATFORM, "").split("+")
"""All nodes have it: it backs no running guest up, and 0.1.0 moves no raw layer under it."""
CEPH = {"ceph18": 13}
"""Which release has that version of Ceph, for the cluster's daemons. This machine's is 16."""
CLUSTER = "ceph"
"""The node that has them."""
UNREAD = ("doc", "man", "info", "locale", "lintian", "help")
"""Of /usr/share: what no program in a node reads."""
MERGE = 'cd "$1" && for name in bin sbin lib lib64; do mkdir -p usr/$name && ln -s usr/$name .; done'
"""A hook of mmdebstrap's, as its own of that purpose wants an apt in the root."""
EMPTY = {13: ("usr/lib/python3/dist-packages/bcrypt/__init__.py",)}
"""Files of a release that have nothing in them. Debian 13's ceph-mgr loads no module: all begin with this
one, which no Python but a process's first can load. They need it for passwords, which no lab has.
"""
KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
PASSED_ON = re.compile(r'^Acquire::(?:Check-Valid-Until|https?::[\w:.-]*Proxy[\w:.-]*) "[^"]*";$')
"""Of what apt is configured with on this machine: how it reaches its mirrors."""


def of(release: int | None) -> Path:
    """Return the root of a Debian release, or this machine's; raise RuntimeError where none was made of what
    PACKAGES now lists.
    """
    if release is None:
        return MACHINE
    if not _is_made(release):
        how = f"make platform-root RELEASE={release}"
        raise RuntimeError(f"no root of Debian {release} in {FOLDER}: run {how}")
    return FOLDER / str(release)


def platform(name: str, hosts: int) -> dict[str, int]:
    """Return which nodes of a lab have which release: `11` or `13` the front-end and all hosts, `mixed` the
    front-end and every other host 13 beside this machine's, `ceph18` the cluster; `13+ceph18` is both, ''
    none.
    """
    wanted = {}
    for part in filter(None, name.split("+")):
        if part in CEPH:
            wanted[CLUSTER] = CEPH[part]
            continue
        numbers = range(2, hosts + 1, 2) if part == "mixed" else range(1, hosts + 1)
        nodes = ["fe", *(f"h{number}" for number in numbers)]
        wanted.update(dict.fromkeys(nodes, 13 if part == "mixed" else int(part)))
    return wanted


def of_cluster() -> Path:
    """Return the root whose programs a cluster has that is no node of a lab."""
    return of(platform(os.environ.get(PLATFORM, ""), 0).get(CLUSTER))


def within(root: Path) -> list[str]:
    """Return what starts a command, put behind it, on this machine with the programs of a root."""
    if root == MACHINE:
        return []
    # /usr last: from there on all that is started is the root's.
    parts = " ".join(f"/{part}" for part in ("etc/alternatives", "etc/ld.so.cache", "usr"))
    mounts = f'for part in {parts}; do mount --rbind "$0$part" "$part"; done; exec "$@"'
    return ["unshare", "--mount", "sh", "-euc", mounts, str(root)]


def machine(releases: Iterable[int | None]) -> str:
    """Return the machine type of guests that all hosts of these releases can run: QEMU's default where all
    have the same.
    """
    among = set(releases)
    return "pc" if len(among) < 2 else next(MACHINES[release] for release in MACHINES if release in among)


def make(release: int) -> Path:
    """Return the root of a Debian release, made if it is not there; raise RuntimeError with the end of
    mmdebstrap's log.
    """
    if release not in CODENAMES:
        others = ", ".join(map(str, CODENAMES))
        raise RuntimeError(f"no root of Debian {release} can be made, but of {others}")
    root = FOLDER / str(release)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with _locked():
        if not _is_made(release):
            _note(release).unlink(missing_ok=True)
            subprocess.run(["rm", "-rf", "--one-file-system", "--", str(root)], check=True)
            _install(root, release)
            _note(release).write_text(_content(release))
        _install_tests(release)
    return root


def _install_tests(release: int) -> None:
    """Have pytest for a release's Python beside its root; raise RuntimeError where pip cannot."""
    target, wanted = FOLDER / f"{release}.tests", CHECKOUT / "tests/requirements-root.txt"
    known = target / wanted.name
    if known.exists() and known.read_text() == wanted.read_text():
        return
    shutil.rmtree(target, ignore_errors=True)
    words = [str(CHECKOUT / "build/venv/bin/pip"), "install", "--quiet", "--disable-pip-version-check"]
    words += ["--only-binary=:all:", f"--python-version={PYTHONS[release]}", f"--target={target}"]
    done = subprocess.run([*words, f"--requirement={wanted}"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pip cannot install {wanted.name}: {done.stderr[-2000:]}")
    shutil.copy(wanted, known)


@contextmanager
def _locked() -> Iterator[None]:
    handle = os.open(FOLDER, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _note(release: int) -> Path:
    return FOLDER / f"{release}.made"


def _content(release: int) -> str:
    """Return what says whether a root that was made is the one which would be made now."""
    return hashlib.sha256("\n".join([*_packages(release), *EMPTY.get(release, ())]).encode()).hexdigest()


def _is_made(release: int) -> bool:
    try:
        return _note(release).read_text() == _content(release)
    except FileNotFoundError:
        return False


def _packages(release: int) -> list[str]:
    """Return what PACKAGES lists, but for lines that name other releases only."""
    lines = (line.partition("#")[0].split() for line in PACKAGES.read_text().splitlines())
    return [words[0] for words in lines if words and (not words[1:] or str(release) in words[1:])]


def _mirrors(release: int) -> list[str]:
    """Return apt's lines for a release: its packages are where this machine has those of its own."""
    mine = re.search(r"^VERSION_CODENAME=(\w+)$", Path("/etc/os-release").read_text(), re.MULTILINE)
    words = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME)", "Created-By: Packages"]
    said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    found: dict[str, str] = {}
    for line in said.splitlines():
        address, _, suite = line.partition(" ")
        found.setdefault(suite, address)
    lines = [
        f"deb {found[f'{mine[1]}{pocket}']} {CODENAMES[release]}{pocket} main"
        for pocket in POCKETS[release]
        if mine and f"{mine[1]}{pocket}" in found
    ]
    if not lines:
        raise RuntimeError("apt on this machine has no mirror of its own Debian release")
    return lines


def _install(root: Path, release: int) -> None:
    configured = subprocess.run(["apt-config", "dump"], check=True, capture_output=True, text=True).stdout
    apt = ['APT::Install-Recommends "false";', *filter(PASSED_ON.match, configured.splitlines())]
    words = ["mmdebstrap", "--mode=root", "--variant=essential", "--format=directory", f"--keyring={KEYS}"]
    words += [f"--aptopt={option}" for option in apt]
    words += [f"--dpkgopt=path-exclude=/usr/share/{part}/*" for part in UNREAD]
    words += [f"--include={','.join(_packages(release))}"]
    words += [f"--setup-hook={MERGE}"] if release in SEPARATE_USR else []
    done = subprocess.run(
        [*words, CODENAMES[release], str(root), *_mirrors(release)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        shutil.rmtree(root, ignore_errors=True)
        raise RuntimeError(f"mmdebstrap cannot make a root of Debian {release}: {done.stderr[-2000:]}")
    for name in EMPTY.get(release, ()):
        (root / name).write_text("")
    # The name that OpenNebula's domain XML has for it, as provision.sh gives it on this machine.
    libvirts, opennebulas = EMULATORS
    (root / opennebulas.lstrip("/")).symlink_to(Path(libvirts).name)
