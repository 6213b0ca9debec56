# SPDX-License-Identifier: Apache-2.0
"""Guests that are clients of CephFS themselves: by the key in the context of their VM, on Debian's own
kernel, beside another tenant.

The VMs are real, and boot nothing; their guest is a kernel host on the lab's network, which has the ISO of
the context and nothing else.
"""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from lab.ceph import fs
from lab.cloud import SYSTEM
from lab.kernel_host import Done, KernelHost
from lab.oned import ActionFailed
from lab.oned.states import Vm as State
from lab.switch import Switch
from semishared.model.share import names as share_names
from semishared.model.share import steps as share_steps
from shares.ceph import COMMAND, CephShares
from shares.cloud import SHARES
from shares.page import PAGES, ROOT

MiB = 1 << 20
CLIENT = {"SEMISHARED_SHARE_ACCESS": "client"}
KEYS = f"{ROOT}/.semishared/.keys"
READ_ISO = (
    "modprobe -a loop isofs; mkdir -p /context; umount /context 2>/dev/null || true; mount -o loop,ro "
    "/context.iso /context"
)
SHUT_OUT_S = 60


class Share(NamedTuple):
    """What the context of a VM says of a share."""

    number: str
    said: dict[str, str]

    def of(self, name: str) -> str:
        return self.said[f"SEMISHARED_SHARE_{self.number}_{name}"]

    def mount(self, path: str, where: str = "/other") -> list[str]:
        """Return the words that mount a path of the cluster by its key."""
        options = f"{self.of('ACCESS')},name={self.of('USER')},fs={self.of('FS')},secret={self.of('KEY')}"
        return ["mount", "-t", "ceph", f"{self.of('MONITORS')}:{path}", where, "-o", options]


class Tenants:
    """User 5's VM has `mine`, and `theirs` to read; user 9's VM has `theirs`; nobody's has `secret`."""

    def __init__(self, cloud: CephShares, guest: KernelHost) -> None:
        self.cloud, self.guest, self.host, self.oned = cloud, guest, cloud.host, cloud.oned
        self.mine, self.theirs = (
            cloud.image("mine", "new:24M", **CLIENT),
            cloud.image("theirs", "new:16M", **CLIENT),
        )
        self.secret = cloud.image("secret", "new:16M")
        cloud.does(
            [
                "sh",
                "-c",
                f"echo secret >{cloud.source(self.secret)}/file; sync {cloud.source(self.secret)}/file",
            ]
        )
        self.one = self.deploy(
            "one",
            {"IMAGE_ID": str(self.mine)},
            {"IMAGE_ID": str(self.theirs), "MOUNT_TAG": "read"},
            read_only=(1,),
        )
        self.other = self.deploy("other", {"IMAGE_ID": str(self.theirs)})

    def deploy(
        self, name: str, *disks: dict[str, str], read_only: Sequence[int] = (), host: str = "h1"
    ) -> int:
        template: dict[str, Any] = {
            "NAME": name,
            "CPU": "0.1",
            "MEMORY": "32",
            "DISK": list(disks),
            "CONTEXT": {"NETWORK": "NO"},
        }
        vm = int(self.oned.vm_create(template))
        for number in read_only:
            self.oned.vm(vm).disks[number]["READONLY"] = "YES"
        self.oned.vm_deploy(vm, host, SYSTEM)
        return vm

    def iso(self, vm: int) -> str:
        """Return where the context of a VM is on its host."""
        context = self.oned.vm(vm).template["CONTEXT"]
        assert isinstance(context, dict)
        return f"/var/lib/one/datastores/{SYSTEM}/{vm}/disk.{context['DISK_ID']}"

    def shares(self, vm: int) -> list[Share]:
        """Return what its context says of shares."""
        done = self.host.run(["isoinfo", "-R", "-i", self.iso(vm), "-x", "/context.sh"], user="root")
        said = dict(line.partition("=")[::2] for line in shlex.split(done.stdout.decode(), comments=True))
        return [Share(number, said) for number in said.get("SEMISHARED_SHARES", "").split()]

    def boot(self, vm: int) -> None:
        """Give the guest the context of a VM, and let it do what START_SCRIPT of the page does."""
        self.guest.put("/context.iso", self.host.path(self.iso(vm)).read_bytes(), 0o600)
        (script,) = re.findall(r"(?ms)^```bash\n(of\(\).*?)^```$", PAGES)
        self.guest.script(f"modprobe ceph; {READ_ISO}; set -a; . /context/context.sh; set +a; {script}")

    def does(self, script: str, timeout: float = 180) -> Done:
        """Run a script in the guest; it may fail."""
        return self.guest.run(["bash", "-c", script], check=False, timeout=timeout)

    def users(self) -> set[str]:
        """Return the users of the cluster that are of shares."""
        known = self.cloud.lab.ceph.ask(["command", ["auth ls"], {}])[0]["auth_dump"]
        return {row["entity"] for row in known if row["entity"].startswith("client.share-one-")}

    def namespace(self, image: int) -> str:
        """Return which namespace the objects of a share are in."""
        return share_names.namespace(self.cloud.tree.marker, image)

    def keys(self) -> list[str]:
        """Return of whom the root says that they have keys."""
        return sorted(path.name for path in self.host.path(KEYS).iterdir())

    def tries(self, words: list[str], share: Share, stdin: str = "") -> tuple[int, str]:
        """Run a program of Ceph on h1 by the key of a share."""
        self.cloud.lab.ceph.give_key(self.host, share.of("USER"), share.of("KEY"))
        argv = [words[0], "--id", share.of("USER"), *words[1:]]
        done = self.host.run(argv, cwd="/", check=False, timeout=60, input=stdin.encode())
        return done.returncode, (done.stdout or done.stderr).decode()


