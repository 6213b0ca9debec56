# SPDX-License-Identifier: Apache-2.0
"""The simulated oned itself: what the recordings do not show."""

from __future__ import annotations

import subprocess
import threading
import time
import xmlrpc.client
from pathlib import Path
from typing import Any, Iterator, List
from xml.etree import ElementTree

import pytest

import traces
from lab.oned import IMAGE_DS, SYSTEM_DS, ActionFailed, CrashTrap, Img, Lcm, Oned, Refused, Settings, Step
from lab.oned.domain import disk_lines
from lab.oned.drivers import read_stderr
from lab.oned.objects import Vm
from lab.oned.runners import stream_script
from lab.oned.template import parse, render
from replay import recorder


@pytest.fixture
def oned(tmp_path: Path) -> Iterator[Oned]:
    recorder.plant(tmp_path, ("h1", "h2"), vmm="semishared")
    recorder.fail(tmp_path / "calls", {})
    with Oned.in_tree(tmp_path, Settings()) as up:
        up.runner.extra.update(RECORDER_LOG=str(tmp_path / "calls"), RECORDER_ROOT=str(tmp_path))  # type: ignore[attr-defined]
        up.host_create("h1")
        up.host_create("h2")
        up.datastore_create(IMAGE_DS, 100)
        up.datastore_create(SYSTEM_DS, 101)
        yield up


def script(oned: Oned, name: str, text: str) -> None:
    """Replace one driver script of the tree."""
    path: Path = oned.runner.path("fe", f"/var/lib/one/remotes/{name}")  # type: ignore[attr-defined]
    path.write_text(f"#!/bin/sh\n{text}\n")


def vm_with(oned: Oned, persistent: bool = False) -> int:
    image = oned.image_create(100, "data", size=4, type="DATABLOCK", format="raw", persistent=persistent)
    return oned.vm_create({"NAME": "one", "DISK": [{"IMAGE_ID": str(image)}]})


def one(oned: Oned) -> Any:
    assert oned.rpc is not None
    return xmlrpc.client.ServerProxy(oned.rpc.url).one


def test_template_text_becomes_the_xml_of_the_api() -> None:
    text = 'NAME = "a \\"b\\""\n# comment\nCPU=1 DISK=[ IMAGE_ID=1, SIZE = "5" ]\nDISK = [ TYPE=fs ]\n'
    assert parse(text) == {
        "NAME": 'a "b"',
        "CPU": "1",
        "DISK": [{"IMAGE_ID": "1", "SIZE": "5"}, {"TYPE": "fs"}],
    }
    assert render({"B": "x ]]> y", "A": [{"K": "1"}]}) == (
        "<A><K><![CDATA[1]]></K></A><B><![CDATA[x ]]]]><![CDATA[> y]]></B>"
    )
    for wrong in ("DISK=[A=1", "what is this"):
        with pytest.raises(ValueError, match="near|at"):
            parse(wrong)


def test_stderr_is_read_as_oned_reads_it() -> None:
    assert read_stderr("one \ntwo\nERROR: ln: detail\nINFO: x\n") == ("onetwo", [])
    assert read_stderr("ERROR: 404 not found\nWARN: disk 7\n")[1] == ["ERROR: 404 not found"]


def test_a_line_that_could_crash_oned_fails_the_test_even_on_success(oned: Oned) -> None:
    script(oned, "tm/semishared/clone", 'echo "INFO: 12 MB copied" >&2; exit 0')
    vm = vm_with(oned)
    with pytest.raises(CrashTrap):
        oned.vm_deploy(vm, "h1", 101)
    assert oned.drivers.crashes == ["INFO: 12 MB copied"]


def test_failed_prolog_shows_one_line_and_retry_runs_the_whole_file_again(oned: Oned) -> None:
    script(oned, "tm/semishared/clone", 'echo "ERROR: clone: why" >&2; echo "cannot clone" >&2; exit 3')
    vm = vm_with(oned)
    with pytest.raises(ActionFailed, match="^cannot clone$"):
        oned.vm_deploy(vm, "h1", 101)
    assert oned.state(vm) == ("ACTIVE", Lcm.PROLOG_FAILURE)
    assert oned.error(vm) == "Error executing image transfer script: cannot clone"
    script(oned, "tm/semishared/clone", "exit 0")
    oned.vm_recover(vm, "retry")
    assert oned.state(vm) == ("ACTIVE", Lcm.RUNNING)
    assert [call.action for call in oned.calls if call.kind == "tm"] == ["clone", "clone"]


def test_recover_delete_saves_nothing_and_leaves_the_image_in_error(oned: Oned) -> None:
    vm = vm_with(oned, persistent=True)
    script(oned, "tm/semishared/ln", "exit 1")
    with pytest.raises(ActionFailed):
        oned.vm_deploy(vm, "h1", 101)
    oned.vm_recover(vm, "delete")
    assert [call.action for call in oned.calls if call.kind == "tm"] == ["ln", "delete", "delete"]
    assert oned.image(0).state == Img.ERROR
    oned.image_enable(0)
    assert oned.image(0).state == Img.READY


