# SPDX-License-Identifier: Apache-2.0
"""Bases from a peer and from the store, whole and in part: only what the manifest says is taken, and nothing
twice.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from rot import copied
from semishared.base import cache
from semishared.config import Config
from semishared.errors import BadArguments, HostFailed, HostUnreachable, MissingImage, TransferCorrupt
from semishared.model import steps as s
from semishared.model.base import steps as base_steps
from semishared.model.base.names import ALL, ranges
from semishared.stage import peers
from semishared.stage.ensure import ensure
from semishared.stage.partial import Partial
from semishared.tools import compress, extents, locks
from semishared.wire import packets
from tools.test_base_care import flip
from tools.world import MiB, World, qemu_io

IMAGE = 256 * MiB


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, s.ImageRef]:
    """An image with 31 MiB of data in pieces, and a machine where it is staged."""
    world = World(tmp_path_factory.mktemp("staged"))
    found = world.image(size=IMAGE)
    with open(found.source, "r+b") as file:
        for at in (20, 100, 201):
            file.seek(at * MiB)
            file.write(os.urandom(8 * MiB) + b"text " * 500_000)
    generation = ensure(str(world.root), found, None).base.generation
    return world, found._replace(generation=generation)


@pytest.fixture()
def image(world: World, staged: tuple[World, s.ImageRef]) -> s.ImageRef:
    """The same on a machine of the test's own: what it takes to make and to hash it is spent once."""
    theirs, found = staged
    subprocess.run(["cp", "-a", "--", f"{theirs.location}/.", world.location], check=True)
    copied(world.location)
    return found._replace(source=str(world.store / Path(found.source).name))


def serve(
    world: World, image: s.ImageRef, wanted: tuple[tuple[int, int], ...] = (), name: str = "none"
) -> base_steps.ServeBase:
    base = f"100-7-{image.generation}"
    return base_steps.ServeBase(str(world.root), base, wanted, packets.Session.new().text, name, 0)


def wanted(
    world: World, *parts: base_steps.Part, sources: tuple[str, ...] = (), store: str = "rest"
) -> base_steps.FetchBases:
    return base_steps.FetchBases(str(world.root), parts, sources, store, "", "none", 0, 0, (), ())


def fetch(step: base_steps.ServeBase, target: Partial, skip: bool = False) -> int:
    packed: list[int] = []
    peers.fetch("localhost", step, target, Config(), lambda _, size: packed.append(size), lambda host: skip)
    return sum(packed)


def whole(world: World, target: Partial) -> bool:
    target.finish()
    assert target.manifest is not None
    found = extents.copy(f"{target.directory}/image", None, "raw", "test")
    return found == target.manifest and found.generation == target.generation


@pytest.mark.parametrize("name", ["none", "zstd", "lzop", "auto"])
def test_base_comes_whole_and_sparse_from_a_peer(
    world: World, image: s.ImageRef, tmp_path: Path, name: str
) -> None:
    target = Partial(str(tmp_path / "other"), image)
    packed = fetch(serve(world, image, name=name), target)
    assert target.is_complete and whole(world, target)
    data = len(target.manifest.extents) * extents.EXTENT  # type: ignore[union-attr]
    # What auto takes depends on how busy the machine is.
    assert packed < data * (1.01 if name in ("none", "auto") else 0.9)
    assert os.stat(f"{target.directory}/image").st_blocks * 512 <= data + 1 * MiB