@pytest.fixture(scope="module")
def tenants(cloud: CephShares) -> Iterator[Tenants]:
    with KernelHost("guest", Switch(cloud.lab)) as guest:
        yield Tenants(cloud, guest)


def test_the_key_is_in_the_context_of_its_vm_and_nowhere_else(tenants: Tenants) -> None:
    one, read = tenants.shares(tenants.one)
    (other,) = tenants.shares(tenants.other)
    assert (
        tenants.users() == {f"client.{share.of('USER')}" for share in (one, read, other)}
        and len(tenants.users()) == 3
    )
    assert (one.of("ACCESS"), read.of("ACCESS"), read.of("TAG")) == ("rw", "ro", "read")
    iso = tenants.host.path(tenants.iso(tenants.one))
    assert iso.stat().st_mode & 0o007 == 0
    search = [
        "grep",
        "-rslF",
        "-e",
        one.of("KEY"),
        "/var/lib/one",
        "/var/log",
        "/var/tmp",
        "/tmp",
        "/run",
        "/etc",
        ROOT,
    ]
    assert tenants.host.run(search, user="root", check=False).stdout.decode().split() == [
        tenants.iso(tenants.one)
    ]
    assert tenants.cloud.lab.fe.run(search, user="root", check=False).stdout == b""
    assert one.of("KEY") not in json.dumps(tenants.oned.vm(tenants.one).template)
    assert one.of("KEY") not in tenants.oned.vm(tenants.one).to_xml()


def test_the_host_gives_such_a_share_to_nobody(tenants: Tenants) -> None:
    domain = tenants.oned.vm(tenants.one).deploy_id
    said = tenants.host.run(["virsh", "-c", "qemu:///system", "dumpxml", domain]).stdout
    assert b"<devices>" in said and b"<filesystem" not in said
    assert tenants.host.run(["pgrep", "-x", "virtiofsd"], user="root", check=False).returncode == 1