def test_action_with_suffix_is_preferred_where_it_exists(oned: Oned) -> None:
    vm = vm_with(oned)
    oned.vm_deploy(vm, "h1", 101)
    image = oned.image_create(100, "hot", size=4, type="DATABLOCK", format="raw")
    path: Path = oned.runner.path("fe", "/var/lib/one/remotes/tm/semishared/")  # type: ignore[attr-defined]
    (path / "clone.semishared").symlink_to("clone")
    oned.disk_attach(vm, image)
    assert [call.action for call in oned.calls if call.kind == "tm"] == ["clone", "clone.semishared"]


def test_image_store_of_another_mode_is_refused_before_any_driver_runs(oned: Oned) -> None:
    other = oned.datastore_create(
        'NAME=o TYPE=IMAGE_DS DS_MAD=semishared TM_MAD=other CLONE_TARGET_SEMISHARED="SYSTEM"', 110
    )
    image = oned.image_create(other, "data", size=4, type="DATABLOCK", format="raw")
    vm = oned.vm_create({"NAME": "one", "DISK": [{"IMAGE_ID": str(image)}]})
    before = len(oned.calls)
    with pytest.raises(Refused, match="does not support transfer mode: semishared"):
        oned.vm_deploy(vm, "h1", 101)
    assert len(oned.calls) == before


def test_persistent_image_is_for_one_vm(oned: Oned) -> None:
    vm_with(oned, persistent=True)
    with pytest.raises(Refused):
        oned.vm_create({"NAME": "two", "DISK": [{"IMAGE_ID": "0"}]})


def test_rpc_checks_the_session_and_names_what_is_missing(oned: Oned) -> None:
    assert one(oned).vm.info("oneadmin:wrong", 0)[0] is False
    good, text, code = one(oned).datastore.info("oneadmin:password", 7, False)
    assert (good, text, code) == (False, "[one.datastore.info] Error getting datastore [7].", 1024)
    assert one(oned).host.info("oneadmin:password", 1, False)[0] is True
    assert one(oned).system.version("oneadmin:password") == [True, "7.4.0", 0]


def test_thirty_vms_at_once_while_the_api_answers(oned: Oned) -> None:
    image = oned.image_create(100, "base", size=4, type="DATABLOCK", format="raw")
    vms = [oned.vm_create({"NAME": f"v{n}", "DISK": [{"IMAGE_ID": str(image)}]}) for n in range(30)]
    failures: List[BaseException] = []

    def live(vm: int) -> None:
        try:
            oned.vm_deploy(vm, "h1", 101)
            oned.vm_terminate(vm, hard=True)
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=live, args=(vm,)) for vm in vms]
    for thread in threads:
        thread.start()
    answered = 0
    while any(thread.is_alive() for thread in threads):
        assert one(oned).image.info("oneadmin:password", image, False)[0] is True
        answered += 1
        time.sleep(0.05)
    assert not failures
    assert answered > 3
    assert {oned.state(vm)[0] for vm in vms} == {"DONE"}
    assert oned.image(image).state == Img.READY
    # Per VM the calls keep their order, however the VMs interleave.
    for vm in vms:
        mine = [call.action for call in oned.calls if call.kind == "tm" and call.argv[-2] == str(vm)]
        assert mine == ["clone", "delete", "delete"]


def test_stream_to_a_host_stops_at_the_first_failure_and_keeps_stdin_apart(tmp_path: Path) -> None:
    steps = [
        Step(("/bin/cat", "-"), "first\n$HOME `id`", f"{tmp_path}/one"),
        Step(("/bin/false",)),
        Step(("/bin/cat", "-"), "late", f"{tmp_path}/two"),
    ]
    done = subprocess.run(["bash", "-s"], input=stream_script(steps).encode(), check=False)
    assert done.returncode == 1
    assert (tmp_path / "one").read_text() == "first\n$HOME `id`\n"
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize("name", [name for name in traces.names() if name.startswith("b-")])
def test_disks_are_written_as_in_the_recordings_with_ceph(name: str) -> None:
    """What DISK_TYPE and TYPE make of a disk in the domain XML, in every configuration that was tried."""
    recording = traces.load(name)
    step = next(step for step in recording["steps"] if any("/deployment." in path for path in step["files"]))
    (domain,) = (traces.body(recording, key) for path, key in step["files"].items() if "/deployment." in path)
    (served,) = (
        traces.body(recording, key) for what, key in step["info_after"].items() if what.startswith("vm.")
    )
    element = ElementTree.fromstring(served)
    vm = Vm(int(element.findtext("ID") or ""), name, {}, {}, 3)
    wanted = domain[domain.index("\t\t<disk ") : domain.index("\t\t<controller ")].split("\t\t</disk>\n")[:-1]
    rows = [{child.tag: child.text or "" for child in disk} for disk in element.findall("TEMPLATE/DISK")]
    assert len(rows) >= 3
    for row, text in zip(rows, wanted):
        lines = disk_lines(vm, f"/var/lib/one//datastores/101/{vm.id}", row, True, 0)
        assert "".join(f"{line}\n" for line in lines) == f"{text}\t\t</disk>\n"
