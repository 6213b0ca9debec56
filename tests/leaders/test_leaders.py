# SPDX-License-Identifier: Apache-2.0
"""What a leader has on its own disk when another front-end leads: found there, or named."""

from __future__ import annotations

import json
from typing import Any, Callable, Dict, List, Sequence

import pytest

from lab.cloud import DATASTORES, SYSTEM
from lab.guest import content
from lab.oned import ActionFailed
from points import ALL

from .conftest import COMMAND, Group

KIB = 64
MONITORED, ERROR = 2, 3
LOCAL: Dict[str, Any] = {"SEMISHARED_PLACE": "local"}
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
        self.host = host
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

    def deploy(self) -> None:
        """Have it on the other host."""
        self.host = {"h1": "h2", "h2": "h1"}[self.host]
        self.cloud.oned.vm_deploy(self.id, self.host, SYSTEM)

    def retry(self) -> None:
        self.cloud.oned.vm_recover(self.id, "retry")

    def says(self, act: Callable[[], object], words: Sequence[str]) -> None:
        """Check that something is refused with these words."""
        with pytest.raises(ActionFailed) as e:
            act()
        for word in words:
            assert word in str(e.value), str(e.value)


def stored(group: Group, image: int) -> bytes:
    source = group.cloud.source(image)
    return group.cloud.read(source, "raw", KIB << 10, 4096 << 10, node=group.leader)


