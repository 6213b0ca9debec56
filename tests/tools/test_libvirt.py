# SPDX-License-Identifier: Apache-2.0
"""Calls of libvirt's binding: one that hangs, fails or loses its libvirtd ends in time, with one line; its
words for options.

What hangs is a socket on which nobody answers; what answers is libvirt's own test driver. Guests are in
tests/faults.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Iterator

import pytest

from semishared.disk import records
from semishared.errors import NotSupported
from semishared.guest import active_layer
from semishared.model import steps as s
from semishared.plan.vm import live_migration, migration
from tools.world import World

pytestmark = pytest.mark.skipif(importlib.util.find_spec("libvirt") is None, reason="no python3-libvirt")
ROOT = Path(__file__).resolve().parents[2]
TEST = "test:///default"


def ended(code: str) -> tuple[int, str, str]:
    """Run a program with our package, as an action runs: by itself; return exit code, stdout and stderr."""
    argv = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT / 'lib')!r})\n{code}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[str]:
    """Yield the URI of a libvirtd that takes connections and says nothing."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        server.listen(5)
        yield f"qemu+unix:///system?socket={tmp_path}/socket"


def test_libvirtd_that_does_not_answer_costs_the_limit_and_the_process_ends(silent: str) -> None:
    code = (
        "from semishared.guest import domain, libvirtd\n"
        "from semishared.errors import ToolTimeout\n"
        "try: domain.ask('one-7', 'suspend', lambda guest: guest.suspend(), uri={uri!r}, timeout_s=1)\n"
        "except ToolTimeout as e: print(e.line())\n"
        "print(domain.ask('test', 'domid', lambda guest: guest.ID(), uri={test!r}))\n"
    )
    before = time.monotonic()
    status, said, errors = ended(code.format(uri=silent, test=TEST))
    assert time.monotonic() - before < 10
    line, other = said.splitlines()
    assert line.startswith(f"SS033 libvirt at {silent} did not answer within 1 s: suspend one-7; ")
    assert (status, other, errors) == (0, "1", "")


def test_failure_is_one_line_of_libvirts_words_and_nothing_is_printed() -> None:
    code, said, errors = ended(
        "from semishared.guest import domain\n"
        "from semishared.errors import ToolFailed\n"
        f"try: domain.ask('nobody', 'suspend', lambda guest: guest.suspend(), uri={TEST!r})\n"
        "except ToolFailed as e: print(e.detail)\n"
        f"print(domain.state('nobody', {TEST!r}), domain.state('test', {TEST!r}), domain.state('test', 'qemu+unix:///system?socket=/no'))\n"
    )
    assert (code, errors) == (0, "")
    assert said.splitlines() == [
        f"libvirt at {TEST}: suspend nobody: error: Domain not found",
        "absent running unknown",
    ]


@pytest.mark.fault(
    46, "what a migration that failed would remove on the target is left if it runs there by now"
)
def test_domain_that_runs_by_now_is_no_arrival_to_be_removed() -> None:
    code, said, errors = ended(
        "from semishared.tools import this_machine\n"
        "this_machine.reach_bindings()\n"
        "import libvirt\n"
        "from semishared.errors import SemisharedError\n"
        "from semishared.model.vm.live_steps import RemoveArrival\n"
        "from semishared.vmm import live_migration\n"
        f"class Site: uri_of = staticmethod(lambda host: {TEST!r})\n"
        "live_migration.site = Site\n"
        f"guest = libvirt.open({TEST!r}).lookupByName('test')\n"
        "def remove(how):\n"
        "    try: live_migration.remove_arrival(RemoveArrival('test', 'h2', how))\n"
        "    except SemisharedError as e: print(e.detail)\n"
        "    print(guest.isActive())\n"
        "remove('destroy'), remove('undefine'), guest.suspend(), remove('destroy')\n"
    )
    left = "test on h2 is running by now: it is left as it is"
    assert (said.splitlines(), code, errors) == ([left, "1", left, "1", "0"], 0, "")