@pytest.mark.parametrize("holder", ["image", "datastore"])
def test_a_vm_without_context_is_refused_and_not_given_the_share_by_its_host(
    tenants: Tenants, holder: str
) -> None:
    oned, users = tenants.oned, tenants.users()
    said = CLIENT if holder == "image" else {}
    oned.datastore_update(SHARES, f'SEMISHARED_SHARE_ACCESS="{"" if said else "client"}"')
    image = tenants.cloud.image(f"of-{holder}", "new:16M", **said)
    vm = int(
        oned.vm_create(
            {"NAME": f"none-{holder}", "CPU": "0.1", "MEMORY": "32", "DISK": [{"IMAGE_ID": str(image)}]}
        )
    )
    try:
        with pytest.raises(
            ActionFailed,
            match=r"SS003 .*disk 0 is a share whose client .*without CONTEXT.*make the VM anew",
        ) as caught:
            oned.vm_deploy(vm, "h1", SYSTEM)
        assert "\n" not in str(caught.value).strip()
        assert (
            tenants.host.run(["pgrep", "-x", "virtiofsd"], user="root", check=False).returncode == 1
            and tenants.users() == users
        )
    finally:
        oned.vm_recover(vm, "delete")
        oned.datastore_update(SHARES, 'SEMISHARED_SHARE_ACCESS=""')
        oned.image_delete(image)


def test_a_guest_mounts_what_it_was_told_writes_reads_and_is_held_to_the_size(tenants: Tenants) -> None:
    tenants.boot(tenants.other)
    assert tenants.does(f"echo theirs >/mnt/one-tag-{tenants.theirs}/file").code == 0
    tenants.does("umount /mnt/*")
    tenants.boot(tenants.one)
    mine = f"/mnt/one-tag-{tenants.mine}"
    assert tenants.does("stat -c %a /context/context.sh").out == "600\n"
    assert tenants.does(f"stat -f -c %T {mine}; df -m --output=size {mine} | tail -1").out.split() == [
        "ceph",
        "24",
    ]
    assert (
        tenants.does(f"echo mine >{mine}/file && sync && cat {mine}/file /mnt/read/file").out
        == "mine\ntheirs\n"
    )
    assert "Read-only file system" in tenants.does("echo >/mnt/read/file").err
    assert tenants.cloud.does(["cat", f"{tenants.cloud.source(tenants.mine)}/file"])[0] == "mine\n"
    full = tenants.does(
        f"mkdir {mine}/below && dd if=/dev/zero of={mine}/below/big bs=1M count=200 conv=fsync", 300
    )
    assert full.code and "Disk quota exceeded" in full.err, full
    assert tenants.does(f"rm -r {mine}/below; echo more >{mine}/file; sync").code == 0


def test_a_key_that_reads_writes_nothing_however_it_is_mounted(tenants: Tenants) -> None:
    _, read = tenants.shares(tenants.one)
    words = read.mount(read.of("PATH"))
    words[-1] = words[-1].replace("ro,", "rw,", 1)
    done = tenants.does(
        f"mkdir -p /other; {shlex.join(words)} && cat /other/file; echo >/other/file; rm "
        f"/other/file; umount /other"
    )
    assert done.out == "theirs\n" and done.err.count("Permission denied") == 2, done
    namespace = tenants.namespace(tenants.theirs)
    code, said = tenants.tries(["rados", "-p", f"{fs.NAME}.data", "-N", namespace, "create", "mine"], read)
    assert code and "Operation not permitted" in said


@pytest.mark.parametrize("path", ["secret", "theirs", "above", "root", "up"])
def test_no_other_directory_is_opened_by_it(tenants: Tenants, path: str) -> None:
    one, cloud = tenants.shares(tenants.one)[0], tenants.cloud
    images = {"secret": tenants.secret, "theirs": tenants.theirs}
    other = {name: cloud.source(image).replace(ROOT, "/volumes/one") for name, image in images.items()}
    paths = {
        **other,
        "above": one.of("PATH").rpartition("/")[0],
        "root": "/",
        "up": f"{one.of('PATH')}/../../{other['secret'][13:]}",
    }
    done = tenants.does(
        f"mkdir -p /other; {shlex.join(one.mount(paths[path]))}; mountpoint -q /other && ls /other /other/*"
    )
    assert (
        done.code
        and done.out == ""
        and re.search("error 13|Permission denied|No such file|Invalid", done.err)
    ), done


