# SPDX-License-Identifier: Apache-2.0
"""The actions that are killed at every step: what is there before, what is asked, who can be killed."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Sequence, Tuple
from unittest import mock
from xml.etree import ElementTree

from semishared.config import Config
from semishared.errors import SemisharedError
from semishared.front import action as front
from semishared.front import migration
from semishared.model import steps as s
from semishared.model.exchange import AskOned, On, Plan
from semishared.model.store.image_steps import RestoreTpm
from semishared.named import to_data
from semishared.opennebula import args
from semishared.opennebula.report import Report
from semishared.opennebula.xml import Datastore, Disk, Image, Vm
from semishared.plan.disk import disks, removals
from semishared.plan.vm import migration as migrations
from semishared.plan.vm import moves
from semishared.store.dir import image as dir_image
from semishared.store.dir import upload
from semishared.wire import session as ssh

from .rig import MARKED, Rig, image_bytes, pattern

VM = 7
OTHER = 6
"""A VM that is there before, and must not notice anything."""
MiB = 1 << 20
OPTIONS = Config().overlays_options
Environment = Dict[str, Dict[str, str]]
KERNEL = pattern(MiB, "kernel")
ISO = pattern(300_000, "iso")
RESTORED = image_bytes("restored")


@dataclass(frozen=True)
class Stored:
    """An image of the fixture."""

    id: int
    name: str
    format: str
    has_manifest: bool = True
    persistent: bool = False

    @property
    def content(self) -> bytes:
        return image_bytes(self.name)


RAW = Stored(1, "image-raw", "raw")
QCOW2 = Stored(2, "image-qcow2", "qcow2")
FRESH = Stored(3, "image-fresh", "raw", has_manifest=False)
PERSISTENT = Stored(4, "image-persistent", "raw", persistent=True)
IMAGES = {image.id: image for image in (RAW, QCOW2, FRESH, PERSISTENT)}


def build(rig: Rig) -> None:
    """Fill the store and the upload directory; saved as `base`."""
    store = str(rig.store())
    for image in IMAGES.values():
        raw = rig.top / "in" / f"{image.name}.raw"
        raw.write_bytes(image.content)
        subprocess.run(["fallocate", "--dig-holes", raw], check=True)
        up = upload.Upload(store, image.name)
        os.makedirs(up.directory)
        path = str(raw)
        if image.format == "qcow2":
            path = f"{raw}.qcow2"
            subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, path], check=True)
        path = shutil.copy(path, up.file("private"))  # what is published is given away
        upload.publish(path, image.format, up.target)
        shutil.rmtree(up.directory)
        if not image.has_manifest:
            shutil.rmtree(dir_image.Stored(up.target).side)
    shutil.rmtree(rig.store(".semishared/.uploads"))
    rig.store("kernel").write_bytes(KERNEL)
    (rig.top / "in/backup.raw").write_bytes(RESTORED)
    words = [
        "qemu-img",
        "convert",
        "-f",
        "raw",
        "-O",
        "qcow2",
        str(rig.top / "in/backup.raw"),
        str(rig.top / "in/backup.qcow2"),
    ]
    subprocess.run(words, check=True)
    (rig.top / "in/image.gz").write_bytes(gzip.compress(RAW.content, 1))
    rig.save("base")


# -- what is asked ----------------------------------------------------------------------------------


def source(rig: Rig, image: Stored) -> str:
    return rig.inside(f"100/{image.name}")


def from_image(rig: Rig, path: str, vm: int = VM, disk: str = "disk.0", machine: str = "a") -> args.FromImage:
    return args.FromImage.parse([f"fe:{path}", f"{machine}:{rig.inside(f'101/{vm}/{disk}')}", str(vm), "100"])


def facts(
    image: Stored, size: int = 8, readonly: bool = False, **attributes: str
) -> Tuple[Disk, Image, Datastore]:
    """Return what oned says of a disk of `size` MiB from an image of 8 MiB."""
    extra = "".join(f"<{name}>{value}</{name}>" for name, value in attributes.items())
    disk = f"<DISK><DISK_ID>0</DISK_ID><IMAGE_ID>{image.id}</IMAGE_ID><SIZE>{size}</SIZE><ORIGINAL_SIZE>8</ORIGINAL_SIZE>"  # noqa: E501
    disk += f"<READONLY>{'YES' if readonly else 'NO'}</READONLY></DISK>"
    text = f"<IMAGE><ID>{image.id}</ID><PERSISTENT>{int(image.persistent)}</PERSISTENT><FORMAT>{image.format}</FORMAT>"  # noqa: E501
    return (
        Disk(ElementTree.fromstring(disk)),
        Image.parse(f"{text}<TEMPLATE>{extra}</TEMPLATE></IMAGE>"),
        Datastore.parse("<DATASTORE><ID>100</ID><TEMPLATE/></DATASTORE>"),
    )


def first(plan: Plan) -> List[s.Step]:
    """Return the steps of a plan's first message; of these plans it is the only one. oned knows nothing of
    the system datastore.
    """
    wanted = next(plan)
    if isinstance(wanted, AskOned):
        wanted = plan.send(Datastore.parse("<DATASTORE><ID>101</ID></DATASTORE>"))
    assert isinstance(wanted, On)
    return list(wanted.steps)


def clone_steps(
    rig: Rig, image: Stored, vm: int = VM, disk: int = 0, machine: str = "a", size: int = 8, **attributes: Any
) -> List[s.Step]:
    request = from_image(rig, source(rig, image), vm, f"disk.{disk}", machine)
    return first(disks.clone(request, *facts(image, size, **attributes), OPTIONS))


def ln_steps(
    rig: Rig, image: Stored, vm: int = VM, disk: int = 0, readonly: bool = False, machine: str = "a"
) -> List[s.Step]:
    request = from_image(rig, source(rig, image), vm, f"disk.{disk}", machine)
    return first(disks.ln(request, *facts(image, readonly=readonly), OPTIONS))


def new_disk(rig: Rig, size: int, format: str, disk: int = 0, fs: str = "") -> List[s.Step]:
    request = args.NewDisk.parse(
        [str(size), format, f"a:{rig.inside(f'101/{VM}/disk.{disk}')}", str(VM), "101"]
    )
    element = ElementTree.fromstring(f"<DISK><DISK_ID>{disk}</DISK_ID><FS>{fs}</FS></DISK>")
    return first(disks.mkimage(request, Disk(element)))


def delete_steps(rig: Rig, what: str, vm: int = VM, store: int = 100) -> List[s.Step]:
    return first(
        removals.delete(args.Delete.parse([f"a:{rig.inside(what)}", str(vm), str(store)]), is_here=False)
    )


def to_image(rig: Rig, disk: int, path: str) -> args.ToImage:
    return args.ToImage.parse([f"a:{rig.inside(f'101/{VM}/disk.{disk}')}", path, str(VM), "100"])


def plan(
    rig: Rig, machine: str, steps: Iterable[s.Step], environment: Environment, data: bytes = b""
) -> List[object]:
    """Carry out steps on a machine through the host executor."""
    with rig.sessions(environment), ssh.Session(machine, "test", Config()) as session:
        chunks = [data[at : at + 65536] for at in range(0, len(data), 65536)]
        found = session.run(steps, chunks, hashlib.sha256(data).hexdigest() if data else "")
        return [to_data(one) for one in found]


MOVED = Vm.parse(
    f"<VM><ID>{VM}</ID><LCM_STATE>8</LCM_STATE><HISTORY_RECORDS><HISTORY><SEQ>1</SEQ></HISTORY></HISTORY_RECORDS></VM>"
)


def move(
    rig: Rig, machine: str, target: str, environment: Environment, path: str = f"101/{VM}", to: str = ""
) -> None:
    """Move the VM directory as tm/mv does, on machines without libvirt."""
    request = args.Move.parse(
        [f"{machine}:{rig.inside(path)}", f"{target}:{rig.inside(to or path)}", str(VM), "101"]
    )
    planned = moves.steps_of(request, MOVED, machine == "fe", target == "fe")
    assert planned
    action = front.Action("mv", [], Report("mv"))
    action.seq, action.bulk = MOVED.seq, True
    first, second = planned
    if second is None:
        plan = moves.renamed(machine, first._replace(domain=""), MOVED, "")
    else:
        plan = moves.carried(request, (first, second._replace(domain="")), MOVED, "")
    with rig.sessions(environment), mock.patch.object(front, "ask_oned", lambda _: MOVED):
        front.carry_out(plan, action)


def lost_vm(rig: Rig) -> Vm:
    """Return the VM of `whole_vm` as oned has it when it is under way from a host that is lost."""
    made = [(0, RAW, "YES"), (2, PERSISTENT, "NO"), (4, QCOW2, "YES")]
    disks = "".join(
        f"<DISK><DISK_ID>{disk}</DISK_ID><IMAGE_ID>{image.id}</IMAGE_ID><DATASTORE_ID>100</DATASTORE_ID><CLONE>{clone}</CLONE>"
        f"<SOURCE>{source(rig, image)}</SOURCE><TM_MAD>semishared</TM_MAD><SIZE>8</SIZE><ORIGINAL_SIZE>8</ORIGINAL_SIZE></DISK>"  # noqa: E501
        for disk, image, clone in made
    )
    swap = "<DISK><DISK_ID>1</DISK_ID><TYPE>swap</TYPE><SIZE>8</SIZE><TM_MAD>semishared</TM_MAD></DISK>"
    history = "<HISTORY_RECORDS><HISTORY><SEQ>2</SEQ></HISTORY></HISTORY_RECORDS>"
    return Vm.parse(
        f"<VM><ID>{VM}</ID><LCM_STATE>60</LCM_STATE><TEMPLATE>{disks}{swap}</TEMPLATE>{history}</VM>"
    )


def oned(rig: Rig, **attributes: str) -> Callable[[AskOned], object]:
    """Return what answers as oned: the images are the VM's, each with these attributes in its template."""
    extra = "".join(f"<{name}>{value}</{name}>" for name, value in attributes.items())
    known = {
        image.id: Image.parse(
            f"<IMAGE><ID>{image.id}</ID><PERSISTENT>{int(image.persistent)}</PERSISTENT><DATASTORE_ID>100</DATASTORE_ID><FORMAT>{image.format}"
            f"</FORMAT><SOURCE>{source(rig, image)}</SOURCE><VMS><ID>{VM}</ID></VMS><TEMPLATE>{extra}</TEMPLATE></IMAGE>"  # noqa: E501
        )
        for image in IMAGES.values()
    }
    return lambda wanted: known[wanted.id] if wanted.what == "image" else facts(RAW)[2]


