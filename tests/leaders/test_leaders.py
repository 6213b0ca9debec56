# SPDX-License-Identifier: Apache-2.0
"""What a leader has on its own disk when another front-end leads: found there, or named."""

from __future__ import annotations

import json
from typing import Any, Callable, Dict, Sequence

import pytest

from lab.cloud import DATASTORES, SYSTEM, Cloud
from lab.guest import content
from lab.oned import ActionFailed

from .conftest import Group

KIB = 64
LOCAL: Dict[str, Any] = {"SEMISHARED_PLACE": "local"}
COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"
VM_DIR = f"{DATASTORES}/{SYSTEM}"


class Vm:
    """A VM with an overlay, a volatile disk and, if told, a local disk of a persistent image; what its guest
    has written is looked for after each move.
    """

    def __init__(self, group: Group, name: str, *, diff: bool = False, host: str = "h1") -> None:
        self.group, self.cloud = group, group.cloud
        self.os = self.cloud.os_image(f"{name}-os")
        disks = [{"IMAGE_ID": str(self.os)}, {"TYPE": "fs", "SIZE": "8", "FORMAT": "raw"}]
        self.image = -1
        if diff:
            self.image = self.cloud.data_image(
                f"{name}-diff", content("base", 0, KIB), persistent=True, **LOCAL
            )
            disks.append({"IMAGE_ID": str(self.image)})
        self.id = self.cloud.deploy(name, disks, host, context=False)
        self.targets = ["vda", "vdb", "vdc"][: len(disks)]
        self.write("first")

    def write(self, seed: str) -> None:
        guest = self.cloud.guest(self.id)
        for target in self.targets:
            guest.write(target, seed, 4096, KIB)
        self.seed = seed

    def check(self) -> None:
        guest = self.cloud.guest(self.id)
        for target in self.targets:
            guest.check(target, self.seed, 4096, KIB)

    def undeploy(self) -> None:
        self.cloud.oned.vm_undeploy(self.id, hard=True)

    def deploy(self, host: str = "h2") -> None:
        self.cloud.oned.vm_deploy(self.id, host, SYSTEM)

    def retry(self) -> None:
        self.cloud.oned.vm_recover(self.id, "retry")

    def says(self, act: Callable[[], object], words: Sequence[str]) -> None:
        """Check that something is refused with these words."""
        with pytest.raises(ActionFailed) as e:
            act()
        for word in words:
            assert word in str(e.value), str(e.value)


def stored(cloud: Cloud, image: int) -> bytes:
    return cloud.read(cloud.source(image), "raw", KIB << 10, 4096 << 10)


@pytest.mark.fault(
    72, "a VM that came to rest on a leader is found there by the next one, or that one's name is said"
)
def test_a_vm_at_rest_is_brought_from_the_front_end_that_has_it(group: Group) -> None:
    vm = Vm(group, "rests")
    vm.undeploy()
    assert group.has(vm.id) == ["fe"]
    group.cloud.lead("fe2")
    group.lose(group.fe)
    vm.says(vm.deploy, [f"SS091 VM {vm.id} is not on fe2", "front-end fe, which may have it"])
    group.fe.start()
    vm.retry()
    vm.check()
    assert group.has(vm.id) == ["h2"] and "is brought from there" in group.cloud.said("mv")[-1]


@pytest.mark.fault(73, "a directory that a leader has kept of an earlier stay of a VM is not resumed from")
def test_what_is_left_of_an_earlier_stay_is_not_resumed_from(group: Group) -> None:
    vm = Vm(group, "stale")
    vm.undeploy()
    # As a leader leaves it that is lost before the source of a resume goes.
    group.fe.run(["cp", "-a", f"{VM_DIR}/{vm.id}", "/var/tmp/kept"])
    vm.deploy("h2")
    group.fe.run(["mv", "/var/tmp/kept", f"{VM_DIR}/{vm.id}"])
    vm.write("second")
    group.cloud.lead("fe2")
    vm.undeploy()
    assert group.has(vm.id) == ["fe", "fe2"]
    group.cloud.lead("fe")
    group.lose(group.fe2)
    vm.says(lambda: vm.deploy("h1"), [f"SS091 VM {vm.id} is not on fe", "front-end fe2, which may have it"])
    group.fe2.start()
    vm.retry()
    vm.check()
    assert group.has(vm.id) == ["fe", "h1"]
    done = group.fe.run([COMMAND, "gc", "--now", "--json"], check=False)
    assert group.has(vm.id) == ["h1"], done.stdout.decode()