def test_what_libvirt_says_by_itself_is_heard() -> None:
    code, said, errors = ended(
        "from semishared.guest import domain, libvirtd, virsh\n"
        f"virsh._site.append(virsh.Site(uri={TEST!r}))\n"
        "with domain.hearing('test', 'LIFECYCLE') as heard:\n"
        "    domain.ask('test', 'suspend', lambda guest: guest.suspend())\n"
        "    print(heard.get(timeout=30)[0] == libvirtd.binding().VIR_DOMAIN_EVENT_SUSPENDED)\n"
    )
    assert (code, said, errors) == (0, "True\n", "")


def test_host_without_the_binding_names_the_package_and_asks_the_rest_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "libvirt.py").write_text("raise ImportError('not here')")
    code, said, errors = ended(
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from semishared.guest import domain, virsh\n"
        "from semishared.errors import ToolMissing\n"
        f"virsh._site.append(virsh.Site(uri={TEST!r}))\n"
        "print(virsh.active_domains() >= {'test'}, virsh.why_in_use('test'), virsh.why_in_use('one-7') == '')\n"  # noqa: E501
        "for ask in (domain.state, domain.dumpxml):\n"
        "    try: ask('test')\n"
        "    except ToolMissing as e: print(e.line())\n"
    )
    assert (code, errors) == (0, "")
    first, *others = said.splitlines()
    assert first == "True domain test runs there True"
    assert len(others) == 2 and all(
        line.startswith("SS032 python3-libvirt is not installed on ") for line in others
    )


def test_deltas_of_a_guest_that_may_run_are_not_merged_under_it(world: World) -> None:
    disk = world.disk()
    world.on(s.PrepareVm(disk.vm, disk.vm_dir), s.CopyImage(disk, world.image(), 0))
    record = records.record_of(disk)
    active_layer.note(disk.vm_dir, [active_layer.Switch(record, record)])
    active_layer.create(record)
    active_layer.write(disk.vm_dir, active_layer.with_delta(record))
    before = {path: path.lstat().st_mtime_ns for path in Path(disk.vm_dir).rglob("*")}
    code, said, errors = ended(
        "from semishared.errors import ToolFailed\n"
        "from semishared.guest import go_over, virsh\n"
        "virsh._site.append(virsh.Site(uri='qemu+unix:///system?socket=/no'))\n"
        f"try: go_over.settle({disk.vm_dir!r}, 'one-5')\n"
        "except ToolFailed as e: print(e.detail)\n"
    )
    assert (code, errors) == (0, "")
    assert said.endswith("does not say whether one-5 runs: its deltas are not merged\n")
    assert {path: path.lstat().st_mtime_ns for path in Path(disk.vm_dir).rglob("*")} == before


@pytest.mark.skipif(shutil.which("virsh") is None, reason="no virsh")
def test_every_option_of_virsh_migrate_is_understood_or_refused_by_name() -> None:
    text = subprocess.run(["virsh", "help", "migrate"], capture_output=True, text=True, check=True).stdout
    options = re.findall(r"^ {4}(--[a-z0-9-]+)(?: <(\w+)>)?", text, re.MULTILINE)
    assert len(options) > 40
    refused = set()
    for name, kind in options:
        words = [name, *({"number": ["3"], "string": ["x"]}.get(kind, []))]
        try:
            live_migration.options(words, "", "", False, False)
            migration.parsed(words)
            migration.parsed(["=".join(words)])
        except NotSupported as e:
            assert name in e.detail
            refused.add(name)
    storage = {
        name for name, _ in options if name.startswith(("--copy-storage", "--migrate-disks", "--disks-"))
    }
    assert refused == storage | {"--direct", "--dname", "--xml", "--persistent-xml"}
    ours = {"--verbose", "--timeout-suspend", "--timeout-postcopy", "--postcopy-after-precopy"}
    assert {name for name, kind in options if not kind} - refused == {*migration.FLAGS, *ours}


def test_flags_and_parameters_are_those_of_libvirt() -> None:
    import libvirt

    for word in migration.FLAGS.values():
        assert isinstance(getattr(libvirt, f"VIR_MIGRATE_{word}"), int)
    for word in (*migration.NUMBERS.values(), *migration.TEXTS.values(), "COMPRESSION"):
        assert isinstance(getattr(libvirt, f"VIR_MIGRATE_PARAM_{word}"), str)