def take_over(rig: Rig, environment: Environment) -> None:
    """Move the VM from a, which is not asked, to b as tm/mv does in LCM 60, on machines without libvirt."""
    request = args.Move.parse(
        [f"a:{rig.inside(f'101/{VM}')}", f"b:{rig.inside(f'101/{VM}')}", str(VM), "101"]
    )
    lost, told = lost_vm(rig), oned(rig, SEMISHARED_ON_HOST_FAILURE="recreate")
    action = front.Action("mv", [], Report("mv"))
    action.seq = lost.seq

    with (
        rig.sessions(environment),
        mock.patch.object(front, "ask_oned", told),
        mock.patch.object(disks, "running_domain", lambda _: ""),
    ):
        front.carry_out(moves.mv(request, lost, moves.Told(False, False, overlay_options=OPTIONS)), action)


VM_XML = """<VM><ID>7</ID><LCM_STATE>3</LCM_STATE><TEMPLATE><DISK><DISK_ID>2</DISK_ID><IMAGE_ID>4</IMAGE_ID>
<TM_MAD>semishared</TM_MAD></DISK><CONTEXT><DISK_ID>3</DISK_ID></CONTEXT></TEMPLATE><HISTORY_RECORDS><HISTORY>
<DS_ID>101</DS_ID></HISTORY></HISTORY_RECORDS></VM>"""


