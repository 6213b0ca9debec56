# SPDX-License-Identifier: Apache-2.0
"""What each action imports, against a list for each version of Python: the start-up budget as a regression
test.

CPU time is measured by `make bench`; a list is what a shared machine cannot blur. Each line of it is a module
and the actions that may import it (`tm/*`: all that oned calls). REGENERATE=1 rewrites it; say in the commit
why it grew.
"""

from __future__ import annotations

import base64
import fnmatch
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = Path(__file__).parent / "fixtures"
VERSION = ".".join(map(str, sys.version_info[:2]))
PERMITTED = Path(__file__).with_name(f"permitted_imports-{VERSION}.txt")
# The action runs as oned runs it, up to and including the plan's way to this machine's own host side; oned is
# recorded.
PRELUDE = """
import sys
sys.path.insert(0, {lib!r})
def recorded(self, method, _id):
    name = {{"one.vm.info": "vm", "one.image.info": {image!r}, "one.datastore.info": "datastore-100"}}[method]
    return open({fixtures!r} + "/" + name + ".xml", "rb").read()
if {asks!r}:
    from semishared.opennebula.oned import Oned
    Oned._ask = recorded
from semishared.entry import run
sys.argv = {argv!r}
run({kind!r}, {action!r})
"""
HOST_SIDE = f"import sys; sys.path.insert(0, {str(ROOT / 'lib')!r}); import semishared.hostside"
HYPERVISOR = """
import sys
sys.path.insert(0, {lib!r})
from semishared.vmm.on_host import run
run({here!r}, {argv!r})
"""
OF_OTHERS = ("encodings", "msvcrt", "org")
"""Tried by the standard library itself, for other systems."""
ASKING = {
    "clone",
    "context",
    "delete",
    "ln",
    "mkimage",
    "mkswap",
    "cpds",
    "mv",
    "resize",
    "snap_create",
    "snap_create_live",
    "snap_delete",
    "snap_revert",
}
pytestmark = [
    # Only python itself can say what it imports.
    pytest.mark.runs_python,
    pytest.mark.skipif(not PERMITTED.exists(), reason=f"there is no list for Python {VERSION}"),
]


def arguments(top: Path) -> dict[str, list[str]]:
    """Return argv of every action; paths in `top`, on this machine."""
    vm_dir, store = f"localhost:{top}/datastores/101/2", f"{top}/datastores/100"
    disk = f"{vm_dir}/disk.1"
    migrate = ["localhost", os.uname().nodename, f"{top}/datastores/101/2", "2", "101"]
    return {
        "tm/clone": [f"fe:{store}/image", disk, "2", "100"],
        "tm/ln": [f"fe:{store}/image", f"{vm_dir}/disk.0", "2", "100"],
        "tm/mkimage": ["1", "raw", f"{vm_dir}/disk.2", "2", "101"],
        "tm/mkswap": ["1", f"{vm_dir}/disk.3", "2", "101"],
        "tm/context": [f"{top}/context.sh", f"{vm_dir}/disk.4", "2", "101"],
        "tm/mvds": [disk, f"{store}/image", "2", "100"],
        "tm/cpds": [disk, f"{store}/copy", "-1", "2", "100"],
        **{
            f"tm/{name}": [disk, "0", "2", "100"]
            for name in ("snap_create", "snap_create_live", "snap_delete", "snap_revert")
        },
        "tm/resize": [disk, "1", "2", "100"],
        "tm/delete": [disk, "2", "100"],
        "tm/mv": [vm_dir, vm_dir.replace("/101/", "/103/"), "2", "103"],
        "tm/premigrate": migrate,
        "tm/postmigrate": migrate,
        "tm/failmigrate": migrate,
        "tm/monitor": ["101"],
        "host/monitor_ds": [f"{top}/datastores/101"],
        **{f"datastore/{name}": ["4"] for name in ("stat", "cp", "mkfs", "clone", "rm", "monitor")},
        **{f"datastore/{name}": ["4"] for name in ("snap_delete", "snap_revert", "snap_flatten")},
    }


