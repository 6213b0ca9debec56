# SPDX-License-Identifier: Apache-2.0
"""`semishared doctor` on a sound cloud, and with each of these faults planted: found, named, and with what
mends it.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Tuple

import pytest

from configurations import oned_conf, vmm_execrc
from lab import Node
from lab.cloud import DATASTORES, STORE, SYSTEM, Cloud
from lab.oned.objects import Datastore
from platforms import el
from system.test_monitoring import hidden, hung

COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"
REMOTES, SCRIPTS = "/var/lib/one/remotes", "/var/tmp/one"
Finding = Dict[str, str]
STORE_DIR = f"{DATASTORES}/{STORE}"
MEND = "as root there: apt-get install"


@pytest.fixture(scope="module", autouse=True)
def installed(cloud: Cloud) -> Iterator[None]:
    """Give the front-end the configuration of an OpenNebula, and install into it as an administrator does."""
    front_end = cloud.lab.fe
    etc = front_end.path("/etc/one")
    (etc / "vmm_exec").mkdir(parents=True)
    (etc / "oned.conf").write_text(oned_conf())
    (etc / "vmm_exec/vmm_execrc").write_text(vmm_execrc())
    # Its remotes have no directories of other versions; oned notes its configuration when it starts.
    front_end.run(["/opt/semishared/install.sh"], user="root")
    front_end.run(["sh", "-c", "sleep 0.1; touch /var/lib/one/config"])
    cloud.lab.sync()
    yield
    front_end.run(["rm", "-r", "/etc/one"], user="root")


def doctor(cloud: Cloud, **more: Any) -> Tuple[int, Dict[str, Any]]:
    done = cloud.lab.fe.run([COMMAND, "doctor", "--json"], check=False, timeout=60, **more)
    assert done.returncode in (0, 1, 2) and not done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_sound_cloud(cloud: Cloud) -> None:
    code, answer = doctor(cloud)
    assert (code, answer["result"], answer["findings"]) == (0, "ok", [])
    assert set(answer["machines"]) == {"fe", "h1", "h2"}
    for row in answer["machines"].values():
        assert (
            row["semishared"]
            and row["qemu"].startswith("7.")
            and row["libvirt"]
            and row["zstd"]
            and row["lzop"]
            and row["udpcast"]
        )
    said = cloud.lab.fe.run([COMMAND, "doctor"]).stdout.decode()
    assert "3 machines: all is well" in said
    # Nothing of it is left on the store.
    assert not [name for name in os.listdir(cloud.lab.fe.path(STORE_DIR)) if "doctor" in name]


@contextmanager
def edited(node: Node, path: str, text: str) -> Iterator[None]:
    """Give a file of a node another content for a while; its mode stays."""
    target = node.path(path)
    before, times = target.read_bytes(), target.stat()
    target.write_text(text)
    try:
        yield
    finally:
        target.write_bytes(before)
        os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))


@contextmanager
def commands(node: Node, begin: str, end: str) -> Iterator[None]:
    node.run(["sh", "-ec", begin], user="root")
    try:
        yield
    finally:
        node.run(["sh", "-ec", end], user="root")


@contextmanager
def dead(node: Node) -> Iterator[None]:
    node.cut()
    try:
        yield
    finally:
        node.join()


@contextmanager
def attribute(template: Dict[str, Any], name: str, value: str) -> Iterator[None]:
    before = dict(template)
    template[name] = value
    try:
        yield
    finally:
        template.clear()
        template.update(before)


@contextmanager
def wrong_image(cloud: Cloud) -> Iterator[None]:
    cloud.lab.fe.run(["truncate", "-s", "1M", "/var/tmp/wrong.img"])
    image = cloud.oned.image_create(STORE, "wrong", path="/var/tmp/wrong.img")
    cloud.oned.images[image].template["SEMISHARED_PLCE"] = "shared"
    try:
        yield
    finally:
        cloud.oned.image_delete(image)


def no_program(node: Node, name: str) -> ContextManager[None]:
    """A program that is there and cannot be run counts as none."""
    return commands(node, f"touch /tmp/no; mount --bind /tmp/no /usr/bin/{name}", f"umount /usr/bin/{name}")


def no_binding(node: Node) -> ContextManager[None]:
    """Python has none of Debian's packages, and so not libvirt's binding."""
    packages = "/usr/lib/python3/dist-packages"
    return commands(node, f"mkdir -p /tmp/none; mount --bind /tmp/none {packages}", f"umount {packages}")


EL_8 = 'ID="almalinux"\nID_LIKE="rhel centos fedora"\nVERSION_ID="8.10"\n'


@contextmanager
def old_python(node: Node) -> Iterator[None]:
    """Let a host be one of EL 8: what os-release says, and a python3 that is older than ours, alone."""
    el.age_python(node)
    try:
        node.path("/usr/lib/os-release").write_text(EL_8)
        with el.alone(node):
            yield
    finally:
        node.run(["umount", "-l", "/usr"], user="root")
        node.run(["rm", "-r", el.OVER], user="root")


@contextmanager
def one_directory(cloud: Cloud) -> Iterator[None]:
    """Give both hosts one directory for their system datastore, as an export of all of the datastores
    directory does.
    """
    place, own = f"{STORE_DIR}/.one", f"{DATASTORES}/{SYSTEM}"
    begin = f"install -d -o oneadmin -g oneadmin {place} {own}; mount --bind {place} {own}"
    with commands(cloud.lab.node("h1"), begin, f"umount {own}"), commands(H2(cloud), begin, f"umount {own}"):
        yield
    cloud.lab.fe.run(["rm", "-r", place], user="root")


@contextmanager
def leftover(cloud: Cloud) -> Iterator[None]:
    """Leave the directory of a VM that oned has had, and knows no more."""
    gone, later = (cloud.oned.vm_create(cloud.template(name, [])) for name in ("gone", "later"))
    cloud.oned.vms.pop(gone)
    path = f"{DATASTORES}/{SYSTEM}/{gone}"
    with commands(H2(cloud), f"mkdir {path}; touch -d '2 hours ago' {path}", f"rmdir {path}"):
        yield
    cloud.oned.vms.pop(later)


Fault = Tuple[Callable[[Cloud], ContextManager[None]], str, str, str, str]
FE: Callable[[Cloud], Node] = lambda cloud: cloud.lab.fe  # noqa: E731
H2: Callable[[Cloud], Node] = lambda cloud: cloud.lab.node("h2")  # noqa: E731
FULL = f"{DATASTORES}/.semishared"
OWN_DIR = f"install -d -o oneadmin -g oneadmin {FULL}"
FILL = f"head -c 2M /dev/zero >{FULL}/fill || true"

NOTES = "cd ~oneadmin/.one; install -d -o oneadmin -g oneadmin semishared_vms"
NOTE = "~oneadmin/.one/semishared_vms/99999.changed"


@contextmanager
def stock_pair(cloud: Cloud) -> Iterator[None]:
    """Have a stock pair of datastores with an image, which names no system datastore; ours does."""
    oned = cloud.oned
    oned.datastores[STORE].template["COMPATIBLE_SYS_DS"] = str(SYSTEM)
    oned.datastores[0] = Datastore(0, "system", 1, "-", "qcow2", f"{DATASTORES}/0", {})
    oned.datastores[1] = Datastore(1, "default", 0, "fs", "qcow2", f"{DATASTORES}/1", {}, images=[7])
    try:
        yield
    finally:
        for number in (0, 1):
            del oned.datastores[number]
        del oned.datastores[STORE].template["COMPATIBLE_SYS_DS"]


@contextmanager
def update_in_sunstone(cloud: Cloud) -> Iterator[None]:
    """Take DISK_TYPE away, as Update does."""
    with attribute(cloud.oned.datastores[STORE].template, "DISK_TYPE", "FILE"):
        del cloud.oned.datastores[STORE].template["DISK_TYPE"]
        yield


@contextmanager
def hooked(cloud: Cloud) -> Iterator[None]:
    """Register our hook for lost hosts, as `onehook create` does."""
    assert cloud.oned.rpc
    command = f"{COMMAND} failover --hook"
    about = f"<ID>0</ID><NAME>semishared-failover</NAME><TEMPLATE><COMMAND>{command}</COMMAND></TEMPLATE>"
    cloud.oned.rpc.hooks.append(f"<HOOK>{about}</HOOK>")
    try:
        yield
    finally:
        cloud.oned.rpc.hooks.clear()


ETC = "/var/lib/one/remotes/etc/datastore"
FAULTS: Dict[str, Fault] = {
    # name: how to plant it, severity, machine, what is said, what mends it
    "oned.conf of a new package": (
        lambda c: edited(FE(c), "/etc/one/oned.conf", oned_conf()),
        "broken",
        "fe",
        "TM_MAD",
        "install.sh",
    ),
    "vmm_execrc of a new package": (
        lambda c: edited(FE(c), "/etc/one/vmm_exec/vmm_execrc", vmm_execrc()),
        "broken",
        "fe",
        "LIVE_DISK_SNAPSHOTS",
        "install.sh",
    ),
    "oned.conf that nobody can read": (
        lambda c: edited(FE(c), "/etc/one/oned.conf", "A = [\n"),
        "broken",
        "fe",
        "oned.conf line",
        "install.sh",
    ),
    "Update in Sunstone": (
        update_in_sunstone,
        "warning",
        "fe",
        "has lost DISK_TYPE, as by Update in Sunstone",
        "semishared doctor --fix",
    ),
    "stock images beside our system datastore": (
        stock_pair,
        "broken",
        "fe",
        "may send its VMs to system datastore",
        "setup --apply --image",
    ),
    "oned not restarted": (
        lambda c: commands(FE(c), "touch -d '1 hour ago' /var/lib/one/config", "touch /var/lib/one/config"),
        "warning",
        "fe",
        "newer than the running oned",
        "restart opennebula",
    ),
    "action that a new OpenNebula brought": (
        lambda c: commands(
            FE(c), f"cp {REMOTES}/vmm/kvm/cancel {REMOTES}/vmm/kvm/brandnew", f"rm {REMOTES}/vmm/kvm/brandnew"
        ),
        "broken",
        "fe",
        "brandnew of this OpenNebula is not handed over to",
        "install.sh",
    ),
    "misspelt key": (
        lambda c: edited(FE(c), f"{REMOTES}/etc/semishared.conf", "[hosts]\nscript_dir = /x\n"),
        "broken",
        "fe",
        "unknown key 'script_dir'",
        "edit",
    ),
    "host not synced": (
        lambda c: edited(H2(c), f"{SCRIPTS}/tm/semishared/clone", "#!/bin/sh\n"),
        "broken",
        "h2",
        "not synced: tm/semishared",
        "onehost sync",
    ),
    "host of another version": (
        lambda c: edited(H2(c), f"{SCRIPTS}/lib/semishared/__init__.py", 'VERSION = "0.0.9"\n'),
        "broken",
        "h2",
        "0.0.9 is there",
        "onehost sync",
    ),
    "host never synced": (
        lambda c: commands(
            H2(c), f"mv {SCRIPTS}/lib/semishared /tmp/away", f"mv /tmp/away {SCRIPTS}/lib/semishared"
        ),
        "broken",
        "h2",
        "semishared is not there",
        "onehost sync",
    ),
    "dead host": (lambda c: dead(H2(c)), "broken", "h2", "does not answer", "onehost offline h2"),
    "store not mounted": (
        lambda c: hidden(H2(c), STORE_DIR),
        "broken",
        "h2",
        "is not mounted",
        f"mount {STORE_DIR}",
    ),
    "store hangs": (lambda c: hung(H2(c), STORE_DIR), "broken", "h2", "hangs", f"mount {STORE_DIR}"),
    "another tree in the store's place": (
        lambda c: commands(
            H2(c), f"mount -t tmpfs -o mode=777 none {STORE_DIR}; touch {STORE_DIR}/a", f"umount {STORE_DIR}"
        ),
        "broken",
        "h2",
        "another file system than on the front-end",
        f"mount {STORE_DIR}",
    ),
    "store read-only": (
        lambda c: commands(
            H2(c), f"mount -o remount,bind,ro {STORE_DIR}", f"mount -o remount,bind,rw {STORE_DIR}"
        ),
        "broken",
        "h2",
        "cannot be written by oneadmin",
        "read-write",
    ),
    "misspelt attribute of an image": (
        wrong_image,
        "broken",
        "fe",
        "is SEMISHARED_PLACE meant?",
        "oneimage update",
    ),
    "wrong value of a datastore": (
        lambda c: attribute(c.oned.datastores[STORE].template, "SEMISHARED_LOCAL", "ovrelay"),
        "broken",
        "fe",
        "'ovrelay'",
        "onedatastore update 100",
    ),
    "shared system datastore": (
        lambda c: attribute(c.oned.datastores[SYSTEM].template, "SHARED", "YES"),
        "broken",
        "fe",
        "SHARED = NO",
        "onedatastore update 101",
    ),
    "file of a stock driver that an action would refuse": (
        lambda c: commands(
            c.lab.fe,
            f"mkdir -p {ETC}; echo SUPPORTED_FS=reiserfs > {ETC}/datastore.conf",
            f"rm {ETC}/datastore.conf",
        ),
        "broken",
        "fe",
        "SUPPORTED_FS of datastore.conf has reiserfs",
        "edit the file",
    ),
    "datastore older than a setting": (
        lambda c: attribute(c.oned.datastores[STORE].template, "LN_TARGET", "SYSTEM"),
        "warning",
        "fe",
        "LN_TARGET is SYSTEM",
        "onedatastore update 100",
    ),
    "libvirt away": (
        lambda c: commands(
            H2(c),
            "mv /run/libvirt/libvirt-sock /run/libvirt/away",
            "mv /run/libvirt/away /run/libvirt/libvirt-sock",
        ),
        "broken",
        "h2",
        "libvirt does not answer",
        "restart libvirtd",
    ),
    "system datastore of two hosts": (
        one_directory,
        "broken",
        "h1",
        f"{DATASTORES}/{SYSTEM} is one directory on h1, h2",
        "mount a disk of its own",
    ),
    "no python3-libvirt": (
        lambda c: no_binding(H2(c)),
        "warning",
        "h2",
        "python3-libvirt is not installed",
        "apt-get install python3-libvirt",
    ),
    "no lzop": (
        lambda c: no_program(H2(c), "lzop"),
        "warning",
        "h2",
        "lzop is not installed",
        "apt-get install lzop",
    ),
    "no qemu-img": (
        lambda c: no_program(H2(c), "qemu-img"),
        "broken",
        "h2",
        "qemu-img is not installed",
        "apt-get install qemu-utils",
    ),
    "local disk full": (
        lambda c: commands(
            H2(c), f"{OWN_DIR}; mount -t tmpfs -o size=1m,mode=777 none {FULL}; {FILL}", f"umount {FULL}"
        ),
        "broken",
        "h2",
        "0 MiB free",
        "base prune --hosts h2",
    ),
    "local disk read-only": (
        lambda c: commands(H2(c), f"{OWN_DIR}; mount -t tmpfs -o ro none {FULL}", f"umount {FULL}"),
        "broken",
        "h2",
        "mounted read-only",
        "rw",
    ),
    "datastore of OpenNebula 6.10": (
        lambda c: attribute(c.oned.datastores[SYSTEM].template, "DS_LIVE_MIGRATE", "NO"),
        "warning",
        "fe",
        "DS_LIVE_MIGRATE is NO, oned.conf says YES: oned goes by the first for moves to it of VMs that run",
        f"onedatastore update {SYSTEM}: save it unchanged",
    ),
    "no hook manager": (
        lambda c: hooked(c),
        "broken",
        "fe",
        "opennebula-hem) does not run: it would start semishared-failover",
        "systemctl enable --now opennebula-hem",
    ),
    "nothing publishes": (
        lambda c: commands(FE(c), f"{NOTES}; touch -d '40 minutes ago' {NOTE}", f"rm {NOTE}"),
        "warning",
        "fe",
        "disks of 1 VMs as they were, for up to 40 minutes: there is no timer that publishes",
        "./install.sh --detach-timer; or as oneadmin: semishared publish",
    ),
    "leftover of a dead VM": (leftover, "warning", "fe", "1 leftovers", "semishared gc"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(cloud: Cloud, name: str) -> None:
    plant, severity, machine, what, mend = FAULTS[name]
    started = time.monotonic()
    with plant(cloud):
        code, answer = doctor(cloud)
    found: List[Finding] = [item for item in answer["findings"] if what in item["what"]]
    assert found, answer["findings"]
    assert (found[0]["severity"], found[0]["machine"]) == (severity, machine) and mend in found[0]["mend"]
    assert code == {"warning": 1, "broken": 2}[answer["result"]]
    assert time.monotonic() - started < 60, "a dead host costs seconds"
    # One fault is no reason to complain of anything else, but for what follows from it.
    follows = {"misspelt key": 3, "no qemu-img": 2, "oned.conf of a new package": 20}.get(name, 1)
    assert len(answer["findings"]) <= follows, answer["findings"]


@pytest.mark.fault(
    60, "doctor says when OpenNebula's hook manager does not run, and a hook of ours waits for it"
)
def test_hook_manager_that_runs_is_seen_without_systemd(cloud: Cloud) -> None:
    """As its unit, and onehem-server, start it: an interpreter with the path of its script."""
    script, pid = "/var/tmp/onehem-server.rb", "/var/tmp/onehem.test"
    start = f"echo 'while sleep 1; do :; done' >{script}; setsid sh {script} >/dev/null 2>&1 & echo $! >{pid}"
    with hooked(cloud), commands(FE(cloud), start, f"kill $(cat {pid}); rm {script} {pid}"):
        code, answer = doctor(cloud)
    assert (code, answer["findings"]) == (0, [])


def test_setup_says_too_that_two_hosts_have_one_system_datastore(cloud: Cloud) -> None:
    words = [COMMAND, "setup", "--apply", "--system", f"semi_sys_{SYSTEM}"]
    with one_directory(cloud):
        done = cloud.lab.fe.run(words, check=False)
    assert (
        done.returncode == 1 and f"{DATASTORES}/{SYSTEM} is one directory on h1, h2" in done.stderr.decode()
    ), done.stderr
    assert cloud.lab.fe.run(words).stderr == b""


def test_fix_puts_back_what_a_datastore_has_lost(cloud: Cloud) -> None:
    store = cloud.oned.datastores[STORE]
    cloud.oned.datastore_monitor(STORE)
    before, line = dict(store.template), f'datastore {STORE} ({store.name}): DISK_TYPE = "FILE"'
    with update_in_sunstone(cloud):
        shown = cloud.lab.fe.run([COMMAND, "doctor", "--fix", "--dry-run"], check=False)
        assert shown.returncode == 1 and shown.stdout.decode().startswith(f"{line}: would be put back\n")
        assert "DISK_TYPE" not in store.template
        done = cloud.lab.fe.run([COMMAND, "doctor", "--fix"], check=False)
        assert done.returncode == 0 and done.stdout.decode().startswith(f"{line}: is put back\n"), done.stdout
        assert store.template == before
    assert doctor(cloud)[1]["findings"] == []


def test_findings_for_people(cloud: Cloud) -> None:
    with FAULTS["host never synced"][0](cloud), FAULTS["oned not restarted"][0](cloud):
        done = cloud.lab.fe.run([COMMAND, "doctor"], check=False)
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 2 and lines[-1] == "3 machines: 1 broken, 1 warnings"
    at = lines.index("broken  h2: semishared is not there")
    assert lines[at + 1].strip() == "-> as oneadmin: onehost sync --force" and lines[at + 2].startswith(
        "warning fe: "
    )


def test_installer_looks_at_hosts_first(cloud: Cloud) -> None:
    """With --hosts nothing is touched where a host lacks what it needs, or does not answer; what is nice to
    have is a warning.
    """
    front_end, h2 = cloud.lab.fe, cloud.lab.node("h2")

    def install(hosts: str) -> Tuple[int, str]:
        done = front_end.run(
            ["/opt/semishared/install.sh", "--hosts", hosts], user="root", check=False, timeout=60
        )
        return done.returncode, (done.stdout + done.stderr).decode()

    front_end.path(f"{REMOTES}/tm/semishared/gone").write_text("")
    try:
        with no_program(h2, "qemu-img"):
            code, said = install("h1,h2")
        assert code == 1 and said == f"install.sh: h2: qemu-img missing; {MEND} qemu-utils\n"
        with dead(h2):
            code, said = install("h1,h2")
        assert code == 1 and said.startswith("install.sh: h2: an answer") and said.count("\n") == 1
        assert front_end.path(f"{REMOTES}/tm/semishared/gone").exists()
        with no_program(h2, "lzop"):
            code, said = install("h1,h2")
        assert code == 0 and "warning: h2: without lzop" in said and "replace" in said
        with no_binding(h2):
            code, said = install("h1,h2")
        assert (
            code == 0
            and f"h2: without python3-libvirt some things do not work; {MEND} python3-libvirt\n" in said
        )
    finally:
        front_end.path(f"{REMOTES}/tm/semishared/gone").unlink(missing_ok=True)


APPLY = {
    # What the installer runs, as OpenNebula has it: each notes that it ran, and who ran it.
    "onehost": 'echo "onehost $* as $(id -un) home $HOME" >>/tmp/ran; [ ! -e /tmp/no-sync ] || { echo no '
    "answer >&2; exit 255; }",
    "one": 'echo "one $* as $(id -un)" >>/tmp/ran',
}


def test_apply_does_the_next_steps_in_their_order_and_stops_at_the_first_that_fails(cloud: Cloud) -> None:
    front_end = cloud.lab.fe
    front_end.run(
        ["sh", "-c", "mkdir -p /opt/one; chmod 755 /opt/one; : >/tmp/ran; chmod 666 /tmp/ran"], user="root"
    )
    for name, body in APPLY.items():
        front_end.path(f"/opt/one/{name}").write_text(f"#!/bin/sh\n{body}\n")
        front_end.path(f"/opt/one/{name}").chmod(0o755)

    def apply() -> Tuple[int, str, List[str]]:
        argv, path = ["/opt/semishared/install.sh", "--apply"], "/opt/one:/usr/bin:/bin:/usr/sbin:/sbin"
        done = front_end.run(argv, user="root", env={"PATH": path}, check=False)
        ran = front_end.path("/tmp/ran").read_text().splitlines()
        front_end.path("/tmp/ran").write_text("")
        return done.returncode, (done.stdout + done.stderr).decode(), ran

    before = len(cloud.oned.datastores)
    code, said, ran = apply()
    assert code == 0 and ran == [
        "onehost sync --force as oneadmin home /var/lib/one",
        "one restart as oneadmin",
    ]
    # The system datastore has another name than the usual one: it is found, and no second one is made.
    assert f"image datastore semi_img: id {STORE}" in said and f"semi_sys_{SYSTEM}: id {SYSTEM}" in said
    assert apply()[0] == 0 and len(cloud.oned.datastores) == before
    front_end.path("/tmp/no-sync").write_text("")
    code, said, ran = apply()
    assert code == 1 and len(ran) == 1 and "no answer" in said
    assert "Still to do: as oneadmin: onehost sync --force; as oneadmin: one restart; as oneadmin: " in said
    front_end.path("/tmp/no-sync").unlink()


def test_no_oned(cloud: Cloud) -> None:
    done = cloud.lab.fe.run(
        [COMMAND, "doctor", "--json"], check=False, env={"ONE_XMLRPC": "http://127.0.0.1:1/RPC2"}
    )
    (finding,) = json.loads(done.stdout)["findings"]
    assert (
        done.returncode == 2
        and "one.datastorepool.info" in finding["what"]
        and "start opennebula" in finding["mend"]
    )


@pytest.mark.fault(68, "doctor names a host's Python if it is too old for ours, and what mends it there")
def test_host_of_el_8_is_told_what_el_8_has(cloud: Cloud) -> None:
    with old_python(H2(cloud)):
        code, answer = doctor(cloud)
        (found,) = [one for one in answer["findings"] if one["machine"] == "h2" and "python" in one["what"]]
    assert code == 2 and found == {
        "severity": "broken",
        "host": "h2",
        "machine": "h2",
        "what": "python3 is 3.6.8",
        "mend": "as root on h2: dnf install python39",
    }