def premigrate(rig: Rig, environment: Environment) -> None:
    """Run tm/premigrate from a to b, machines without libvirt."""
    action = front.Action(
        "premigrate", ["a", "b", rig.inside(f"101/{VM}"), str(VM), "101"], Report("premigrate")
    )
    stdin, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(base64.b64encode(VM_XML.encode())))
    try:
        told = mock.patch.object(front, "ask_oned", oned(rig))
        with rig.sessions(environment), told, mock.patch.object(migrations, "running_domain", lambda _: ""):
            front.carry_out(migration.premigrate(action, args.Migrate.parse(action.argv)), action)
    finally:
        sys.stdin = stdin


class Killed(SemisharedError):
    """The datastore action died by our hand."""


def datastore(rig: Rig, environment: Environment, action: str, image: str, attributes: str = "") -> str:
    """Run a datastore action and return its stdout; raise Killed if it was."""
    xml = (
        f"<DS_DRIVER_ACTION_DATA><IMAGE>{image}</IMAGE><DATASTORE><ID>100</ID><TYPE>0</TYPE>"
        f"<BASE_PATH>{rig.inside('100')}</BASE_PATH><TEMPLATE><SAFE_DIRS>{rig.top}/in</SAFE_DIRS>{attributes}</TEMPLATE>"
        "</DATASTORE></DS_DRIVER_ACTION_DATA>"
    )
    done = rig.datastore(action, xml, environment.get("fe", {}))
    if done.returncode == -9:
        raise Killed("killed")
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