def standard_input(name: str, top: Path) -> bytes:
    if name.endswith("migrate"):
        return base64.b64encode((FIXTURES / "vm.xml").read_bytes())
    image = f"<IMAGE><ID>4</ID><PATH>{top}/source</PATH><SIZE>1</SIZE><FORMAT>raw</FORMAT>"
    image += f"<SOURCE>{top}/datastores/100/image</SOURCE><TARGET_SNAPSHOT>0</TARGET_SNAPSHOT></IMAGE>"
    said = "<DISK_TYPE>FILE</DISK_TYPE><SAFE_DIRS>/</SAFE_DIRS>"
    store = f"<ID>100</ID><BASE_PATH>{top}/datastores/100</BASE_PATH><TEMPLATE>{said}</TEMPLATE>"
    return base64.b64encode(
        f"<DS_DRIVER_ACTION_DATA>{image}<DATASTORE>{store}</DATASTORE></DS_DRIVER_ACTION_DATA>".encode()
    )


def run_in(top: Path, argv: list[str], data: bytes) -> subprocess.CompletedProcess[bytes]:
    env = {"HOME": str(top), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    (top / ".one").mkdir(exist_ok=True)
    (top / ".one" / "one_auth").write_text("oneadmin:secret\n")
    return subprocess.run(argv, input=data, capture_output=True, env=env, check=False, timeout=60)


def imported(code: str, top: Path, data: bytes = b"") -> tuple[set[str], str]:
    """Return the modules that a program imports, but for python's own, and what else it said."""
    done = run_in(top, [sys.executable, "-I", "-X", "importtime", "-c", code], data)
    names, said = set(), []
    for line in done.stderr.decode().splitlines():
        match = re.match(r"import time: +\d+ \| +\d+ \| +(\S+)$", line)
        if match:
            names.add(match.group(1))
        elif not line.startswith("import time:"):
            said.append(line)
    names = {
        name
        for name in names
        if not name.split(".")[-1].startswith("_") and name.split(".")[0] not in OF_OTHERS
    }
    return names, "\n".join(said)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    return imported("pass", tmp_path_factory.mktemp("baseline"))[0]


def permitted() -> dict[str, set[str]]:
    lines = [line.split() for line in PERMITTED.read_text().splitlines() if line and not line.startswith("#")]
    everyone = {"hostside", *NAMES, *OF_HOSTS}
    return {
        module: {name for name in everyone for glob in globs if fnmatch.fnmatch(name, glob)}
        for module, *globs in lines
    }


def judge(name: str, found: set[str]) -> None:
    if os.environ.get("REGENERATE"):
        FOUND[name] = found
        return
    allowed = {module for module, actions in permitted().items() if name in actions}
    assert not found - allowed, (
        f"{name} imports {', '.join(sorted(found - allowed))}, which {PERMITTED.name} does "
        f"not list. Import it inside the "
        "one function that needs it; if every run does, see that `make bench` stays within the "
        "budget and add it to the list"
    )
    missing = {
        module
        for module in allowed - found
        if module.startswith("semishared") and name in permitted()[module]
    }
    assert not missing, (
        f"{name} does not import {', '.join(sorted(missing))} any more: take it off {PERMITTED.name}"
    )


COUNTED = """
import sys
count = 0
def every(frame, event, argument):
    global count
    frame.f_trace_opcodes = True
    count += event == "opcode"
    return every
def begins_a_program(event, arguments):
    if event == "subprocess.Popen":
        said()
import os
leave = os._exit
def said(*_):
    sys.settrace(None)
    print("counted", count, file=sys.stderr, flush=True)
    leave(0)
os._exit = said
sys.addaudithook(begins_a_program)
sys.settrace(every)
"""
MOST = {"hostside": 455_000, "tm/clone": 420_000, "tm/delete": 410_000, "datastore/stat": 490_000}
"""Instructions of Python's until the first program is started (the host side: until it waits for a plan),
with a tenth to spare. Beside modules, which the list counts, they are what a start costs: classes that are
made, patterns that are compiled, files that are parsed.
"""


def counted(code: str, top: Path, data: bytes = b"") -> int:
    done = run_in(top, [sys.executable, "-IS", "-c", f"{COUNTED}\n{code}\nsaid()"], data)
    said = [line for line in done.stderr.decode().splitlines() if line.startswith("counted ")]
    assert said, done.stderr.decode()
    return int(said[-1].split()[1])


TOLD = """
import os, sys
def told(word):
    os.write(2, f"told {word}\\n".encode())
sys.addaudithook(lambda event, arguments: event == "subprocess.Popen" and told("program"))
"""
SPEAKS_FIRST = (
    "tm/clone",
    "tm/ln",
    "tm/mkimage",
    "tm/delete",
    "tm/snap_create",
    "tm/snap_delete",
    "tm/snap_revert",
)
"""Actions whose host is known before oned is asked."""


FOUND: dict[str, set[str]] = {}
NAMES = sorted(arguments(Path("/")))
OF_HOSTS = ["vmm/attach_disk", "vmm/deploy", "vmm/restore", "vmm/snapshot_create"]
"""Hypervisor actions that every VM meets; others ask libvirt, whose binding is the machine's."""


def program(name: str, tmp_path: Path, *, recorded: bool = True) -> str:
    """Return the program that is an action, on files of this test; with oned `recorded`, whose module it then
    has from the beginning.
    """
    kind, _, action = name.partition("/")
    # A VM that is to be removed and has no directory here is looked for on other front-ends.
    for directory in ("datastores/100", "datastores/101/2"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "source").write_bytes(b"x" * 1000)
    (tmp_path / "context.sh").write_text("X=1\n")
    return PRELUDE.format(
        lib=str(ROOT / "lib"),
        image="image-0-persistent" if action == "ln" else "image-1",
        fixtures=str(FIXTURES),
        asks=recorded and kind == "tm" and action in ASKING,
        argv=[action, *arguments(tmp_path)[name]],
        kind="datastore" if kind == "datastore" else "tm",
        action=action,
    )


@pytest.mark.parametrize("name", MOST)
def test_start_is_no_more_than_so_many_instructions(name: str, tmp_path: Path) -> None:
    code = HOST_SIDE if name == "hostside" else program(name, tmp_path, recorded=name not in SPEAKS_FIRST)
    found = counted(code, tmp_path, b"" if name == "hostside" else standard_input(name, tmp_path))
    assert 0.6 * MOST[name] < found < MOST[name], (
        f"{name}: {found} instructions; what has come to its start, or gone from it?"
    )


@pytest.mark.parametrize("name", SPEAKS_FIRST)
def test_host_side_starts_while_oned_is_asked(name: str, tmp_path: Path) -> None:
    code = program(name, tmp_path).replace("    name = {", "    told('oned')\n    name = {")
    done = run_in(tmp_path, [sys.executable, "-IS", "-c", f"{TOLD}\n{code}"], b"")
    words = [line.split()[1] for line in done.stderr.decode().splitlines() if line.startswith("told ")]
    assert words[:2] == ["program", "oned"] and words.count("program") == 1, done.stderr.decode()


@pytest.mark.parametrize("name", NAMES)
def test_action_imports_only_what_is_permitted(name: str, tmp_path: Path, baseline: set[str]) -> None:
    found, said = imported(program(name, tmp_path), tmp_path, standard_input(name, tmp_path))
    assert "Traceback" not in said, said
    assert "SS001" not in said, said
    kind, _, action = name.partition("/")
    leaders = {"tm": "front.transfer", "datastore": "front.datastore", "host": "host.vm_sizes"}
    assert f"semishared.{leaders[kind]}" in found
    assert "semishared.wire.session" in found or kind != "tm" or action == "monitor", said
    judge(name, found - baseline)


def given(action: str, vm_dir: Path) -> tuple[list[str], str]:
    """Return arguments and stdin of a hypervisor action for a VM whose disk 1 is an image in place."""
    disk = (
        f"<disk type='file'><source file='{vm_dir}/disk.1'/><target dev='vda'/><driver name='qemu' "
        f"type='raw'/></disk>"
    )
    told = "<ID>2</ID><TEMPLATE><DISK><ATTACH>YES</ATTACH><DISK_ID>1</DISK_ID></DISK></TEMPLATE>"
    place = f"<DATASTORE><BASE_PATH>{vm_dir.parent}</BASE_PATH></DATASTORE>"
    message = f"<VMM_DRIVER_ACTION_DATA><VM>{told}</VM>{place}</VMM_DRIVER_ACTION_DATA>"
    words = {
        "deploy": [f"{vm_dir}/deployment.0"],
        "restore": [f"{vm_dir}/checkpoint"],
        "snapshot_create": ["one-2", "0"],
        "attach_disk": ["one-2", f"{vm_dir}/disk.1", "vda", "0", base64.b64encode(message.encode()).decode()],
    }
    return [
        action,
        *words[action],
        "2",
        "h1",
    ], f"<domain><devices>{disk}</devices></domain>" if action == "deploy" else message


@pytest.mark.parametrize("name", OF_HOSTS)
def test_hypervisor_action_imports_only_what_is_permitted(
    name: str, tmp_path: Path, baseline: set[str]
) -> None:
    vm_dir = tmp_path / "datastores/101/2"
    (vm_dir / ".semishared").mkdir(parents=True)
    image = tmp_path / "datastores/100/.semishared/image/image"
    image.parent.mkdir(parents=True)
    image.touch()
    (vm_dir / "disk.1").symlink_to(image)
    in_place = {"place": "shared", "how": "in-place", "format": "raw", "path": str(image)}
    overlay = {"place": "local", "how": "overlay", "format": "qcow2", "path": str(vm_dir / "disk.1")}
    record = {"version": 1, "disk": 1, **(overlay if name == "vmm/snapshot_create" else in_place)}
    (vm_dir / ".semishared/disk.1.json").write_text(json.dumps(record))
    argv, stdin = given(name.partition("/")[2], vm_dir)
    code = HYPERVISOR.format(lib=str(ROOT / "lib"), here=str(tmp_path), argv=argv)
    found, said = imported(code, tmp_path, stdin.encode())
    assert "OpenNebula's own script" in said, said
    judge(name, found - baseline)


def test_host_side_imports_only_what_is_permitted(tmp_path: Path, baseline: set[str]) -> None:
    found, said = imported(HOST_SIDE, tmp_path)
    assert said == ""
    judge("hostside", found - baseline)


def test_every_action_is_asked_what_it_imports() -> None:
    files = {
        f"{kind}/{path.name}"
        for kind in ("tm", "datastore")
        for path in (ROOT / kind).iterdir()
        if path.is_file()
    }
    of_backups = {"tm/restore", "tm/prebackup", "tm/postbackup", "tm/prebackup_live", "tm/postbackup_live"}
    assert files - of_backups - {"datastore/export"} == {name.replace("host/", "tm/") for name in NAMES}


def test_permitted_imports_name_actions_that_exist() -> None:
    if os.environ.get("REGENERATE"):
        regenerate()
    for module, actions in permitted().items():
        assert actions, f"{module} is permitted to nobody that exists"


def regenerate() -> None:
    from conftest import WATCH  # type: ignore[attr-defined] # that of tests/unit

    WATCH.active = False
    lines = [
        "# SPDX-License-Identifier: Apache-2.0",
        f"# Modules that actions may import on their way (Python {VERSION}), see test_start_up.py. "
        "Every one costs CPU at every call.",
    ]
    for module in sorted(set().union(*FOUND.values())):
        users = {name for name, found in FOUND.items() if module in found}
        for kind in ("tm/", "datastore/", "vmm/"):
            if all(name in users for name in (*NAMES, *OF_HOSTS) if name.startswith(kind)):
                users = {name for name in users if not name.startswith(kind)} | {f"{kind}*"}
        lines.append(f"{module} {' '.join(sorted(users))}")
    PERMITTED.write_text("\n".join(lines) + "\n")
