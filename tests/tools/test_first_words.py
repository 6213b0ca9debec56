# SPDX-License-Identifier: Apache-2.0
"""The 61 characters that oned shows of a failed action: each driver called as oned calls it, with a failure
that is usual for it. And what stands behind them: the log lines, and what the stock script has to say.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest

from lab.oned import ActionFailed
from semishared.opennebula.error_line import SHOWN
from suites import ROOT
from tools.oned_site import HERE, STORE, SYSTEM, ActionSite
from tools.test_vmm import Host

SEVERITY = re.compile(r"(ERROR|INFO|WARN): ")
AWAY = "nowhere.invalid"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ActionSite]:
    with ActionSite.up(tmp_path) as site:
        yield site


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def shown(site: ActionSite, work: Callable[..., object], *words: Any) -> str:
    """Return the beginning of what the driver that failed last has written to stderr."""
    with pytest.raises(ActionFailed):
        work(*words)
    said = site.oned.calls[-1].stderr
    assert said.isascii() and not SEVERITY.match(said), said
    assert sum(not SEVERITY.match(line) for line in said.splitlines()) == 1, said
    return said.split("\n")[0][:SHOWN]


@pytest.mark.fault(58, "id, noun and reason of a disk that cannot be made are in what oned shows of it")
@pytest.mark.parametrize("action", ["clone", "ln"])
def test_image_that_is_gone(site: ActionSite, action: str) -> None:
    image = site.image(persistent=action == "ln")
    vm, source = site.vm(image), site.source(image)
    source.unlink()
    assert shown(site, site.make, action, vm).startswith(f"SS020 image {image} is not there on {HERE}; ")
    first, warning = site.oned.calls[-1].stderr.splitlines()
    assert first.endswith(f"[{action}; {source}]"), "the path is not lost"
    assert warning.startswith(f"WARN: {action}: VM {vm}: datastore {STORE} has no SEMISHARED_STORE")


@pytest.mark.fault(58, "id, noun and reason of an upload that fails are in what oned shows of it")
@pytest.mark.fault(59, "the name of a file that is not ASCII can be recognised in what oned gets")
def test_image_that_cannot_be_uploaded(site: ActionSite) -> None:
    missing = site.top / "a-directory-with-a-long-name/and/another/one/B\xfcro.qcow2"
    said = shown(site, site.oned.image_create, STORE, "B\xfcro", str(missing))
    assert site.oned.calls[-1].action == "stat"
    assert said.startswith(f"SS020 datastore {STORE}: B\\xfcro.qcow2: ")

    said = shown(site, lambda: site.image("B\xfcro", SHA256="0" * 64))
    assert said.startswith("SS023 image 0: B\\xfcro.img has another sha256 than")


def test_directory_that_cannot_be_moved(site: ActionSite) -> None:
    vm = site.vm(site.image())
    there = site.disk(vm).parent
    said = shown(site, site.tm, "mv", f"{HERE}:{there}", f"{AWAY}:{there}", vm, SYSTEM)
    assert said.startswith(f"SS010 host {AWAY}: ssh: Could not resolve")
    said = shown(site, site.tm, "mv", f"{HERE}:{there}", there, vm, SYSTEM)
    assert said.startswith("SS001 mv: location is not host:path: "), "what it is about is not understood"


@pytest.mark.parametrize("name", ["", "/disk.0"])
def test_what_cannot_be_deleted(site: ActionSite, name: str) -> None:
    vm = site.vm(site.image())
    said = shown(site, site.tm, "delete", f"{AWAY}:{site.disk(vm).parent}{name}", vm, SYSTEM)
    assert said.startswith(f"SS010 host {AWAY}: ssh: Could not resolve")


def test_disk_that_cannot_be_saved(site: ActionSite) -> None:
    image = site.image(persistent=True)
    vm = site.vm(image)
    disk = site.make("ln", vm)
    disk.unlink()
    disk.write_bytes(b"the only copy")
    said = shown(site, site.tm, "mvds", f"{HERE}:{disk}", site.source(image), vm, STORE)
    assert said == f"SS043 VM {vm} disk 0 on {HERE} is to be saved but is no link to a shared"[:SHOWN]


@pytest.mark.fault(58, "id, noun and reason of a boot that is refused are in what oned shows of it")
def test_vm_that_cannot_be_deployed(host: Host) -> None:
    host.write_vm(vda=0, vdb=1)
    host.add_local(0)
    line = host.refuses("deploy", *host.deploy_argv(), stdin=host.domain)
    assert line.startswith("SS042 disk 1 of VM 7 has no record; "), line


@pytest.mark.fault(58, "what the stock script says comes before the log lines of what has called it")
def test_stock_script_that_fails_says_so_first(host: Host) -> None:
    host.add_in_place(0)
    host.add_local(1)
    (host.vm_dir / "vm.xml").write_text("<VM>")
    script = host.kvm / "deploy"
    script.write_text(
        "#!/bin/sh\ncat >&1\nset -- /proc/$$/fd/*\necho $#\necho 'Could not create domain' >&2\nexit 3\n"
    )
    # As one_vmm_exec reads it: from a shell that goes on, in which the marks behind the script's end tell it.
    shell = '"$@"; echo "ExitCode: $?" >&2'
    argv = ["sh", "-c", shell, "sh", str(host.remotes / "vmm/semishared/deploy"), *host.deploy_argv()]
    done = subprocess.run(
        argv, input=host.domain, capture_output=True, check=True, env={"PATH": "/usr/bin:/bin"}
    )
    domain, descriptors = done.stdout.rstrip().rsplit(b"\n", 1)
    alone = subprocess.run([script], input=b"", capture_output=True, check=False).stdout
    assert domain.startswith(b"<domain") and descriptors == alone.strip(), "none of ours is left open"
    first, *others, last = done.stderr.decode().splitlines()
    assert (first, last) == ("Could not create domain", "ExitCode: 3")
    assert [line[:40] for line in others] == ["WARN: deploy: VM 7: vm.xml is of no use:"], others


@pytest.mark.fault(58, "a thread of librados that still works as the stock script begins has its descriptors")
def test_stock_script_is_waited_for_by_no_thread_of_ours(host: Host, tmp_path: Path) -> None:
    """A thread of a library ends a process that has closed a descriptor under it: librados' does (abort)."""
    program = tmp_path / "becomes"
    program.write_text(
        "import os, threading\n"
        "from semishared.tools.ending import become\n"
        "end = os.pipe()[0]\n"
        "def work():\n"
        "    while True:\n"
        "        try:\n"
        "            os.fstat(end)\n"
        "        except OSError:\n"
        "            os.abort()\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "become(['sh', '-c', 'sleep 0.3; echo reason >&2; exit 3'], b'INFO: held\\n')\n"
    )
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, program], capture_output=True, check=False, env={"PYTHONPATH": str(ROOT / "lib")}
        )
        assert (done.returncode, done.stderr) == (3, b"reason\nINFO: held\n")