# -- the table --------------------------------------------------------------------------------------

Setup = Callable[[Rig], None]
Act = Callable[[Rig, Environment], object]


def nothing(rig: Rig) -> None:
    """Start from the base."""


@dataclass(frozen=True)
class Case:
    """One action: `killed` are the machines whose process is killed at each of its points in turn."""

    name: str
    act: Act
    setup: Setup = nothing
    killed: Sequence[str] = ("a",)
    opaque: Sequence[str] = ()
    guest: Dict[str, bytes] = field(default_factory=dict)
    """What the guest must read from `machine/datastore/vm/disk` where it is not the image's content."""
    restored: bytes = b""
    """What a disk, or the image of a disk in place, may hold instead of what it did."""
    snapshots: Dict[str, Dict[int, bytes]] = field(default_factory=dict)
    """What each snapshot of a disk holds, as long as it is there."""
    orphans: int = 0
    """Complete images under a final name that a kill just before the answer may leave, oned never knowing of
    them.
    """


def _case(
    name: str, steps: Callable[[Rig], List[s.Step]], setup: Setup = nothing, data: bytes = b"", **rest: object
) -> Case:
    return Case(name, lambda rig, env: plan(rig, "a", steps(rig), env, data), setup, **rest)  # type: ignore[arg-type]


def do(*plans: Callable[[Rig], List[s.Step]]) -> Setup:
    """Return a setup that carries out plans on machine a."""

    def setup(rig: Rig) -> None:
        for steps in plans:
            plan(rig, "a", steps(rig), {})

    return setup


def warm(image: Stored) -> Setup:
    """Return a setup in which another VM has a clone of the image already."""
    return do(lambda rig: clone_steps(rig, image, OTHER))