@pytest.mark.parametrize("name", ["zstd", "auto"])
def test_host_without_a_compressor_gets_it_as_it_is(
    world: World, image: s.ImageRef, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The peer is another process, and has them.
    monkeypatch.setitem(compress.UNPACK, "zstd", ["no-such-program"])
    monkeypatch.setitem(compress.UNPACK, "lzop", ["no-such-program"])
    monkeypatch.setattr(compress, "available", lambda: ["none"])
    target = Partial(str(tmp_path / "other"), image)
    # A rate at which packing pays.
    packed = fetch(serve(world, image, ((7, 8),), name)._replace(rate=8 * MiB), target)
    assert target.have == {7} and packed > extents.EXTENT


def test_only_what_is_missing_is_sent(world: World, image: s.ImageRef, tmp_path: Path) -> None:
    target = Partial(str(tmp_path / "other"), image)
    fetch(serve(world, image, ((0, 30),)), target)
    first = len(target.have)
    assert 0 < first < len(target.missing()) + first
    target.close()
    again = Partial(str(tmp_path / "other"), image)
    assert len(again.have) == first, "what was there is gone on with"
    packed = fetch(serve(world, image, ranges(again.missing())), again)
    assert packed < (len(again.have) - first) * extents.EXTENT * 1.01 + 100_000
    assert whole(world, again)


def test_manifest_is_not_sent_to_who_has_it(world: World, image: s.ImageRef, tmp_path: Path) -> None:
    text = (world.bases()[0] / "manifest").read_bytes()
    for knows in (False, True):
        first, *_ = peers.groups(str(world.root), f"100-7-{image.generation}", ((5, 6),), 0, knows)
        assert first[0] == (b"" if knows else text)
    target = Partial(str(tmp_path / "other"), image)
    step = serve(world, image, ((5, 6),))
    with pytest.raises(TransferCorrupt, match="before their manifest"):
        fetch(step._replace(knows=True), target)
    target.begin(text)
    fetch(step._replace(knows=True), target)
    assert target.have == {5}


@pytest.mark.parametrize("knows", [False, True])
def test_peer_is_told_whether_to_send_the_manifest(
    world: World, image: s.ImageRef, tmp_path: Path, knows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from semishared.stage.bases_in_progress import Account, Orders, Target, Targets
    from semishared.stage.fetch_from_sources import Filling

    targets = Targets(lambda target: None)
    target = Target(str(tmp_path / "else"), base_steps.Part(image, ("localhost",)))
    targets.add(target)
    if knows:
        targets.begin((world.bases()[0] / "manifest").read_bytes())
    filling = Filling(
        wanted(world), targets, Account(targets, lambda **_: None), Orders(lambda: None), Config()
    )
    asked: list[base_steps.ServeBase] = []
    monkeypatch.setattr(peers, "fetch", lambda host, step, *_: asked.append(step))
    with pytest.raises(TransferCorrupt):
        filling._peer("localhost", target)
    assert [step.knows for step in asked] == [knows]
    targets.close()


def test_what_comes_takes_nothing_of_the_page_cache(world: World, image: s.ImageRef, tmp_path: Path) -> None:
    target = Partial(str(tmp_path / "other"), image)
    fetch(serve(world, image), target)
    path = f"{target.directory}/image"

    def resident() -> int:
        argv = ["fincore", "--bytes", "--noheadings", "--output", "RES", path]
        return int(subprocess.run(argv, capture_output=True, check=True).stdout)

    assert target.is_complete and resident() == 0, (
        "guests lose their caches (does the file system below have O_DIRECT?)"
    )
    # Memory that does not begin at a page, as librbd's, is no reason to go through it.
    with open(path, "rb") as file:
        content = {
            index: os.pread(file.fileno(), extents.EXTENT, index * extents.EXTENT) for index in target.have
        }
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    target.have.clear()
    for index, part in content.items():
        assert target.put(index, memoryview(b"x" + part)[1:])
    assert resident() == 0 and whole(world, target)


def test_what_rotted_in_a_partial_base_is_fetched_again(
    world: World, image: s.ImageRef, tmp_path: Path
) -> None:
    target = Partial(str(tmp_path / "other"), image)
    fetch(serve(world, image, ((0, 30),)), target)
    index = max(target.have)
    target.close()
    flip(Path(target.directory) / "image", index * extents.EXTENT + 9)
    with open(f"{target.directory}/have", "a") as file:
        file.write("7")
    again = Partial(str(tmp_path / "other"), image)
    assert index in again.missing() and len(again.have) == len(target.have) - 1
    fetch(serve(world, image, ranges(again.missing())), again)
    assert whole(world, again)


def test_extent_that_is_damaged_at_the_peer_is_not_taken(
    world: World, image: s.ImageRef, tmp_path: Path
) -> None:
    (base,) = world.bases()
    flip(base / "image", 21 * MiB)
    target = Partial(str(tmp_path / "other"), image)
    fetch(serve(world, image), target)
    assert target.missing() == [5]


@pytest.mark.fault(
    39,
    "a base that a peer has seen to be rotten is out of use on the host that has it, before its next lease",
)
def test_who_has_sent_what_is_damaged_takes_it_out_of_use(
    world: World, image: s.ImageRef, tmp_path: Path
) -> None:
    (base,) = world.bases()
    fetch(serve(world, image), Partial(str(tmp_path / "first"), image))
    assert (base / "image").exists(), "what is as it should be stays"
    flip(base / "image", 21 * MiB)
    fetch(serve(world, image), Partial(str(tmp_path / "other"), image))
    assert ((base / "image").exists(), (base / "damaged").exists()) == (False, True)
    qemu_io(world.clone(image, world.disk()), "qcow2", "read -P 0xa1 1M 64k")


def test_extent_that_was_something_else_at_first_has_its_zeros(
    world: World, image: s.ImageRef, tmp_path: Path
) -> None:
    """It is written while it is hashed: what turns out to be wrong stays there until the right one comes."""
    (base,) = world.bases()
    target = Partial(str(tmp_path / "other"), image)
    target.begin((base / "manifest").read_bytes())
    content = {}
    with open(base / "image", "rb") as file:
        for index in target.missing():
            content[index] = os.pread(file.fileno(), extents.EXTENT, index * extents.EXTENT)
    assert any(bytes(64 << 10) in part for part in content.values()), "no extent has zeros"
    for index, part in content.items():
        assert not target.put(index, b"\xff" * len(part))
    assert not target.have
    for index, part in content.items():
        assert target.put(index, part)
    assert whole(world, target)


def test_manifest_of_another_generation_is_not_taken(world: World, image: s.ImageRef, tmp_path: Path) -> None:
    wrong = image._replace(generation="0" * 32)
    with pytest.raises(TransferCorrupt):
        fetch(serve(world, image), Partial(str(tmp_path / "other"), wrong))


def test_peer_without_the_base_says_so_soon(
    world: World, image: s.ImageRef, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = time.monotonic()
    wrong = image._replace(generation="0" * 32)
    with pytest.raises(MissingImage):
        fetch(serve(world, wrong), Partial(str(tmp_path / "other"), wrong))
    assert time.monotonic() - started < peers.FOLLOW_S, (
        "it waits for what is about to begin, not for what arrives"
    )


def test_source_is_left_when_the_front_end_says_so(world: World, image: s.ImageRef, tmp_path: Path) -> None:
    with pytest.raises(HostUnreachable, match="faster"):
        fetch(serve(world, image), Partial(str(tmp_path / "other"), image), skip=True)


def test_base_that_is_still_arriving_is_served_as_it_comes(
    world: World, image: s.ImageRef, tmp_path: Path
) -> None:
    """The peer gets it from the store, slowly, and we get it from the peer: a chain of two."""
    root, text = str(world.root), (world.bases()[0] / "manifest").read_bytes()
    cache.forget(cache.at(root, world.bases()[0].name))
    target = Partial(str(tmp_path / "other"), image)

    def receive() -> None:
        fetch(serve(world, image), target)

    with locks.exclusive(f"{root}/locks/base-100-7"):
        source = Partial(root, image)
        source.begin(text)
        puller = threading.Thread(target=receive)
        puller.start()
        *first, last = source.missing()
        with open(image.source, "rb") as file:
            for index in first:
                assert source.put(index, extents.read_at(file.fileno(), index))
                time.sleep(0.1)
            until = time.monotonic() + peers.FOLLOW_S - 5
            while len(target.have) < len(first) and time.monotonic() < until:
                time.sleep(0.05)
            early = set(target.have)
            assert source.put(last, extents.read_at(file.fileno(), last))
        source.finish()
        cache.publish(root, cache.at(root, f"100-7-{image.generation}"), image)
    puller.join(60)
    assert whole(world, target)
    assert early == set(first), "it comes before the peer has all"


def test_receiver_has_it_from_the_peer_and_the_store_is_the_last_resort(
    world: World, image: s.ImageRef
) -> None:
    (base,) = world.bases()

    def have(sources: tuple[str, ...], from_store: str) -> dict[str, object]:
        cache.forget(cache.at(str(world.root), base.name))
        (found,) = world.on(wanted(world, base_steps.Part(image, sources, ALL if from_store == "no" else ())))
        assert isinstance(found, dict)
        assert extents.copy(str(base / "image"), None, "raw", "test").generation == image.generation
        return found

    found = have((), "last")
    data = len(extents.parse((base / "manifest").read_bytes()).extents)
    assert found["sources"] == {"store": {"extents": data, "bytes": data * extents.EXTENT}}
    with pytest.raises(HostUnreachable):
        have((), "no")
    (again,) = world.on(wanted(world, base_steps.Part(image)))
    assert again["sources"] != {}  # type: ignore[index]
    (there,) = world.on(wanted(world, base_steps.Part(image, ("nowhere",), ALL)))
    assert there == {"sources": {}, "troubles": []}
    assert world.leftovers() == []


def test_clone_asks_the_front_end_when_it_is_cold_and_only_then(world: World, image: s.ImageRef) -> None:
    from semishared.wire.session import Session

    (base,) = world.bases()
    asked: list[dict[str, object]] = []

    def answer(question: dict[str, object]) -> dict[str, object]:
        asked.append(question)
        return {"sources": [], "from_store": "last", "codec": "none", "rate": 0, "evict": []}

    def clone(vm: int) -> None:
        disk = world.disk(vm)
        steps = [
            s.StageBase(str(world.root), image._replace(generation="")),
            s.PrepareVm(vm, disk.vm_dir),
            s.CreateOverlay(disk, image, 0, ""),
        ]
        with Session("localhost", "clone", Config()) as session:
            session.run(steps, answer=answer)
        qemu_io(disk.path, "qcow2", "read -P 0xa1 1M 64k")

    clone(5)
    assert asked == []
    world.on(s.RemoveDisk(world.disk(5), ""))
    cache.forget(cache.at(str(world.root), base.name))
    clone(6)
    (question,) = asked
    assert (question["question"], question["name"], question["bases"]) == ("base", base.name, [])
    assert 31 * MiB <= int(str(question["needed"])) <= 40 * MiB, "what the image takes, not whole extents"
    assert world.leftovers() == []


def test_compressors_of_this_machine() -> None:
    assert compress.available() == ["none", "zstd", "lzop"]
    data = b"text " * 100_000
    for name in compress.available():
        assert compress.unpack(name, compress.pack(name, data), len(data)) == data
    with pytest.raises(TransferCorrupt):
        compress.unpack("zstd", compress.pack("zstd", data), len(data) + 1)


def test_reception_killed_at_any_step_is_gone_on_with(
    world: World, image: s.ImageRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    (base,) = world.bases()
    peer = Partial(
        str(world.root), image
    )  # what a peer has passed on before: three extents of a killed reception
    peer.begin((base / "manifest").read_bytes())
    with open(image.source, "rb") as file:
        for index in peer.missing()[:3]:
            assert peer.put(index, extents.read_at(file.fileno(), index))
    peer.close()
    kept = world.root / "kept"
    os.rename(peer.directory, kept)
    step = wanted(world, base_steps.Part(image))
    killed = 0
    for kill_at in range(1, 60):
        cache.forget(cache.at(str(world.root), base.name))
        subprocess.run(["cp", "-a", str(kept), peer.directory], check=True)
        monkeypatch.setenv("SEMISHARED_KILL_AT", str(kill_at))
        try:
            world.on(step)
            is_killed = False
        except HostFailed:
            is_killed = True
        monkeypatch.delenv("SEMISHARED_KILL_AT")
        killed += is_killed
        world.on(step)
        assert extents.copy(str(base / "image"), None, "raw", "test").generation == image.generation
        assert (
            (base / "leases").is_dir() and not (base / "have").exists() and not (base / "generation").exists()
        )
        assert world.leftovers() == []
        if not is_killed:
            break
    assert killed >= 4, "begun, copied, finished, published"


def second(world: World, image: s.ImageRef, name: str, at: int) -> s.ImageRef:
    """Make an image that differs from another one in one extent, and has its own generation."""
    path = Path(image.source).with_name(name)
    subprocess.run(["cp", "--sparse=always", image.source, str(path)], check=True)
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(os.urandom(4096))
    other = image._replace(id=8, source=str(path), generation="")
    generation = ensure(str(world.root), other, None).base.generation
    cache.forget(cache.named(str(world.root), other, generation))
    return other._replace(generation=generation)


def test_what_another_base_has_is_not_fetched(world: World, image: s.ImageRef) -> None:
    other = second(world, image, "other", 22 * MiB)
    (found,) = world.on(base_steps.DescribeBase(str(world.root), other))
    assert found["lacks"] == [[5, 6]] and found["manifest"]  # type: ignore[index]
    (found,) = world.on(wanted(world, base_steps.Part(other)))
    (old,) = [base for base in world.bases() if base.name.startswith("100-7-")]
    data = len(extents.parse((old / "manifest").read_bytes()).extents)
    sources = found["sources"]  # type: ignore[index]
    assert (
        sources["store"] == {"extents": 1, "bytes": extents.EXTENT} and sources["here"]["extents"] == data - 1
    )
    made = cache.named(str(world.root), other, other.generation)
    assert extents.copy(made.image, None, "raw", "test").generation == other.generation
    assert world.leftovers() == []


@pytest.mark.fault(
    39, "a base of which another one was to be made, and that was seen to be rotten, is out of use"
)
def test_what_has_rotted_in_another_base_comes_from_the_store(world: World, image: s.ImageRef) -> None:
    other = second(world, image, "other", 22 * MiB)
    (old,) = world.bases()
    flip(old / "image", 101 * MiB)
    (found,) = world.on(wanted(world, base_steps.Part(other)))
    assert found["sources"]["store"]["extents"] == 2  # type: ignore[index]
    assert ((old / "image").exists(), (old / "damaged").exists()) == (False, True), (
        "no guest is given it any more"
    )
    assert (
        extents.copy(
            cache.named(str(world.root), other, other.generation).image, None, "raw", "test"
        ).generation
        == other.generation
    )


def test_extents_of_several_bases_come_by_their_hashes(
    world: World, image: s.ImageRef, tmp_path: Path
) -> None:
    """A peer that has one base gives what it has of another one."""
    from semishared.stage.bases_in_progress import Account, Orders, Target, Targets
    from semishared.stage.fetch_from_sources import Filling

    other = second(world, image, "other", 22 * MiB)
    targets, root = Targets(lambda target: None), str(tmp_path / "else")
    step = wanted(
        world, base_steps.Part(other, (), ALL), base_steps.Part(image, (), ALL), sources=("localhost",)
    )
    account = Account(targets, lambda **_: None)
    for part in step.parts:
        targets.add(Target(root, part))
    filling = Filling(step._replace(parts=()), targets, account, Orders(lambda: None), Config())
    for target in targets.all:
        assert targets.total >= 0 and not target.is_known
    for found in (extents.copy(ref.source, None, "raw", "test") for ref in (other, image)):
        targets.begin(found.text())
    filling._ask(step.sources, lambda: not targets.has_shared, filling._shared)
    lacking = [target.shared() for target in targets.all]
    assert lacking == [[5], []], "what it does not have"
    assert account.sources["localhost"].bytes < (targets.count / 2 + 1) * extents.EXTENT * 1.01, (
        "each once, for both"
    )
    targets.close()


def test_who_was_left_for_a_faster_source_is_asked_for_the_next_base_all_the_same(
    world: World, tmp_path: Path
) -> None:
    """Unlike who was not reached."""
    from semishared.stage.bases_in_progress import Account, Orders, Target, Targets
    from semishared.stage.fetch_from_sources import Filling

    image = world.image()
    image = image._replace(generation=ensure(str(world.root), image, None).base.generation)
    step, targets = wanted(world, base_steps.Part(image, ("localhost",))), Targets(lambda target: None)
    target, account = Target(str(tmp_path / "else"), step.parts[0]), Account(targets, lambda **_: None)
    targets.add(target)
    orders = iter([{"skip": "localhost"}])
    filling = Filling(step._replace(parts=()), targets, account, Orders(lambda: next(orders, None)), Config())

    def ask() -> None:
        filling._ask(target.part.holders, lambda: target.lacks, lambda host: filling._peer(host, target))

    ask()
    assert account.troubles == ["localhost: localhost is left for a faster source"] and not target.is_known
    ask()
    assert target.is_known and whole(world, target.partial)


@pytest.mark.parametrize("holder", ["localhost", "nowhere"])
def test_peer_that_nobody_knows_is_tried_while_the_store_is_read(
    world: World, tmp_path: Path, holder: str
) -> None:
    from semishared.stage import source_speed
    from semishared.stage.bases_in_progress import Account, Orders, Target, Targets
    from semishared.stage.fetch_from_sources import Filling

    image, root = world.image(size=IMAGE), str(tmp_path / "else")
    with open(image.source, "r+b") as file:
        for _ in range(IMAGE // extents.EXTENT):
            file.write(os.urandom(1024) * (extents.EXTENT // 1024))
    found = ensure(str(world.root), image, None).base
    image = image._replace(generation=found.generation)
    targets = Targets(lambda target: None)
    account = Account(targets, lambda **_: None)
    # The trial is over before the store is.
    step = wanted(world, base_steps.Part(image, (holder,)), store="quicker")._replace(store_rate=64 * MiB)
    target = Target(root, step.parts[0])
    targets.add(target)
    targets.begin(extents.copy(image.source, None, "raw", "test").text())
    Filling(step._replace(parts=()), targets, account, Orders(lambda: None), Config())._own(target)
    from_peer = account.sources.get(holder, base_steps.FromSource(0, 0)).extents
    assert account.sources["store"].extents + from_peer == IMAGE // extents.EXTENT, "nothing twice"
    if holder == "localhost":
        assert account.troubles == [] and from_peer >= source_speed.LEAST
    else:
        assert [line.split(":")[0] for line in account.troubles] == [holder] and from_peer == 0
    assert whole(world, target.partial)


def test_step_with_parts_is_the_same_after_its_way_through_json(world: World, image: s.ImageRef) -> None:
    step = wanted(
        world,
        base_steps.Part(image, ("h1",), ((0, 3), (5, 7)), ALL),
        base_steps.Part(image),
        sources=("h2", "h3"),
    )
    assert s.from_data(json.loads(json.dumps(s.to_data(step)))) == step
    for bad in ({}, {"parts": 7}, {"parts": [7]}, {"parts": [{"image": 1}]}):
        with pytest.raises(BadArguments):
            s.from_data({**s.to_data(step), **bad} if bad else {"step": "FetchBases"})
