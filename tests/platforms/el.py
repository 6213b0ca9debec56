# SPDX-License-Identifier: Apache-2.0
"""A host of the lab arranged as one of EL: QEMU is /usr/libexec/qemu-kvm and nothing else, its user can be
qemu, and /usr/bin/python3 says that it is 3.6, with a newer one beside it.

What is changed lies over the node's /usr until its power is cut: its root is shared with other labs. The
programs stay Debian's. No package of Debian 13's libvirt has virtqemud: a libvirtd is at its path, and its
sockets are at those of virtqemud, so that clients go straight to them. EL's machine types, libvirt's other
daemons and SELinux are not there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from lab import Node

UID = 107
"""Of user and group qemu, as EL's packages have it."""
OVER = "/var/lib/usr-of-el"
KVM = "/usr/libexec/qemu-kvm"
DAEMON, SOCKETS = "/usr/sbin/virtqemud", "/run/libvirt"
OLD_PYTHON = """\
#!{newer} -IS
import ast, os, sys
from importlib.machinery import SourceFileLoader

def checked(source, path):
    "Compile what Python 3.6 could read: its grammar, and no annotations that are not evaluated."
    for node in ast.parse(source, path, feature_version=(3, 6)).body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            if any(name.name == "annotations" for name in node.names):
                raise SyntaxError("future feature annotations is not defined", (path, node.lineno, 1, ""))
    return compile(source, path, "exec", dont_inherit=True)

def get_code(self, name, before=SourceFileLoader.get_code):
    path = self.get_filename(name)
    return checked(self.get_data(path), path) if "/semishared/" in path else before(self, name)

SourceFileLoader.get_code = get_code
sys.version_info = (3, 6, 8, "final", 0)
sys.version, sys.executable = "3.6.8", "/usr/bin/python3"
del os.memfd_create  # of 3.8
words = sys.argv[1:]
while words and words[0].startswith("-") and words[0] not in ("-", "-c"):
    words.pop(0)
if words[0] == "-c":
    source, path, sys.argv = words[1], "-c", ["-c", *words[2:]]
elif words[0] == "-":
    source, path, sys.argv = sys.stdin.read(), "-", words
else:
    path, sys.argv = words[0], words
    with open(path, encoding="utf-8") as file:
        source = file.read()
code, names = checked(source, path), globals()
names.update(__file__=path)
exec(code, names)
"""


def root(node: Node, *words: str) -> None:
    """Run a command as root."""
    node.run(list(words), user="root")


def age_python(node: Node) -> None:
    """Lay what can be changed over a node's /usr, and let its /usr/bin/python3 say that it is 3.6."""
    mount = f"lowerdir=/usr,upperdir={OVER}/upper,workdir={OVER}/work"
    root(node, "mkdir", "-p", f"{OVER}/upper", f"{OVER}/work")
    root(node, "mount", "-t", "overlay", "overlay", "-o", mount, "/usr")
    newer = node.run(["readlink", "/usr/bin/python3"]).stdout.decode().strip()
    root(node, "rm", "/usr/bin/python3")
    say_36(node, f"/usr/bin/{newer}")


def arrange(node: Node) -> None:
    """Make a node one."""
    age_python(node)
    root(node, "mv", "/usr/bin/qemu-system-x86_64", KVM)
    root(node, "sh", "-c", "rm -f /usr/bin/kvm /usr/bin/qemu-system-*")
    # So does OpenNebula's package for hosts.
    root(node, "ln", "-sf", KVM, "/usr/bin/qemu-kvm-one")
    end_libvirt(node)
    root(node, "mv", "/usr/sbin/libvirtd", DAEMON)
    begin_libvirt(node)


def say_36(node: Node, by: str) -> None:
    """Let /usr/bin/python3 say that it is 3.6; it is the Python at `by`."""
    node.path("/usr/bin/python3").write_text(OLD_PYTHON.format(newer=by))
    root(node, "chmod", "755", "/usr/bin/python3")


@contextmanager
def alone(node: Node) -> Iterator[None]:
    """Let it be the only Python there."""
    by = node.path("/usr/bin/python3").read_text().split()[0][2:]
    elsewhere = "/usr/lib/its-python"
    root(node, "mv", by, elsewhere)
    say_36(node, elsewhere)
    try:
        yield
    finally:
        root(node, "mv", elsewhere, by)
        say_36(node, by)


@contextmanager
def qemu_is_qemu(node: Node) -> Iterator[None]:
    """Let libvirt run QEMU as its own user, as where qemu.conf says nothing."""
    rows = {"passwd": f"qemu:x:{UID}:{UID}::/:/sbin/nologin\n", "group": f"qemu:x:{UID}:\n"}
    paths = {name: node.path(f"/etc/{name}") for name in (*rows, "libvirt/qemu.conf")}
    before = {name: path.read_text() for name, path in paths.items()}
    for name, row in rows.items():
        others = [line for line in before[name].splitlines(True) if line.split(":")[2] != str(UID)]
        paths[name].write_text("".join([*others, row]))
    kept = [line for line in before["libvirt/qemu.conf"].splitlines(True) if "ownership" not in line]
    paths["libvirt/qemu.conf"].write_text("".join(kept).replace('"oneadmin"', '"qemu"'))
    owned = [f"/var/{part}/libvirt/qemu" for part in ("lib", "cache", "log")]
    root(node, "chown", "-R", "qemu:", *owned)
    end_libvirt(node)
    begin_libvirt(node)
    try:
        yield
    finally:
        for name, path in paths.items():
            path.write_text(before[name])
        root(node, "chown", "-R", "oneadmin:", *owned)
        end_libvirt(node)
    begin_libvirt(node)


def end_libvirt(node: Node) -> None:
    """End libvirt's daemon, whose name is another one than that of its file."""
    pid = node.path("/run/libvirtd.pid").read_text().strip()
    root(node, "kill", pid)
    while node.path(f"/proc/{pid}").exists():
        time.sleep(0.02)


def begin_libvirt(node: Node) -> None:
    """Begin it as the node's first process has, and let clients find it where a modular one would be."""
    node.run([DAEMON, "-d"], user="root", env={"LD_PRELOAD": node.site.sharedfs})
    for name in ("sock", "sock-ro"):
        root(node, "mv", f"{SOCKETS}/libvirt-{name}", f"{SOCKETS}/virtqemud-{name}")
    node.wait_for(["virsh", "-q", "-c", "qemu:///system", "capabilities"], 30)