def test_no_other_objects_users_quotas_or_layouts_are_open_to_it(tenants: Tenants) -> None:
    one = tenants.shares(tenants.one)[0]
    objects = ["rados", "-p", f"{fs.NAME}.data", "-N"]
    code, said = tenants.tries([*objects, tenants.namespace(tenants.mine), "ls"], one)
    assert code == 0 and said.strip(), said
    refused = [
        [*objects, tenants.namespace(tenants.secret), "ls"],
        [*objects, "", "ls"],
        ["rados", "-p", f"{fs.NAME}.meta", "ls"],
        ["ceph", "auth", "ls"],
        ["ceph", "auth", "get", "client.shares"],
        ["ceph", "config-key", "dump"],
        ["ceph", "fs", "subvolume", "ls", fs.NAME, "one"],
    ]
    for words in refused:
        code, said = tenants.tries(words, one)
        assert code and re.search("Operation not permitted|Permission denied|EACCES|EPERM", said), (
            words,
            said,
        )
    set_it = "import os, sys; os.setxattr(sys.argv[1], sys.argv[2], sys.argv[3].encode())"
    for name, value in (
        ("ceph.quota.max_bytes", "0"),
        ("ceph.dir.layout.pool_namespace", tenants.namespace(tenants.secret)),
    ):
        done = tenants.guest.run(
            ["/usr/bin/python3", "-c", set_it, f"/mnt/one-tag-{tenants.mine}", name, value], check=False
        )
        assert "PermissionError" in done.err, done


def test_what_a_key_sees_of_the_cluster_is_what_the_page_says(tenants: Tenants) -> None:
    one, ceph = tenants.shares(tenants.one)[0], tenants.cloud.lab.ceph.node
    page = re.sub("(?<=[ .])cephfs(?=[ :])", fs.NAME, PAGES).replace("share-43", f"share-{tenants.secret}")
    rows = {
        name: re.findall("`(ceph [^`]+)`", said)
        for name, said in re.findall(r"(?m)^\| (answered|refused) \| (.*) \|$", page)
    }
    option, secret = ["mgr", "mgr/dashboard/GRAFANA_API_PASSWORD"], "not-for-tenants"
    ceph.run(["ceph", "config", "set", *option, secret, "--force"], user="root", cwd="/")
    ceph.run(["ceph", "config-key", "set", "lab/secret", "not-for-anybody"], user="root", cwd="/")
    try:
        seen = {command: tenants.tries(shlex.split(command), one) for command in rows["answered"]}
        assert [command for command, (code, _) in seen.items() if code] == [] and len(seen) > 8
        assert [command for command, (_, said) in seen.items() if secret in said] == [
            "ceph config dump",
            "ceph config log",
        ]
        # Of another tenant: the user of its key, so its image and VM.
        other = f"share-one-{tenants.theirs}-{tenants.other}"
        assert [command for command, (_, said) in seen.items() if other in said] == [
            "ceph log last 500 debug audit"
        ]
        keys = [
            "not-for-anybody",
            *(share.of("KEY") for vm in (tenants.one, tenants.other) for share in tenants.shares(vm)),
        ]
        assert [command for command, (_, said) in seen.items() if any(key in said for key in keys)] == []
        # One program is told them, but for those of which it takes no other beside; what it says is a line
        # for each that is refused.
        told = [command for command in rows["refused"] if command.startswith("ceph tell ")]
        refused = [command.removeprefix("ceph ") for command in rows["refused"] if command not in told]
        for command, expected in (("ceph", len(refused)), *((command, 1) for command in told)):
            _, said = tenants.tries(
                shlex.split(command), one, "\n".join(refused) if command == "ceph" else ""
            )
            errors = [line for line in said.splitlines() if line.startswith("Error ")]
            assert (
                len(errors) == expected and all("EACCES" in error for error in errors) and secret not in said
            ), (command, said)
        assert len(rows["refused"]) > 8
    finally:
        ceph.run(["ceph", "config", "rm", *option], user="root", cwd="/")
        ceph.run(["ceph", "config-key", "rm", "lab/secret"], user="root", cwd="/")