@pytest.mark.fault(
    71, "a VM that came to rest on a leader is found there by the next one, or that one's name is said"
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


@pytest.mark.fault(72, "a directory that a leader has kept of an earlier stay of a VM is not resumed from")
def test_what_is_left_of_an_earlier_stay_is_not_resumed_from(group: Group) -> None:
    vm = Vm(group, "stale")
    vm.undeploy()
    # As a leader leaves it that is lost before the source of a resume goes.
    group.fe.run(["cp", "-a", f"{VM_DIR}/{vm.id}", "/var/tmp/kept"])
    vm.deploy()
    group.fe.run(["mv", "/var/tmp/kept", f"{VM_DIR}/{vm.id}"])
    vm.write("second")
    group.cloud.lead("fe2")
    vm.undeploy()
    assert group.has(vm.id) == ["fe", "fe2"]
    group.cloud.lead("fe")
    size = ["stat", "-c", "%s", f"{VM_DIR}/{vm.id}/disk.1"]
    before = group.fe.run(size).stdout
    group.cloud.oned.disk_resize(vm.id, 1, 16)
    assert (group.fe.run(size).stdout, int(group.fe2.run(size).stdout)) == (before, 16 << 20)
    group.lose(group.fe2)
    vm.says(vm.deploy, [f"SS091 VM {vm.id} is not on fe", "front-end fe2, which may have it"])
    group.fe2.start()
    vm.retry()
    vm.check()
    assert group.has(vm.id) == ["fe", "h1"]
    done = group.fe.run([COMMAND, "gc", "--now", "--json"], check=False)
    assert group.has(vm.id) == ["h1"], done.stdout.decode()


@pytest.mark.fault(
    71, "a terminate under another leader gives no uncommitted disk up that the last one has on its own disk"
)
def test_a_diff_at_rest_is_committed_where_it_is_or_its_front_end_is_named(group: Group) -> None:
    vm = Vm(group, "diff", diff=True)
    # Its image is changed behind our back: the undeploy cannot commit, and the diff comes to rest as it is.
    path = group.cloud.source(vm.image)
    group.fe.run(["qemu-io", "-f", "raw", "-c", "write -q -P 0x99 8M 64k", path])
    vm.undeploy()
    group.command("publish", str(vm.id))
    said = group.cloud.oned.vm(vm.id).user_template["SEMISHARED"]
    group.cloud.lead("fe2")
    group.command("publish", str(vm.id))
    assert group.cloud.oned.vm(vm.id).user_template["SEMISHARED"] == said
    rows = json.loads(group.command("status", "--json"))["disks"]
    assert {(row["machine"], row["missing"]) for row in rows if row["vm"] == vm.id} == {("fe", "")}
    done = group.fe2.run([COMMAND, "commit", str(vm.id), "2"], check=False)
    assert done.returncode == 1 and "SS141" in done.stderr.decode(), "it was looked for where it is"
    group.lose(group.fe)
    done = group.fe2.run([COMMAND, "commit", str(vm.id), "2"], check=False)
    assert f"SS091 VM {vm.id} is not on this front-end" in done.stderr.decode()
    end = lambda: group.cloud.oned.vm_terminate(vm.id)  # noqa: E731
    vm.says(end, [f"SS091 VM {vm.id} is not on fe2, where disk 2 is to be committed", "front-end fe,"])
    # oned names the last host the second time, which has nothing of the VM.
    vm.says(vm.retry, [f"SS091 VM {vm.id} is not on h1, where disk 2 is to be committed"])
    group.fe.start()
    vm.says(vm.retry, ["SS141"])
    group.cloud.oned.vm_recover(vm.id, "delete")
    assert group.has(vm.id) == []
    # What was not committed is kept, where it was.
    names = [name for name in group.cloud.files(group.fe, VM_DIR) if ".kept-" in name and "/" not in name]
    (kept,) = names
    done = group.fe2.run([COMMAND, "commit", str(vm.id)], check=False)
    assert done.returncode == 1 and f"{kept} on fe: SS141" in done.stderr.decode(), done.stderr.decode()
    group.fe.run(["rm", "-rf", f"{VM_DIR}/{kept}"])


@pytest.mark.fault(71, "what is asked of a VM at rest is done where it is, also under another leader")
def test_a_vm_at_rest_ends_on_the_front_end_that_has_it(group: Group) -> None:
    vm = Vm(group, "ends", diff=True)
    vm.undeploy()
    group.cloud.lead("fe2")
    group.cloud.oned.disk_resize(vm.id, 1, 16)
    saved = group.cloud.oned.disk_saveas(vm.id, 0, "saved")
    assert group.cloud.oned.image(saved).source and group.has(vm.id) == ["fe"]
    group.cloud.oned.vm_terminate(vm.id)
    assert group.has(vm.id) == []
    assert stored(group, vm.image) == content("first", 4096, KIB)


COMMON = """
for name in 101 .semishared; do
    mkdir -p "$0/100/common/$name" "$0/$name"
    chown oneadmin: "$0/100/common" "$0/100/common/$name" "$0/$name"
    mount --bind "$0/100/common/$name" "$0/$name"
done
"""


def test_with_one_file_system_each_leader_has_what_is_at_rest(group: Group) -> None:
    for node in (group.fe, group.fe2):
        node.run(["sh", "-euc", COMMON, DATASTORES], user="root")
    try:
        vm = Vm(group, "common")
        vm.undeploy()
        assert group.has(vm.id) == ["fe", "fe2"]
        said = json.loads(group.command("gc", "--now", "--json"))
        assert not [row for row in said["findings"] if row["machine"].startswith("fe")], said
        assert "fe2: " not in str(doctors(group)) and group.has(vm.id) == ["fe", "fe2"]
        group.cloud.lead("fe2")
        group.lose(group.fe)
        vm.deploy()
        vm.check()
        assert "is brought from there" not in group.cloud.said("mv")[-1]
        vm.cloud.terminate(vm.id)
    finally:
        group.fe.start()
        for node in (group.fe, group.fe2):
            lazy = ["umount", "--lazy", f"{VM_DIR}", f"{DATASTORES}/.semishared"]
            node.run(lazy, user="root", check=False)


def doctors(group: Group) -> List[str]:
    """Return what doctor on `fe` says of the other front-end."""
    done = group.fe.run([COMMAND, "doctor", "--json"], check=False, timeout=120)
    rows: Any = json.loads(done.stdout)["findings"]
    return [f"{row['machine']}: {row['what']}" for row in rows if row["machine"] == "fe2"]


def at_some(points: List[str]) -> List[int]:
    """Return at which points an action is killed: at all in `make test-full`, else at a few of both ends."""
    last = max(int(line.split()[0]) for line in points)
    return list(range(1, last + 1)) if ALL else sorted({last // 2, last})


def test_leader_lost_between_two_steps_of_undeploy_and_resume(group: Group) -> None:
    """Each time the new leader ends it, or names the lost one; when that is up again, it ends it."""
    vm = Vm(group, "killed")
    undeploying = group.points(vm.undeploy)
    resuming = group.points(vm.deploy)
    vm.check()
    became: List[str] = []
    rounds = [(False, number) for number in at_some(undeploying)]
    rounds += [(True, number) for number in at_some(resuming)]
    for is_resume, number in rounds:
        if is_resume:
            vm.undeploy()
        lost = group.leader
        if group.lose_leader_at(vm.deploy if is_resume else vm.undeploy, number) is not None:
            try:
                vm.retry()
                became.append("ended")
            except ActionFailed as e:
                said = str(e)
                assert f"SS091 VM {vm.id} is not on" in said and f"front-end {lost.name}," in said, said
                became.append("named")
                lost.start()
                vm.retry()
        lost.start()
        if not is_resume:
            vm.deploy()
        vm.check()
        vm.write(f"round{len(became)}")
    assert {*became} == {"ended", "named"}, became
    said = group.command("gc", "--now")
    assert group.has(vm.id) == [vm.host], said


def test_leader_that_was_deposed_goes_on_beside_the_new_one(group: Group) -> None:
    """Two for a moment: the old one wakes in the middle of an undeploy that the new one has done."""
    vm = Vm(group, "deposed")
    undeploying = group.points(vm.undeploy)
    vm.deploy()
    for number in at_some(undeploying):
        go_on = group.depose_leader_at(vm.undeploy, number)
        if go_on is not None:
            vm.retry()
            go_on()
        assert group.cloud.oned.state(vm.id)[0] == "UNDEPLOYED"
        vm.deploy()
        vm.check()
        vm.write(f"deposed{number}")
    said = group.command("gc", "--now")
    assert group.has(vm.id) == [vm.host], said


def test_leader_lost_between_two_steps_of_a_commit(group: Group) -> None:
    vm = Vm(group, "commits", diff=True)
    points = group.points(lambda: group.command("commit", str(vm.id)))
    for number in at_some(points):
        vm.write(f"commit{number}")
        lost = group.leader
        group.lose_leader_at(lambda: group.command("commit", str(vm.id)), number)
        group.command("commit", str(vm.id))
        assert stored(group, vm.image) == content(vm.seed, 4096, KIB)
        lost.start()
    vm.check()


def test_leader_lost_between_two_steps_of_gc(group: Group) -> None:
    """What hosts have goes at once, and what the lost leader has when it is up again."""
    vm = Vm(group, "gone")
    vm.undeploy()
    h1 = group.cloud.lab.node("h1")
    done = group.cloud.create("done", [{"TYPE": "fs", "SIZE": "8", "FORMAT": "raw"}], context=False)
    group.cloud.oned.vm_terminate(done)

    def leave() -> None:
        for node in (group.fe, group.fe2, h1):
            node.run(["mkdir", "-p", f"{VM_DIR}/{done}/.semishared"])
            node.run(["cp", "/etc/hostname", f"{VM_DIR}/{done}/disk.0"])

    leave()
    points = group.points(lambda: group.command("gc", "--now"))
    assert group.has(done) == [] and group.has(vm.id) == ["fe"]
    for number in at_some(points):
        leave()
        lost = group.leader
        group.lose_leader_at(lambda: group.command("gc", "--now"), number)
        group.command("gc", "--now")
        assert {*group.has(done)} <= {lost.name}
        lost.start()
        group.command("gc", "--now")
        assert group.has(done) == [] and group.has(vm.id) == ["fe"]


def test_leader_lost_between_two_steps_of_a_fence(group: Group) -> None:
    words = ("fence", "h2", "--confirmed-off")
    off = group.cloud.lab.node("h2")
    off.kill()
    group.cloud.oned.host("h2").state = ERROR
    points = group.points(lambda: group.command(*words))
    group.cloud.oned.forget_fences()
    for number in at_some(points):
        lost = group.leader
        group.lose_leader_at(lambda: group.command(*words), number)
        assert "h2 is shut out" in group.command(*words) and group.command("fence", "h2", "--check")
        group.cloud.oned.forget_fences()
        lost.start()
    group.cloud.oned.host("h2").state = MONITORED
    off.start()


def test_doctor_says_what_the_other_front_end_lacks(group: Group) -> None:
    assert doctors(group) == [
        f"fe2: {VM_DIR} is on a disk of its own: a VM that is stopped or undeployed waits for the front-end "
        "that led then"
    ]
    conf = group.fe2.path("/var/lib/one/remotes/etc/semishared.conf")
    before = conf.read_text()
    conf.write_text(f"{before}\n# another\n")
    assert "fe2: etc/semishared.conf is another than on fe" in doctors(group)
    conf.write_text(before)
    group.lose(group.fe2)
    assert [line for line in doctors(group) if line.startswith("fe2: it does not answer fe: what it has of")]