def cloned(image: Stored, disk: int = 0, **attributes: Any) -> Setup:
    return do(
        lambda rig: clone_steps(rig, image, OTHER),
        lambda rig: clone_steps(rig, image, VM, disk, **attributes),
    )


def older_generation(rig: Rig) -> None:
    """The VM has an overlay over what the image was before."""
    cloned(RAW)(rig)
    plan(rig, "a", delete_steps(rig, f"101/{OTHER}", OTHER, 101), {})
    stored = dir_image.Stored(str(rig.store(RAW.name)))
    dir_image.begin_session(stored)
    with rig.store(RAW.name).open("r+b") as file:
        file.seek(3 * MiB)
        file.write(b"x" * 4096)


CHANGED = bytearray(RAW.content)
CHANGED[3 * MiB : 3 * MiB + 4096] = b"x" * 4096
DIRTY = bytearray(RAW.content)
DIRTY[64 << 10 : 192 << 10] = b"\x5a" * (128 << 10)


def grown(content: bytes, size: int) -> bytes:
    return content + bytes(size * MiB - len(content))


def receive_iso(rig: Rig, disk: int = 3) -> List[s.Step]:
    place = rig.inside(f"101/{VM}")
    return [
        s.PrepareVm(VM, place),
        s.ReceiveFile(f"{place}/disk.{disk}", VM, len(ISO), hashlib.sha256(ISO).hexdigest()),
    ]


def whole_vm(rig: Rig) -> None:
    """A VM with an overlay that was written to, a volatile disk, a disk in place, a clone on the store, a
    context ISO.
    """
    cloned(RAW)(rig)
    plan(rig, "a", new_disk(rig, 8, "raw", 1, "ext4"), {})
    plan(rig, "a", ln_steps(rig, PERSISTENT, VM, 2), {})
    plan(rig, "a", receive_iso(rig), {}, ISO)
    plan(rig, "a", clone_steps(rig, QCOW2, VM, 4, SEMISHARED_PLACE="shared"), {})
    write = ["qemu-io", "-f", "qcow2", "-c", "write -q -P 0x5a 64k 128k", rig.inside(f"101/{VM}/disk.0")]
    rig.run("a", write)


def in_place_vm(rig: Rig) -> None:
    plan(rig, "a", ln_steps(rig, PERSISTENT, VM, 2), {})
    plan(rig, "a", receive_iso(rig), {}, ISO)


def been_there(rig: Rig) -> None:
    """b has had the VM and counted its deletion, as what undoes a premigrate that failed counts one."""
    in_place_vm(rig)
    plan(rig, "b", [s.RemoveVm(VM, rig.inside(f"101/{VM}"))], {})


def stopped_vm(rig: Rig) -> None:
    """The VM's directory is on the front-end."""
    whole_vm(rig)
    move(rig, "a", "fe", {})


def moved_before(rig: Rig) -> None:
    """An older copy of the VM directory is on the target."""
    whole_vm(rig)
    rig.save("whole")
    move(rig, "a", "b", {})
    whole_vm(rig)


def second_datastore(rig: Rig) -> None:
    whole_vm(rig)
    for machine in ("a", "b", "fe"):
        rig.on(machine, "102").mkdir(exist_ok=True)


def back_up(rig: Rig) -> List[s.Step]:
    place = rig.inside(f"101/{VM}")
    return [s.BackUp(VM, place, f"{place}/backup", ("0", "1", "2", "4"), "", "NONE", "PFZNPjwvVk0+")]


def backed_up(rig: Rig) -> None:
    whole_vm(rig)
    plan(rig, "a", back_up(rig), {})


def back_up_tpm(rig: Rig) -> List[s.Step]:
    (full,) = back_up(rig)
    return [full._replace(tpm=True)]


def with_tpm(rig: Rig) -> None:
    """A VM that was shut down: OpenNebula has left the state of its TPM beside its disks."""
    whole_vm(rig)
    directory = rig.on("a", f"101/{VM}")
    (directory / "tpm").mkdir()
    (directory / "tpm/tpm2-00.permall").write_bytes(b"state")
    (directory / "guest_VARS.fd").write_bytes(b"variables")