def test_doctor_tells_of_clients_whose_pool_nothing_bounds_or_others_have(tenants: Tenants) -> None:
    ceph, pool = tenants.cloud.lab.ceph, f"{fs.NAME}.data"
    writes = f"datastore {SHARES} (shares): guests write to pool {pool} themselves, and "

    def found() -> list[str]:
        done = tenants.cloud.lab.fe.run([COMMAND, "doctor", "--json"], check=False, timeout=120)
        rows = [row for row in json.loads(done.stdout)["findings"] if f" pool {pool} " in row["what"]]
        assert all(
            (row["severity"], row["machine"]) == ("warning", "h1") and row["what"].startswith(writes)
            for row in rows
        ), rows
        assert all("What bounds a client that means harm" in row["mend"] for row in rows), rows
        return [row["what"][len(writes) :].partition(":")[0] for row in rows]

    def admin(*commands: tuple[str, dict[str, Any]]) -> None:
        ceph.ask(
            *(["command", [f"osd pool {prefix}"], {"pool": pool, **words}] for prefix, words in commands)
        )

    assert found() == ["it has no quota (max_bytes and max_objects)"]
    other = tenants.oned.image_create(
        SHARES, "another", path="new:16M", type="FILESYSTEM", uid=9, attributes={}
    )
    try:
        rbd = {"app": "rbd", "yes_i_really_mean_it": True}
        admin(("set-quota", {"field": "max_bytes", "val": str(64 << 30)}), ("application enable", rbd))
        assert found() == [
            "it has no quota (max_objects)",
            "it is not one tenant's alone (rbd; users 0, 9 of OpenNebula)",
        ]
        admin(("application disable", rbd), ("set-quota", {"field": "max_objects", "val": "1000000"}))
        assert found() == ["it is not one tenant's alone (users 0, 9 of OpenNebula)"]
        tenants.oned.image_delete(other)
        assert found() == []
    finally:
        admin(*(("set-quota", {"field": quota, "val": "0"}) for quota in ("max_bytes", "max_objects")))


def test_what_a_key_writes_as_bare_objects_outlives_no_purge_of_the_page(tenants: Tenants) -> None:
    """No deletion of the share removes it: so what the page has an admin do must, all of it, and nothing of
    others.
    """
    one, lab = tenants.shares(tenants.one)[0], tenants.cloud.lab
    pool, mine, theirs = f"{fs.NAME}.data", tenants.namespace(tenants.mine), tenants.namespace(tenants.theirs)
    names = ("alien", "a b")
    for name in names:
        code, said = tenants.tries(["rados", "-p", pool, "-N", mine, "create", name], one)
        assert code == 0, said
    (script,) = re.findall(r"(?ms)^    python3 - cephfs.clients \$namespace <<'END'\n(.*?)^    END$", PAGES)
    (called,) = re.findall(r"(?m)^    namespace=(\S+) ", PAGES)
    assert (
        called.replace("42", str(tenants.mine)).replace("0123456789abcdef" * 2, tenants.cloud.tree.marker)
        == mine
    )
    listed = ["rados", "-p", pool, "-N"]
    before = lab.ceph.node.run([*listed, theirs, "ls"], user="root", cwd="/").stdout
    # Its files' objects are there as well, and needed: of others than these copies are not made.
    only = script.replace("found.remove()", f"found.key in {names!r} and found.remove()")
    assert only != script
    lab.ceph.node.run(["/usr/bin/python3", "-c", textwrap.dedent(only), pool, mine], user="root", cwd="/")
    left = lab.ceph.node.run([*listed, mine, "ls"], user="root", cwd="/").stdout.decode().splitlines()
    assert (
        left
        and not set(left) & set(names)
        and lab.ceph.node.run([*listed, theirs, "ls"], user="root", cwd="/").stdout == before
    )


