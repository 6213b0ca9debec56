# SPDX-License-Identifier: Apache-2.0
"""A VM directory on its way from one place to another: everything arrives, or the source keeps it."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator

import pytest

from semishared.config import Config
from semishared.disk import epochs, guard
from semishared.errors import (
    ImageChanged,
    LateAction,
    MissingImage,
    Overtaken,
    SameDirectory,
    SemisharedError,
    StoreUnavailable,
    ToolFailed,
    TransferCorrupt,
    WholeDirectoryThere,
)
from semishared.model import steps as s
from semishared.tools import layers, locks
from semishared.wire.session import Session
from tools.world import MiB, World, allocated, qemu_io


def carry(
    source_dir: str,
    target_dir: str,
    vm: int,
    *,
    keep_bases: bool = True,
    spoil: str = "",
    arrived: bool = True,
    seq: int = -1,
    answer: Callable[[Dict[str, object]], object] | None = None,
) -> object:
    """Relay a VM directory as `tm/mv` does, each end with its own session; `spoil` a chunk or the hash on the
    way.
    """
    with Session("localhost", "mv", Config()) as source, Session("localhost", "mv", Config()) as target:
        source.seq = target.seq = seq
        (found,) = source.run([s.MarkVm(vm, source_dir)])
        if not found.present:
            return None
        source.begin([s.SendVm(vm, source_dir, found.token)])
        target.begin([s.ReceiveVm(vm, target_dir, keep_bases, "")], answers=answer is not None)
        count = 0
        first = source.read()
        while isinstance(first, bytes):
            if spoil == "chunk" and count == 0:
                first = first[:3000] + bytes([first[3000] ^ 1]) + first[3001:]
            count += 1
            target.send_data(first)
            first = source.read()
        assert isinstance(first, dict)
        source.finish()
        target.send(end=True, sha256="0" * 64 if spoil == "hash" else first["sha256"])
        target.finish(answer)
        moved = dict(target.moved)
        if arrived:
            assert source.run([s.ReleaseVm(vm, source_dir, "", str(first["seen"]))]) == [s.KeptVm("")]
        return moved


def prepared(world: World) -> tuple[s.ImageRef, str, str]:
    """Make VM 5 with an overlay, a disk in place, a sparse volatile disk, odd names; return image, source and
    target.
    """
    image = world.image(size=64 * MiB)
    top = world.clone(image, world.disk(5, 1))
    qemu_io(top, "qcow2", "write -P 0x31 2M 64k")
    world.link(world.image("in-place"), world.disk(5, 0))
    world.on(s.CreateVolatile(world.disk(5, 2), 512 * MiB, "raw", ""))
    qemu_io(world.disk(5, 2).path, "raw", "write -P 0x32 300M 64k")
    source = Path(world.disk(5).vm_dir)
    (source / "deployment.0").write_text("<domain/>")
    (source / "a 'b' $(c)\nd").write_text("odd")
    return image, str(source), str(world.location / "103" / "5")


def check_arrived(directory: str) -> None:
    qemu_io(f"{directory}/disk.1", "qcow2", "read -P 0x31 2M 64k", "read -P 0xa1 1M 64k")
    qemu_io(f"{directory}/disk.2", "raw", "read -P 0x32 300M 64k")
    assert os.path.getsize(f"{directory}/disk.2") == 512 * MiB
    assert allocated(f"{directory}/disk.2") < 2 * MiB
    assert os.readlink(f"{directory}/disk.0").endswith("/.semishared/in-place/image")
    qemu_io(f"{directory}/disk.0", "raw", "read -P 0xa1 1M 64k")
    assert Path(directory, "deployment.0").read_text() == "<domain/>"
    assert Path(directory, "a 'b' $(c)\nd").read_text() == "odd"
    assert os.readlink(f"{directory}/disk.1") == "disk.1.snap/0"
    for disk, path in ((1, f"{directory}/disk.1.snap/0"), (2, f"{directory}/disk.2")):
        assert json.loads(Path(directory, ".semishared", f"disk.{disk}.json").read_text())["path"] == path


def test_directory_arrives_whole_and_leaves_its_source(world: World) -> None:
    _, source, target = prepared(world)
    moved = carry(source, target, 5)
    check_arrived(target)
    assert not os.path.lexists(source)
    assert isinstance(moved, dict)
    assert moved["received"] < 10 * MiB, "holes do not travel"
    assert world.leftovers() == []


def other_host(world: World) -> str:
    """Return a VM directory whose host, below another location, has no base yet."""
    return str(world.top / "other" / "101" / "5")


def test_target_gets_base_and_lease_before_it_publishes(world: World) -> None:
    image, source, _ = prepared(world)
    target = other_host(world)
    carry(source, target, 5)
    (base,) = (world.top / "other" / ".semishared" / "bases").iterdir()
    assert [lease.name for lease in (base / "leases").iterdir()] == ["5-1"]
    assert (base / "image").read_bytes() == Path(image.source).read_bytes()
    assert world.leases() == [], "the source gave its lease up"


def test_front_end_keeps_the_overlay_without_a_base_and_resume_fetches_it(world: World) -> None:
    _, source, _ = prepared(world)
    rest = other_host(world)
    carry(source, rest, 5, keep_bases=False)
    assert not (world.top / "other" / ".semishared" / "bases").exists()
    assert world.leases() == []
    carry(rest, source, 5)
    check_arrived(source)
    assert len(world.leases()) == 1


def test_resume_over_a_changed_image_is_refused_and_the_directory_stays(world: World) -> None:
    image, source, _ = prepared(world)
    rest, far = other_host(world), str(world.top / "far" / "101" / "5")
    carry(source, rest, 5, keep_bases=False)
    qemu_io(image.source, "raw", "write -P 0xff 1M 64k")
    with pytest.raises(ImageChanged, match="disk 1 of VM 5 needs the image as it was"):
        carry(rest, far, 5)
    assert not os.path.lexists(f"{far}/disk.1")
    assert world.leftovers() == []
    qemu_io(f"{rest}/disk.2", "raw", "read -P 0x32 300M 64k")


def test_target_without_the_store_of_a_disk_in_place_refuses(world: World) -> None:
    _, source, target = prepared(world)
    os.rename(world.store / "in-place", world.store / "elsewhere")
    with pytest.raises(StoreUnavailable, match="disk 0"):
        carry(source, target, 5)
    assert os.path.isdir(source)
    assert not os.path.lexists(f"{target}/disk.1")
    assert world.leftovers() == []


@pytest.mark.parametrize("spoil", ["hash", "chunk"])
def test_stream_that_was_spoiled_is_not_published_and_a_retry_works(world: World, spoil: str) -> None:
    _, source, target = prepared(world)
    with pytest.raises(TransferCorrupt, match="is not what was sent"):
        carry(source, target, 5, spoil=spoil)
    assert os.path.isdir(source)
    assert not os.path.lexists(f"{target}/disk.1")
    assert world.leftovers() == []
    carry(source, target, 5)
    check_arrived(target)
    assert world.leftovers() == []


def test_source_keeps_the_directory_until_it_is_told_of_the_arrival(world: World) -> None:
    _, source, target = prepared(world)
    carry(source, target, 5, arrived=False)
    check_arrived(target)
    qemu_io(f"{source}/disk.2", "raw", "read -P 0x32 300M 64k")
    carry(source, target, 5)
    check_arrived(target)
    assert not os.path.lexists(source)


def test_older_directory_at_the_target_is_replaced_not_merged(world: World) -> None:
    _, source, target = prepared(world)
    Path(target, ".semishared").mkdir(parents=True)
    Path(target, "disk.9").write_bytes(b"old")
    Path(target, ".semishared/vm.json").write_text('{"version": 1, "seq": 3}')
    carry(source, target, 5, seq=4)
    check_arrived(target)
    assert not os.path.lexists(f"{target}/disk.9")
    assert json.loads(Path(target, ".semishared/vm.json").read_text())["seq"] == 4
    assert world.leftovers() == []


@pytest.mark.parametrize(("noted", "seq"), [(None, 4), (None, -1), (4, 4), (3, -1)])
def test_whole_directory_is_never_replaced_by_one_that_has_less(
    world: World, noted: int | None, seq: int
) -> None:
    _, source, target = prepared(world)
    carry(source, target, 5, arrived=False, seq=-1)
    if noted is not None:
        Path(target, ".semishared/vm.json").write_text(json.dumps({"version": 1, "seq": noted}))
    for name in ("disk.2", ".semishared/disk.2.json"):
        os.unlink(f"{source}/{name}")
    with pytest.raises(
        WholeDirectoryThere, match=r"has what did not arrive: \.semishared/disk\.2\.json, disk\.2"
    ):
        carry(source, target, 5, seq=seq)
    with pytest.raises(WholeDirectoryThere):
        rename(world, 5, source, target, seq=seq)
    check_arrived(target)
    assert os.path.lexists(f"{source}/disk.1")
    assert world.leftovers() == []


def test_directory_of_a_later_seq_is_not_replaced(world: World) -> None:
    _, source, target = prepared(world)
    carry(source, target, 5, arrived=False, seq=6)
    with pytest.raises(LateAction, match="is of SEQ 6 of VM 5's history, and this is of SEQ 5"):
        carry(source, target, 5, seq=5)
    check_arrived(target)
    assert world.leftovers() == []


def test_source_that_was_written_to_since_it_was_sent_is_kept(world: World) -> None:
    _, source, target = prepared(world)
    (found,) = world.on(s.RenameVm(5, source, target, True, ""))
    qemu_io(world.disk(5, 2).path, "raw", "write -P 0x77 10M 64k")
    (done,) = world.on(s.ReleaseVm(5, source, "", found["seen"]))  # type: ignore[index]
    assert done == {"kept": "it has changed since it was read"}
    qemu_io(world.disk(5, 2).path, "raw", "read -P 0x77 10M 64k")


def test_of_two_moves_at_once_the_one_that_began_last_publishes_and_each_cleans_up_its_own(
    world: World,
) -> None:
    _, source, target = prepared(world)
    with Session("localhost", "mv", Config()) as one, Session("localhost", "mv", Config()) as other:
        sent = {}
        for session in (one, other):
            session.begin([s.ReceiveVm(5, target, True, "")])
            with Session("localhost", "mv", Config()) as sender:
                sender.begin([s.SendVm(5, source)])
                message = sender.read()
                while isinstance(message, bytes):
                    session.send_data(message)
                    message = sender.read()
                sent = message if isinstance(message, dict) else {}
                sender.finish()
        incoming = [path for path in Path(target).parent.iterdir() if path.name.startswith(".incoming-5-")]
        assert len(incoming) == 2, "each has its own"
        one.send(end=True, sha256=sent["sha256"])
        with pytest.raises(Overtaken, match="another move of VM 5"):
            one.finish()
        assert not os.path.lexists(target)
        other.send(end=True, sha256=sent["sha256"])
        other.finish()
    check_arrived(target)
    assert world.leftovers() == []
    assert not list((world.root / "locks").glob("incoming-*"))


def test_directory_that_is_removed_while_it_is_sent_is_not_taken_for_whole(world: World) -> None:
    _, source, _ = prepared(world)
    # More than fits on the way: it waits for us.
    Path(source, "large").write_bytes(os.urandom(20 * MiB))
    with Session("localhost", "mv", Config()) as session:
        session.begin([s.SendVm(5, source)])
        session.read()
        world.on(s.RemoveVm(5, source))
        with pytest.raises((Overtaken, ToolFailed)):
            while isinstance(session.read(), bytes):
                pass
            session.finish()


def test_one_directory_is_known_again_under_another_name(world: World, tmp_path: Path) -> None:
    _, source, target = prepared(world)
    other = tmp_path / "other"
    other.symlink_to(world.location)
    (found,) = world.on(s.MarkVm(5, source))
    assert isinstance(found, dict)
    token, seen = found["token"], found["seen"]
    again = f"{other}/101/5"
    for words in ((token, ""), ("", seen)):
        assert [
            answer["same"]  # type: ignore[index]
            for answer in world.on(s.LookForVm(5, again, *words), s.LookForVm(5, target, *words))
        ] == [True, False]
    world.on(s.UnmarkVm(5, source, token))
    assert world.leftovers() == []
    (looked,) = world.on(s.LookForVm(5, again, token, ""))
    assert looked["same"] is False  # type: ignore[index]


def test_rename_to_the_same_directory_under_another_name_is_refused(world: World) -> None:
    _, source, _ = prepared(world)
    (world.location / "104").symlink_to("101")
    with pytest.raises(SameDirectory, match="are one directory"):
        rename(world, 5, source, str(world.location / "104" / "5"))
    check_arrived(source)
    assert world.leftovers() == []


def rename(world: World, vm: int, source: str, target: str, *, seq: int = -1) -> None:
    """Move a VM directory on one host, as `tm/mv` does."""
    (found,) = world.on(s.RenameVm(vm, source, target, True, ""), seq=seq)
    assert isinstance(found, dict)
    assert world.on(s.ReleaseVm(vm, source, "", found["seen"]), seq=seq) == [{"kept": ""}]


def test_nothing_to_send_says_so(world: World) -> None:
    assert carry(world.disk().vm_dir, other_host(world), 5) is None
    assert not os.path.lexists(other_host(world))


def test_rename_to_another_system_datastore_of_the_host(world: World) -> None:
    _, source, target = prepared(world)
    rename(world, 5, source, target)
    check_arrived(target)
    assert not os.path.lexists(source)
    assert len(world.leases()) == 1
    assert (world.location / "103" / ".monitor").read_text() == "semishared\n"
    rename(world, 5, source, target)
    check_arrived(target)
    assert world.leftovers() == []
    with pytest.raises(MissingImage):
        rename(world, 6, source.replace("/5", "/6"), target.replace("/5", "/6"))


def with_data_file(path: Path) -> None:
    """Let the header of a qcow2 file say that its data is in another file; what it lies over stays."""
    with path.open("r+b") as file:
        file.seek(72)
        features = int.from_bytes(file.read(8), "big")
        file.seek(72)
        file.write((features | layers.DATA_FILE).to_bytes(8, "big"))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda source, secret: (
            os.unlink(source / "disk.1.snap/0"),
            os.symlink(secret, source / "disk.1.snap/0"),
        ),
        lambda source, secret: (os.unlink(source / "disk.2"), os.symlink(secret, source / "disk.2")),
        lambda source, secret: (os.unlink(source / "disk.0"), os.symlink(secret, source / "disk.0")),
        lambda source, secret: os.symlink(secret.parent, source / "disk.3.snap"),
        lambda source, secret: os.mknod(source / "disk.9", 0o600 | stat.S_IFCHR, os.makedev(1, 3)),
        lambda source, secret: subprocess.run(
            ["qemu-img", "rebase", "-u", "-f", "qcow2", "-b", secret, "-F", "raw", source / "disk.1.snap/0"],
            check=True,
        ),
        lambda source, secret: with_data_file(source / "disk.1.snap/0"),
    ],
    ids=["layer", "disk", "other place", "folder", "device", "backing file", "data file, over its lease"],
)
@pytest.mark.fault(
    7, "a VM directory that arrives holds no link, device or backing name that leads out of it"
)
def test_directory_with_a_way_out_is_refused_where_it_arrives(
    world: World, tmp_path: Path, spoil: Any
) -> None:
    _, source, target = prepared(world)
    secret = tmp_path / "outside" / "secret"
    secret.parent.mkdir()
    secret.write_bytes(b"private" * 1000)
    spoil(Path(source), secret)
    with pytest.raises(SemisharedError) as refused:
        carry(source, target, 5)
    assert refused.value.id in ("SS070", "SS071"), refused.value.detail
    assert not os.path.lexists(f"{target}/deployment.0")
    assert world.leftovers() == []
    assert os.path.isdir(source), "what was refused stays where it is"


def test_what_arrives_has_no_set_user_id_and_not_everybody_writes_it(tmp_path: Path) -> None:
    vm_dir = tmp_path / "5"
    modes = {
        "disk.1": (0o4755, 0o755),
        "disk.2": (0o2660, 0o660),
        "disk.3": (0o666, 0o664),
        "disk.4": (0o757, 0o755),
    }
    vm_dir.mkdir()
    for name, (sent, _) in modes.items():
        (vm_dir / name).touch()
        (vm_dir / name).chmod(sent)
    guard.check_received(str(vm_dir), 5, str(vm_dir), ())
    assert {name: stat.S_IMODE((vm_dir / name).stat().st_mode) for name in modes} == {
        name: mode for name, (_, mode) in modes.items()
    }


def over_the_store(world: World) -> tuple[s.ImageRef, str, str]:
    """Make VM 5 with a disk over the image on the store, and a snapshot of it; return image, source and
    target.
    """
    image, disk = world.image(), world.disk(5, 1)
    world.on(s.PrepareVm(5, disk.vm_dir), s.CreateRemote(disk, image, 0, ""))
    qemu_io(disk.path, "qcow2", "write -P 0x31 2M 64k")
    world.on(s.NameLayer(disk, 0, 0), s.AddLayer(disk, 1, 0, "qcow2"), s.ActivateLayer(disk, 1, "qcow2"))
    return image, disk.vm_dir, world.disk(5, 1, 103).vm_dir


def test_disk_over_the_store_is_there_where_the_store_is(world: World) -> None:
    image, source, target = over_the_store(world)
    carry(source, target, 5)
    qemu_io(f"{target}/disk.1.snap/1", "qcow2", "read -P 0x31 2M 64k", "read -P 0xa1 1M 64k")
    assert world.leases() == [] and world.bases() == []
    os.rename(image.source, f"{image.source}.away")
    with pytest.raises(MissingImage, match=f"disk 1 reads from {image.source}, which"):
        carry(target, source, 5)
    carry(target, source, 5, keep_bases=False)
    os.rename(f"{image.source}.away", image.source)
    qemu_io(f"{source}/disk.1.snap/1", "qcow2", "read -P 0xa1 1M 64k")


@pytest.mark.parametrize("data_file", [False, True], ids=["another file", "a data file"])
def test_disk_over_the_store_that_arrives_over_anything_else_is_refused(
    world: World, tmp_path: Path, data_file: bool
) -> None:
    image, source, target = over_the_store(world)
    link = f"{world.store}/.semishared/image/image"
    (tmp_path / "secret").write_bytes(b"private" * 1000)
    lowest = f"{source}/disk.1.snap/0"
    if data_file:
        options = f"data_file={tmp_path}/secret"
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", "-o", options, lowest, "64M"], check=True)
        head = bytearray(Path(lowest).read_bytes())
        name = link.encode()
        head[8:20] = (60000).to_bytes(8, "big") + len(name).to_bytes(4, "big")
        head[60000 : 60000 + len(name)] = name
        Path(lowest).write_bytes(head)
    else:
        subprocess.run(
            ["qemu-img", "rebase", "-u", "-q", "-f", "qcow2", "-b", tmp_path / "secret", "-F", "raw", lowest],
            check=True,
        )
    with pytest.raises(SemisharedError) as refused:
        carry(source, target, 5)
    assert refused.value.id in ("SS070", "SS071"), refused.value.detail
    assert not os.path.lexists(target)


def test_disk_of_another_driver_leads_where_it_does(world: World) -> None:
    _, source, target = prepared(world)
    os.symlink("/dev/null", f"{source}/disk.4")
    step = s.RenameVm(5, source, target, True, "")
    with pytest.raises(SemisharedError, match=r"disk\.4"):
        world.on(step)
    world.on(step._replace(foreign=(4,)))
    assert os.readlink(f"{target}/disk.4") == "/dev/null"


@pytest.mark.fault(
    1, "the whole VM that a move made is not replaced by what was made anew where its source had gone"
)
def test_last_copy_is_not_replaced_because_it_is_older(world: World) -> None:
    """The move succeeded, oned was told that it had failed, and the VM was tried, and given its CONTEXT,
    where it had been.
    """
    _, source, target = prepared(world)
    rename(world, 5, source, target, seq=1)
    world.on(s.PrepareVm(5, source), s.CreateVolatile(s.DiskRef(5, 3, source), MiB, "raw", ""), seq=2)
    step = s.RenameVm(5, source, target, True, "")
    with pytest.raises(SemisharedError) as refused:
        world.on(step._replace(disks=(0, 1, 2)) if "disks" in step._fields else step, seq=3)
    check_arrived(target)
    assert isinstance(refused.value, WholeDirectoryThere)
    assert world.leftovers() == []


@pytest.mark.fault(
    3, "what is published while the removal of an older source waits is not removed in its place"
)
def test_source_that_is_replaced_while_its_removal_waits_is_kept(world: World) -> None:
    _, source, target = prepared(world)
    (found,) = world.on(s.RenameVm(5, source, target, True, ""), seq=1)
    with Session("localhost", "mv", Config()) as session:
        with locks.exclusive(str(world.root / "locks" / "vm-5"), 10):
            session.begin([s.ReleaseVm(5, source, "", found["seen"])])  # type: ignore[index]
            time.sleep(0.5)
            # What a move back publishes, which holds the lock.
            os.rename(source, f"{source}-older")
            subprocess.run(["cp", "-a", target, source], check=True)
            Path(source, "new").write_text("the only one")
        assert session.finish() == [s.KeptVm("it has changed since it was read")]
    assert Path(source, "new").read_text() == "the only one"


@pytest.mark.parametrize("noted", [True, False])
def test_move_goes_on_though_the_lock_file_was_old_and_removed(world: World, noted: bool) -> None:
    _, source, target = prepared(world)
    lock = world.root / "locks" / "vm-5"
    with Session("localhost", "mv", Config()) as sender, Session("localhost", "mv", Config()) as session:
        sender.begin([s.SendVm(5, source)])
        session.begin([s.ReceiveVm(5, target, True, "")])
        message = sender.read()
        while isinstance(message, bytes):
            session.send_data(message)
            message = sender.read()
        assert isinstance(message, dict)
        while not list((world.location / "103").glob(".incoming-5-*")):
            time.sleep(0.01)
        lock.unlink()
        if noted:
            # Another one has begun since: whatever the files say of the first, it does not publish.
            with locks.exclusive(str(lock), 10) as file:
                epochs.begin_move(file)
        session.send(end=True, sha256=message["sha256"])
        if noted:
            with pytest.raises(Overtaken):
                session.finish()
        else:
            session.finish()
            check_arrived(target)


@pytest.fixture
def stuck(world: World) -> Iterator[Path]:
    """What a removal could not remove: a file system is mounted in it."""
    mount = world.system / ".removed-5-0123456789ab" / "mounted"
    mount.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", str(mount)], check=True)
    (mount / "file").touch()
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_removal_that_cannot_end_holds_no_later_action_up(world: World, stuck: Path) -> None:
    _, source, target = prepared(world)
    (found,) = world.on(s.RenameVm(5, source, target, True, ""), seq=1)
    (done,) = world.on(s.ReleaseVm(5, source, "", found["seen"]), seq=1)  # type: ignore[index]
    assert "different device" in done["kept"]  # type: ignore[index]
    assert not os.path.lexists(source)
    world.on(s.RenameVm(5, target, source, True, ""), seq=2)
    check_arrived(source)
    with pytest.raises(ToolFailed, match="different device"):
        world.on(s.RemoveVm(5, source))
    assert stuck.exists()


@pytest.fixture
def full(world: World) -> Iterator[Path]:
    """A file that takes up all that is left of the file system of the datastores, when it is filled."""
    location = world.location
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(location)], check=True)
    for directory in (world.store, world.system):
        directory.mkdir()
    yield world.system / "other"
    subprocess.run(["umount", str(location)], check=True)


def fill(path: Path) -> None:
    with pytest.raises(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


@pytest.mark.parametrize("what", ["disk", "vm"])
def test_what_fills_the_disk_can_be_removed(world: World, full: Path, what: str) -> None:
    disk = world.disk(5, 2)
    world.on(s.PrepareVm(5, disk.vm_dir), s.CreateVolatile(disk, MiB, "raw", ""))
    lock = world.root / "locks" / "vm-5"
    lock.unlink()  # it was old
    fill(Path(disk.path))
    fill(full)
    world.on(s.RemoveDisk(disk, "") if what == "disk" else s.RemoveVm(5, disk.vm_dir), seq=3)
    assert not os.path.lexists(disk.path)
    assert json.loads(lock.read_text())["seqs"] == {"2" if what == "disk" else "": 3}
    assert world.leftovers() == []


@pytest.mark.fault(74, "a migration that ended before its hypervisor began leaves no proof for a later one")
def test_proof_that_no_migration_has_used_goes_with_its_end(world: World) -> None:
    disk = world.disk()
    world.clone(world.image(), disk)
    note = Path(disk.vm_dir, ".semishared", "migration.json")
    for _ in range(2):
        world.on(s.AllowMigration(disk.vm, disk.vm_dir, "h2", ("/srv/100",)))
        assert note.exists()
        world.on(s.MergeDeltas(disk.vm, disk.vm_dir, ""), s.MergeDeltas(disk.vm, disk.vm_dir, ""))
        assert not note.exists() and world.leftovers() == []
    shutil.rmtree(disk.vm_dir)
    world.on(s.MergeDeltas(disk.vm, disk.vm_dir, ""))