def tpm_archive() -> bytes:
    out, state = io.BytesIO(), b"another state"
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        entry = tarfile.TarInfo("tpm/tpm2-00.permall")
        entry.size = len(state)
        archive.addfile(entry, io.BytesIO(state))
    return out.getvalue()


def increment(rig: Rig, since: int = 0) -> List[s.Step]:
    (full,) = back_up(rig)
    return [full._replace(since=since, chain=1 if since >= 0 else -1)]


def marked(rig: Rig) -> None:
    """A backup is stored, and the guest has written since."""
    whole_vm(rig)
    place = rig.inside(f"101/{VM}")
    plan(rig, "a", [*increment(rig, -1), s.EndBackup(VM, place, f"{place}/backup", "")], {})
    write = ["qemu-io", "-f", "qcow2", "-c", "write -q -P 0x5a 64k 64k", f"{place}/disk.0"]
    rig.run("a", write)


def _restore(name: str, disk: int, size: int = 8) -> Case:
    def act(rig: Rig, env: Environment) -> object:
        step = s.RestoreDisk(s.DiskRef(VM, disk, rig.inside(f"101/{VM}")), size * MiB)
        return plan(rig, "a", [step], env, (rig.top / "in/backup.qcow2").read_bytes())

    wanted = grown(RESTORED, size)
    return Case(name, act, whole_vm, opaque=VOLATILE, guest=ALL_GUEST, restored=wanted)


def _cp(name: str, path: str, attributes: str, setup: Setup = nothing) -> Case:
    image = "<ID>9</ID><TYPE>0</TYPE><PATH>{}</PATH><FORMAT></FORMAT>"
    return Case(
        name,
        lambda rig, env: datastore(rig, env, "cp", image.format(f"{rig.top}/in/{path}"), attributes),
        setup,
        killed=("fe",),
        orphans=1,
    )


def _mkfs(format: str, fs: str) -> Case:
    image = f"<ID>9</ID><TYPE>2</TYPE><SIZE>8</SIZE><FORMAT>{format}</FORMAT><FS>{fs}</FS>"
    return Case(
        f"datastore mkfs {format} {fs}".strip(),
        lambda rig, env: datastore(rig, env, "mkfs", image),
        killed=("fe",),
        orphans=1,
        opaque=("store/IMAGE",) if fs else (),
    )


ALL_GUEST = {f"{machine}/{ds}/{VM}/disk.0": bytes(DIRTY) for machine in ("a", "b", "fe") for ds in (101, 102)}
VOLATILE = (f"/{VM}/disk.1$", rf"(incoming|outgoing|removed)-{VM}-[0-9a-f]+/disk.1$")


def evicted(rig: Rig) -> None:
    """A setup: the base was cached, and its content is gone."""
    warm(RAW)(rig)
    for path in rig.on("a", ".semishared/bases").glob("*/image"):
        path.unlink()