def test_who_makes_keys_is_told_none_of_others(tenants: Tenants) -> None:
    share = f"share-{tenants.mine}"
    for user in ("admin", "shares-mount", f"share-two-{tenants.mine}"):
        words = [
            "fs",
            "subvolume",
            "authorize",
            fs.NAME,
            share,
            user,
            "one",
            "rw",
            "tenant",
            "--allow_existing_id",
        ]
        done = tenants.host.run(["ceph", "--id", "shares", *words], cwd="/", check=False, timeout=60)
        assert done.returncode and b"EACCES" in done.stderr and not done.stdout.strip(), (user, done)


def test_a_vm_that_boots_again_keeps_its_key(tenants: Tenants) -> None:
    before = tenants.shares(tenants.other)
    tenants.oned.vm_undeploy(tenants.other, hard=True)
    assert tenants.oned.vm(tenants.other).state == State.UNDEPLOYED
    tenants.oned.vm_resume(tenants.other)
    tenants.oned.vm_deploy(tenants.other, "h1", SYSTEM)
    assert tenants.shares(tenants.other) == before


def test_a_vm_that_ends_on_a_host_that_does_not_answer_has_no_key_any_more(tenants: Tenants) -> None:
    before, h3 = tenants.users(), tenants.cloud.lab.hosts[2]
    vm = tenants.deploy("third", {"IMAGE_ID": str(tenants.mine)}, host=h3.name)
    assert len(tenants.users() - before) == 1
    h3.cut()
    try:
        words = [f"{h3.name}:/var/lib/one/datastores/{SYSTEM}/{vm}", str(vm), str(SYSTEM)]
        done = tenants.cloud.lab.fe.run(
            ["/var/lib/one/remotes/tm/semishared/delete", *words], check=False, timeout=120
        )
        assert done.returncode and b"SS010" in done.stderr, done
        assert tenants.users() == before
    finally:
        h3.join()
    tenants.oned.vm_terminate(vm, hard=True)


def test_an_action_of_an_earlier_boot_neither_gives_nor_takes_a_key(tenants: Tenants) -> None:
    cloud, image, vm, before = tenants.cloud, tenants.secret, 70, tenants.users()
    key = cloud.step(share_steps.GiveKey(cloud.tree, image, cloud.source(image), vm, False, 4))[1]["key"]
    assert cloud.step(share_steps.TakeKeys(cloud.tree, -1, vm, 3))[1] == {"taken": 0}
    # A point that it never comes to: it may fail.
    assert cloud.step(share_steps.GiveKey(cloud.tree, image, cloud.source(image), vm, True, 3), 999)[0]
    assert tenants.keys().count(f"{image}-{vm}.json") == 1 and len(tenants.users() - before) == 1
    assert (
        cloud.step(share_steps.GiveKey(cloud.tree, image, cloud.source(image), vm, False, 4))[1]["key"] == key
    )
    assert (
        cloud.step(share_steps.TakeKeys(cloud.tree, -1, vm, 4))[1] == {"taken": 1}
        and tenants.users() == before
    )


