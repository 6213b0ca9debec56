# SPDX-License-Identifier: Apache-2.0
"""What a recording plants on the machines of a lab: what comes before drivers and commands, and what looks.

A driver's script is called X.real, and X notes what it gets, what it answers, and what lies on the host after
it. Commands are noted by what comes before them in PATH.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Iterable, Sequence

from lab import Node

LOG, LOOK, COMMANDS = "/var/tmp/calls", "/var/tmp/look", "/var/tmp/commands"
SHIMS = "/usr/local/bin"
"""Of the root in which a real OpenNebula runs."""
NOTED = ("qemu-img", "qemu-io", "qemu-nbd", "nbdinfo", "rbd", "rsync", "virsh")

WRAPPER = r"""#!/usr/bin/python3 -ISB
import fcntl, json, os, subprocess, sys, time
path, argv = os.path.abspath(sys.argv[0]), sys.argv[1:]
kind, driver, action = path.split("/")[-3:]
began, stdin = time.time(), sys.stdin.buffer.read()
call = {"kind": kind, "driver": driver, "action": action, "argv": argv, "host": "fe", "script": path,
        "cwd": os.getcwd(), "env": {k: v for k, v in os.environ.items() if k.startswith("ONE")},
        "stdin": stdin.decode(errors="replace"), "t": began}
parent = os.getppid()
with open("/proc/%d/cmdline" % parent, "rb") as file:
    call["ppid_cmd"] = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
done = subprocess.run([path + ".real", *argv], input=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
call.update(rc=done.returncode, stdout=done.stdout.decode(errors="replace"),
            stderr=done.stderr.decode(errors="replace"))
call["wall_ms"] = round(1000 * (time.time() - began), 1)
host, _, place = (argv[0] if argv else "").partition(":")
if place.startswith("/") and "backup" in action or action == "restore" and kind == "tm":
    there = ["ssh", host, "/usr/bin/python3", "-ISB", "@LOOK@", place]
    seen = subprocess.run(there, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    call["left"] = json.loads(seen.stdout) if not seen.returncode else seen.stderr.decode(errors="replace")
with open("@LOG@", "a") as log:
    fcntl.flock(log, fcntl.LOCK_EX)
    log.write(json.dumps(call) + "\n")
sys.stdout.write(call["stdout"])
sys.stdout.flush()
sys.stderr.write(call["stderr"])
sys.exit(call["rc"])
"""

SHIM = r"""#!/bin/bash
# Notes a command of drivers, and is it: who is root is libvirtd. \x1f ends a word, \x1e a command.
name=${0##*/}
[ "$UID" != 0 ] || exec "/usr/bin/$name" "$@"
note() { printf '%s\x1f' "$EPOCHREALTIME" "$name" "$@" >>@COMMANDS@; printf '\x1e' >>@COMMANDS@; }
if [ "$name" = qemu-io ]; then
    script=$(cat)
    note "$@" "<" "$script"
    exec "/usr/bin/$name" "$@" <<<"$script"
fi
note "$@"
exec "/usr/bin/$name" "$@"
"""

LOOKER = r"""
import json, os, re, subprocess, sys
top = sys.argv[1]
def said(*words):
    done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return done.stdout.decode(errors="replace") if not done.returncode else ""
def header(path):
    info = json.loads(said("/usr/bin/qemu-img", "info", "-U", "--output=json", path) or "{}")
    data = info.get("format-specific", {}).get("data", {})
    kept = ("format", "virtual-size", "actual-size", "cluster-size", "backing-filename",
            "backing-filename-format")
    found = {key: info[key] for key in kept if key in info}
    more = {key: data[key] for key in ("compat", "extended-l2", "bitmaps") if key in data}
    return {**found, **more}
files = {}
for folder, _, names in os.walk(top):
    for name in names:
        path = os.path.join(folder, name)
        if os.path.islink(path):
            files[os.path.relpath(path, top)] = {"link": os.readlink(path)}
            continue
        row = {"size": os.lstat(path).st_size}
        if re.search(r"disk\.[0-9]|snap/[0-9]|overlay|\.qcow2", path):
            row.update(header(path))
        files[os.path.relpath(path, top)] = row
    for name in _:
        path = os.path.join(folder, name)
        if os.path.islink(path):
            files[os.path.relpath(path, top)] = {"link": os.readlink(path)}
found = {"files": dict(sorted(files.items()))}
vm = os.path.basename(top.rstrip("/"))
if vm.isdigit() and not os.path.isdir("/var/lib/one/remotes"):
    virsh = ("/usr/bin/virsh", "-q", "-c", "qemu:///system")
    domain = "one-" + vm
    blocks = [line.split() for line in said(*virsh, "domblklist", domain).splitlines()]
    found["checkpoints"] = said(*virsh, "checkpoint-list", domain, "--name").split()
    found["snapshots"] = said(*virsh, "snapshot-list", domain, "--name").split()
    found["blocks"] = {row[0]: row[1] for row in blocks if len(row) == 2}
    for source in {row[1] for row in blocks if len(row) == 2 and row[1].startswith("/")}:
        words = ("info", "-U", "--backing-chain", "--output=json")
        for one in json.loads(said("/usr/bin/qemu-img", *words, source) or "[]"):
            found.setdefault("chains", {}).setdefault(source, []).append({
                "filename": one["filename"], "format": one["format"], "backing": one.get("backing-filename"),
                "bitmaps": one.get("format-specific", {}).get("data", {}).get("bitmaps", [])})
    user = ("/usr/bin/rbd", "--id", "stock")
    for image in said(*user, "ls", "one").split():
        snaps = json.loads(said(*user, "snap", "ls", "one/" + image, "--format", "json") or "[]")
        found.setdefault("rbd", {})[image] = [[snap["name"], snap["protected"]] for snap in snaps]
print(json.dumps(found))
"""


def _text(script: str) -> str:
    for name, value in {"LOOK": LOOK, "LOG": LOG, "COMMANDS": COMMANDS}.items():
        script = script.replace(f"@{name}@", value)
    return script


def before_drivers(front_end: Node, remotes: str, drivers: Sequence[str]) -> None:
    """Plant the recorder before each script of drivers, `tm/qcow2`; monitoring is not noted."""
    for driver in drivers:
        folder = front_end.path(f"{remotes}/{driver}")
        for path in sorted(folder.iterdir()):
            if path.is_dir() or path.suffix in (".real", ".sh", ".rb", ".conf") or "monitor" in path.name:
                continue
            owner = os.lstat(path)
            path.rename(path.with_name(f"{path.name}.real"))
            path.write_text(_text(WRAPPER))
            path.chmod(0o755)
            os.chown(path, owner.st_uid, owner.st_gid)


def before_commands(nodes: Iterable[Node]) -> None:
    """Plant what notes commands, for all machines: they have one /usr; and on each what looks."""
    for name in NOTED:
        path = Path(SHIMS, name)
        path.write_text(_text(SHIM))
        path.chmod(0o755)
    for node in nodes:
        node.path(LOOK).write_text(LOOKER)
        for path in (node.path(COMMANDS), node.path(LOG)):
            path.touch()
            shutil.chown(path, node.uid_of("oneadmin"))


def remove_commands() -> None:
    """Take away what notes commands: other tests of this root have the same /usr."""
    for name in NOTED:
        Path(SHIMS, name).unlink(missing_ok=True)