CASES = [
    _case("clone overlay cold", lambda rig: clone_steps(rig, RAW)),
    _case("clone overlay cold, no manifest", lambda rig: clone_steps(rig, FRESH)),
    _case("clone overlay cold qcow2", lambda rig: clone_steps(rig, QCOW2)),
    _case("clone overlay warm", lambda rig: clone_steps(rig, RAW), warm(RAW)),
    _case(
        "clone overlay warm grown",
        lambda rig: clone_steps(rig, QCOW2, size=16),
        warm(QCOW2),
        guest={f"a/101/{VM}/disk.0": grown(QCOW2.content, 16)},
    ),
    _case("clone overlay, base evicted", lambda rig: clone_steps(rig, RAW), evicted),
    _case("clone overlay, new generation", lambda rig: clone_steps(rig, RAW), older_generation),
    _case("clone copy", lambda rig: clone_steps(rig, RAW, SEMISHARED_LOCAL="copy")),
    _case(
        "clone copy grown",
        lambda rig: clone_steps(rig, QCOW2, size=16, SEMISHARED_LOCAL="copy"),
        guest={f"a/101/{VM}/disk.0": grown(QCOW2.content, 16)},
    ),
    _case("clone copy from base", lambda rig: clone_steps(rig, RAW, SEMISHARED_LOCAL="copy"), warm(RAW)),
    _case("clone remote-first", lambda rig: clone_steps(rig, RAW, SEMISHARED_LOCAL="remote-first")),
    _case(
        "clone remote-first grown, no manifest",
        lambda rig: clone_steps(rig, FRESH, size=16, SEMISHARED_LOCAL="remote-first"),
        guest={f"a/101/{VM}/disk.0": grown(FRESH.content, 16)},
    ),
    _case("clone on store", lambda rig: clone_steps(rig, RAW, SEMISHARED_PLACE="shared")),
    _case(
        "clone on store grown",
        lambda rig: clone_steps(rig, QCOW2, size=16, SEMISHARED_PLACE="shared"),
        guest={f"a/101/{VM}/disk.0": grown(QCOW2.content, 16)},
    ),
    _case(
        "clone kernel",
        lambda rig: first(
            disks.copy_kernel(from_image(rig, rig.inside("100/kernel"), VM, "kernel"), facts(RAW)[2])
        ),
    ),
    _case("ln", lambda rig: ln_steps(rig, PERSISTENT)),
    _case("ln read-only", lambda rig: ln_steps(rig, PERSISTENT, readonly=True)),
    _case("mkimage raw", lambda rig: new_disk(rig, 8, "raw")),
    _case("mkimage qcow2", lambda rig: new_disk(rig, 8, "qcow2")),
    _case("mkimage raw ext4", lambda rig: new_disk(rig, 8, "raw", fs="ext4"), opaque=(f"/{VM}/disk.0$",)),
    _case("mkimage qcow2 ext4", lambda rig: new_disk(rig, 8, "qcow2", fs="ext4"), opaque=(f"/{VM}/disk.0$",)),
    _case(
        "mkswap",
        lambda rig: first(
            disks.mkswap(
                args.NewDisk.parse_swap(["8", f"a:{rig.inside(f'101/{VM}/disk.0')}", str(VM), "101"])
            )
        ),
        opaque=(f"/{VM}/disk.0$",),
    ),
    _case("context", receive_iso, data=ISO),
    _case(
        "note I/O classes",
        lambda rig: [s.NoteIoClasses(VM, rig.inside(f"101/{VM}"), (0,), ("scratch",))],
        cloned(RAW),
    ),
    _case(
        "mvds",
        lambda rig: first(removals.mvds(to_image(rig, 2, source(rig, PERSISTENT)), is_here=False)),
        in_place_vm,
    ),
    _case(
        "cpds overlay",
        lambda rig: [
            s.SaveDisk(s.DiskRef(VM, 0, rig.inside(f"101/{VM}")), rig.inside("100/saved"), "qcow2", "")
        ],
        whole_vm,
        guest=ALL_GUEST,
        opaque=VOLATILE,
    ),
    _case(
        "cpds in place",
        lambda rig: [
            s.SaveDisk(s.DiskRef(VM, 2, rig.inside(f"101/{VM}")), rig.inside("100/saved"), "raw", "")
        ],
        in_place_vm,
    ),
    _case("delete disk overlay", lambda rig: delete_steps(rig, f"101/{VM}/disk.0"), cloned(RAW)),
    _case(
        "delete disk on store",
        lambda rig: delete_steps(rig, f"101/{VM}/disk.0"),
        cloned(RAW, SEMISHARED_PLACE="shared"),
    ),
    _case("delete disk in place", lambda rig: delete_steps(rig, f"101/{VM}/disk.2"), in_place_vm),
    _case(
        "delete vm",
        lambda rig: delete_steps(rig, f"101/{VM}", store=101),
        whole_vm,
        opaque=VOLATILE,
        guest=ALL_GUEST,
    ),
    Case(
        "mv host to host",
        lambda rig, env: move(rig, "a", "b", env),
        whole_vm,
        ("a", "b"),
        VOLATILE,
        ALL_GUEST,
    ),
    Case(
        "mv host to host, older copy there",
        lambda rig, env: move(rig, "a", "b", env),
        moved_before,
        ("a", "b"),
        VOLATILE,
        ALL_GUEST,
    ),
    Case(
        "mv host to front-end",
        lambda rig, env: move(rig, "a", "fe", env),
        whole_vm,
        ("a", "fe"),
        VOLATILE,
        ALL_GUEST,
    ),
    Case(
        "mv front-end to host",
        lambda rig, env: move(rig, "fe", "b", env),
        stopped_vm,
        ("fe", "b"),
        VOLATILE,
        ALL_GUEST,
    ),
    Case(
        "mv to another datastore",
        lambda rig, env: move(rig, "a", "a", env, to=f"102/{VM}"),
        second_datastore,
        ("a",),
        VOLATILE,
        ALL_GUEST,
    ),
    Case(
        "take over from a lost host",
        take_over,
        whole_vm,
        ("b",),
        VOLATILE,
        {f"a/101/{VM}/disk.0": bytes(DIRTY)},
    ),
    _case("prebackup", back_up, whole_vm, opaque=VOLATILE, guest=ALL_GUEST),
    _case("prebackup, an older one there", back_up, backed_up, opaque=VOLATILE, guest=ALL_GUEST),
    _case(
        "prebackup, an increment",
        increment,
        marked,
        opaque=(*VOLATILE, MARKED),
        guest=ALL_GUEST,
    ),
    _case(
        "postbackup",
        lambda rig: [s.EndBackup(VM, rig.inside(f"101/{VM}"), rig.inside(f"101/{VM}/backup"), "")],
        backed_up,
        opaque=VOLATILE,
        guest=ALL_GUEST,
    ),
    _case("prebackup, with a TPM", back_up_tpm, with_tpm, opaque=VOLATILE, guest=ALL_GUEST),
    _case(
        "restore of a TPM",
        lambda rig: [RestoreTpm(VM, rig.inside(f"101/{VM}"))],
        with_tpm,
        tpm_archive(),
        opaque=VOLATILE,
        guest=ALL_GUEST,
    ),
    _restore("restore overlay", 0),
    _restore("restore overlay, grown since", 0, 16),
    _restore("restore in place", 2),
    _restore("restore clone on the store", 4),
    Case("premigrate", premigrate, been_there, ("a", "b")),
    _cp("datastore cp raw", "image-raw.raw", ""),
    _cp("datastore cp compressed", "image.gz", ""),
    _cp("datastore cp convert", "image-qcow2.raw.qcow2", "<DRIVER>raw</DRIVER>"),
    _cp("datastore cp not sparse", "image-raw.raw", "<SPARSE>no</SPARSE>"),
    _mkfs("raw", ""),
    _mkfs("qcow2", "ext4"),
    Case(
        "datastore clone",
        lambda rig, env: datastore(
            rig, env, "clone", f"<ID>9</ID><PATH>{source(rig, QCOW2)}</PATH><FORMAT>qcow2</FORMAT>"
        ),
        killed=("fe",),
        orphans=1,
    ),
    Case(
        "datastore rm",
        lambda rig, env: datastore(rig, env, "rm", f"<ID>1</ID><SOURCE>{source(rig, RAW)}</SOURCE>"),
        killed=("fe",),
    ),
]
__all__ = ["CASES", "Case", "Path"]