def test_an_operator_has_a_key_until_it_is_taken_back(tenants: Tenants) -> None:
    cloud, image = tenants.cloud, str(tenants.secret)
    found = json.loads(cloud.cli("credentials", image, "--json"))["credentials"]
    assert f"key {found['key']}\n" in cloud.cli("credentials", image) and "secret" in cloud.cli(
        "credentials", image
    )
    operator = Share("0", {f"SEMISHARED_SHARE_0_{name.upper()}": value for name, value in found.items()})
    mounted = tenants.does(f"mkdir -p /other; {shlex.join(operator.mount(found['path']))} && cat /other/file")
    assert mounted.out == "secret\n", mounted
    # Who reads is another user: what the first one has mounted goes on writing.
    reads = json.loads(cloud.cli("credentials", image, "--readonly", "--json"))["credentials"]
    assert reads["user"] != operator.of("USER") and (reads["access"], found["access"]) == ("ro", "rw")
    assert tenants.does("echo more >/other/more && sync && cat /other/more && rm /other/more").out == "more\n"
    assert (
        "not there" not in (said := cloud.cli("credentials", image, "--revoke")) and "session evict" in said
    )
    assert (
        "not there" in cloud.cli("credentials", image, "--revoke")
        and f"client.{reads['user']}" not in tenants.users()
    )
    # Also who has it mounted.
    gone = tenants.does(
        f"timeout {SHUT_OUT_S} dd if=/other/file of=/dev/null iflag=direct status=none; umount -f /other"
    )
    assert re.search("Cannot send after|Input/output|Stale|Permission", gone.err), gone
    assert tenants.does(shlex.join(operator.mount(found["path"]))).code
    said = cloud.cli("credentials", str(tenants.mine), "--vm", str(tenants.one))
    assert tenants.shares(tenants.one)[0].of("KEY") in said
    assert "SS" in cloud.cli("credentials", image, "--vm", str(tenants.one), code=2)
    # Who has got one by then, and which, is seen where it is shown: nothing is given or taken by that.
    known, show = (
        tenants.users(),
        share_steps.ShowKey(cloud.tree, tenants.secret, cloud.source(tenants.secret), 7),
    )
    assert cloud.step(show, 999)[0] and tenants.users() == known


def test_a_key_whose_subvolume_is_not_there_is_not_said_to_be_gone(tenants: Tenants) -> None:
    cloud, image = tenants.cloud, tenants.cloud.image("early", "new:16M")
    user = json.loads(cloud.cli("credentials", str(image), "--json"))["credentials"]["user"]
    words = ["ceph", "fs", "subvolume", "rm", fs.NAME, f"share-{image}", "one", "--force"]
    cloud.lab.ceph.node.run(words, user="root", cwd="/")
    said = cloud.cli("credentials", str(image), "--revoke", code=2)
    assert f"ceph auth rm client.{user}" in said and f"client.{user}" in tenants.users()
    path = re.findall(r"then remove (\S+) on", said)[0]
    with pytest.raises(ActionFailed, match="ceph auth rm"):
        tenants.oned.image_delete(image)
    cloud.lab.ceph.node.run(["ceph", "auth", "rm", f"client.{user}"], user="root", cwd="/")
    tenants.host.path(path).unlink()
    tenants.oned.image_delete(image)
    assert f"client.{user}" not in tenants.users() and image not in cloud.listed()


def test_where_the_manager_may_not_make_keys_nothing_boots_and_a_line_says_why(tenants: Tenants) -> None:
    ceph = tenants.cloud.lab.ceph.node
    caps = tenants.cloud.lab.ceph.ask(["command", ["auth get"], {"entity": "client.shares"}])[0][0]["caps"]
    less = re.sub(r", allow command \"fs subvolume (de)?authorize\"[^,]*", "", caps["mgr"])
    assert less != caps["mgr"]
    look = share_steps.LookAtRoot(tenants.cloud.tree, True)
    assert tenants.cloud.step(look)[1]["lacking"] == []
    set_caps = ["ceph", "auth", "caps", "client.shares", "mon", "allow r", "mgr"]
    ceph.run([*set_caps, less], user="root", cwd="/")
    try:
        assert "SS028" in tenants.cloud.cli("credentials", str(tenants.secret), code=2)
        assert tenants.cloud.step(look)[1]["lacking"] == [
            "fs subvolume authorize",
            "fs subvolume deauthorize",
        ]
        tenants.oned.vm_poweroff(tenants.other, hard=True)
        with pytest.raises(ActionFailed, match="SS028"):
            tenants.oned.vm_resume(tenants.other)
    finally:
        ceph.run([*set_caps, caps["mgr"]], user="root", cwd="/")
    tenants.oned.vm_resume(tenants.other)
    tenants.cloud.cli("credentials", str(tenants.secret), "--revoke")


def test_what_holds_at_a_boot_is_what_the_attribute_says_then(tenants: Tenants) -> None:
    oned, vm = tenants.oned, tenants.other
    note = tenants.host.path(f"/var/lib/one/datastores/{SYSTEM}/{vm}/.semishared/clients.json")
    assert json.loads(note.read_text())["disks"] == [0]
    for access, given in (("virtiofs", 1), ("client", 0)):
        oned.image_update(tenants.theirs, {"SEMISHARED_SHARE_ACCESS": access})
        oned.vm_poweroff(vm, hard=True)
        oned.vm_resume(vm)
        assert (
            json.loads(note.read_text())["disks"] == [0] * (1 - given)
            and len(tenants.shares(vm)) == 1 - given
        )
        said = tenants.host.run(["virsh", "-c", "qemu:///system", "dumpxml", oned.vm(vm).deploy_id]).stdout
        assert said.count(b"<filesystem") == given


def test_when_the_vm_is_gone_its_key_is_and_whoever_has_it_still_is_shut_out(tenants: Tenants) -> None:
    one = tenants.shares(tenants.one)[0]
    mine = f"/mnt/one-tag-{tenants.mine}"
    assert tenants.does(f"echo still >{mine}/file; sync").code == 0
    tenants.oned.vm_terminate(tenants.one, hard=True)
    assert tenants.users() == {f"client.{tenants.shares(tenants.other)[0].of('USER')}"}
    assert tenants.keys() == [f"{tenants.theirs}-{tenants.other}.json"]
    late = tenants.does(
        f"timeout {SHUT_OUT_S} sh -c 'echo late >{mine}/late && sync {mine}/late'; umount -f {mine} /mnt/read"
    )
    assert re.search("Cannot send after|Input/output|Stale|Permission", late.err), late
    assert tenants.does(shlex.join(one.mount(one.of("PATH")))).code
    source = tenants.cloud.source(tenants.mine)
    assert tenants.cloud.does(["sh", "-c", f"cat {source}/file; ls {source}"])[0] == "still\nfile\n"


def test_what_a_killed_action_leaves_of_a_vm_that_is_gone_gc_takes(tenants: Tenants) -> None:
    cloud, gone = tenants.cloud, tenants.one
    give = share_steps.GiveKey(cloud.tree, tenants.mine, cloud.source(tenants.mine), gone, False)
    take = share_steps.TakeKeys(cloud.tree, tenants.mine, gone)
    path = f"{KEYS}/{tenants.mine}-{gone}.json"
    for before, step, at in ((), give, 3), ((give,), take, 1):
        for done in before:
            cloud.step(done)
        assert cloud.step(step, at)[0]
        assert tenants.keys() == sorted([path.rpartition("/")[2], f"{tenants.theirs}-{tenants.other}.json"])
        assert cloud.gc() == {path: "removed"} and len(tenants.keys()) == len(tenants.users()) == 1
    tenants.oned.vm_terminate(tenants.other, hard=True)


@pytest.mark.long
def test_killed_at_every_point_a_key_is_the_same_or_gone(cloud: CephShares, tenants: Tenants) -> None:
    give = share_steps.GiveKey(cloud.tree, tenants.secret, cloud.source(tenants.secret), 7, True)
    take = share_steps.TakeKeys(cloud.tree, -1, 7)
    for at in range(1, 100):
        code, first = cloud.step(give, at)
        found = cloud.step(give)[1]
        assert found == cloud.step(give)[1] and (code or found == first)
        if not code:
            break
        cloud.step(take)
        assert tenants.keys() == [] and tenants.users() == set()
    assert at > 2
    for at in range(1, 100):
        cloud.step(give)
        code, _ = cloud.step(take, at)
        cloud.step(take)
        assert tenants.keys() == [] and tenants.users() == set()
        if not code:
            break
    assert at > 3


def test_nothing_is_left_when_the_shares_are_deleted(tenants: Tenants) -> None:
    tenants.cloud.cli("credentials", str(tenants.secret))
    assert len(tenants.keys()) == len(tenants.users()) == 1
    for image in (tenants.mine, tenants.theirs, tenants.secret):
        tenants.oned.image_delete(image)
    assert tenants.users() == set() and tenants.keys() == [] and not tenants.cloud.subvolumes()
