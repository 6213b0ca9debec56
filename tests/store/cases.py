# SPDX-License-Identifier: Apache-2.0
"""What every kind of store must do, asked in the same words: one case per function, and what a kind must be
able to for it.

A `Bench` is a kind under test: an empty store, and what a guest, a process that dies or another machine would
do there. The cases run over kinds with their real tools (test_stores.py), and over one in memory
(tests/unit/test_memory_store.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Callable, ContextManager, Dict, List, NamedTuple, Protocol

import pytest

from semishared import store
from semishared.errors import (
    AnotherWriter,
    MissingImage,
    Overtaken,
    SemisharedError,
    TransferCorrupt,
    UploadTooLarge,
)
from semishared.model.refs import ImageRef
from semishared.model.store import access as store_access
from semishared.model.store.access import Access
from semishared.tools import extents

MiB = 1 << 20
SIZE = 16 * MiB


class Bench(Protocol):
    """A kind of store under test."""

    access: Access
    root: str
    outlives_processes: bool
    """What a process has made is there when it has been killed."""

    def write(self, source: str, offset: int, data: bytes) -> None:
        """Write to an image, or to a clone, as a guest does."""

    def read(self, source: str, offset: int, count: int) -> bytes:
        """Read an image, or a clone, as a guest does."""

    def through(self, name: str, target: Path) -> None:
        """Write the content of what `Store.opened` yields, as whoever opens it sees it, to a raw file."""

    def writing(self, source: str) -> ContextManager[object]:
        """Have a guest write to an image meanwhile."""

    def killed_replacing(self, image: ImageRef, size: int, path: Path) -> None:
        """Let a process replace the content of an image by that of a raw file, and die before it is done."""


class Case(NamedTuple):
    """A case, and whether it is asked of a kind."""

    ask: Callable[[Bench, Path], None]
    is_asked: Callable[[Bench], bool]


Ask = Callable[[Bench, Path], None]
CASES: Dict[str, Case] = {}


def case(is_asked: Callable[[Bench], bool] = lambda bench: True) -> Callable[[Ask], Ask]:
    """Make a function a case."""

    def noted(ask: Ask) -> Ask:
        CASES[ask.__name__.replace("_", " ")] = Case(ask, is_asked)
        return ask

    return noted


# -- in short -----------------------------------------------------------------------------------------


def of(bench: Bench) -> store.Store:
    return store.of(bench.access)


def ref(bench: Bench, number: int = 7) -> ImageRef:
    return ImageRef(
        105,
        number,
        "raw",
        store_access.new_source(bench.access, bench.root, number, os.urandom(16).hex()),
        access=bench.access,
    )


def raw_file(path: Path, pattern: int = 0xA1, size: int = SIZE) -> Path:
    """Make a raw file with a pattern at 1 MiB and at its end."""
    with open(path, "wb") as file:
        file.truncate(size)
        for offset in (MiB, size - 65536):
            file.seek(offset)
            file.write(bytes([pattern]) * 65536)
    return path


def image(bench: Bench, top: Path, number: int = 7, pattern: int = 0xA1) -> ImageRef:
    """Publish an image with a pattern, from extents that arrive."""
    made = ref(bench, number)
    receive(bench, made, raw_file(top / f"source-{number}", pattern))
    return made


def receive(bench: Bench, made: ImageRef, path: Path, said: str = "") -> str:
    known = extents.copy(str(path), None, "raw", "test").generation
    with open(path, "rb") as file:
        return of(bench).receive(made, SIZE, extents.data(file.fileno(), SIZE), lambda: said or known)


def content(bench: Bench, stored: ImageRef, top: Path, *, name: bool = True) -> tuple[bytes, str]:
    """Return what a host that makes a base reads, and the generation that it is known by afterwards (or was,
    without `name`).
    """
    of(bench).freeze(stored)
    found = of(bench).content(stored)
    seen, target = found.see(), top / "base"
    target.unlink(missing_ok=True)
    read, current = found.copy(seen, str(target), "raw"), found.generation(seen)
    assert found.see() == seen
    assert current in ("", read.generation)
    if name and not current:
        found.publish(read, seen)
        unnamed = found.unnamed()
        if unnamed >= 0:
            of(bench).name(stored, unnamed, read.generation)
        again = of(bench).content(stored)
        assert again.generation(again.see()) == read.generation
        current = read.generation
    return target.read_bytes(), current


def known(bench: Bench, stored: ImageRef) -> str:
    """Return the generation that the image is known by, '' for none."""
    return of(bench).freeze(stored)


def pattern(bench: Bench, source: str, offset: int = MiB) -> int:
    """Return the byte that an image has at an offset, four of it."""
    found = bench.read(source, offset, 4096)
    assert found == found[:1] * 4096
    return found[0]


def nothing_left(bench: Bench) -> None:
    assert of(bench).leftovers(bench.root) == []


# -- images -------------------------------------------------------------------------------------------


@case()
def what_was_published_is_read_back(bench: Bench, top: Path) -> None:
    made = image(bench, top)
    assert pattern(bench, made.source) == 0xA1
    data, generation = content(bench, made, top)
    assert data == (top / "source-7").read_bytes()
    assert generation == extents.copy(str(top / "source-7"), None, "raw", "test").generation
    found = of(bench).content(made)
    seen = found.see()
    assert 2 * 65536 <= found.allocated(seen) <= SIZE
    (last,) = found.read([SIZE // extents.EXTENT - 1])
    assert last == (SIZE // extents.EXTENT - 1, data[-extents.EXTENT :])
    expected = found.expected(generation)
    assert expected is not None or not bench.outlives_processes, (
        "whoever stages it knows what it has in common with others"
    )
    assert expected is None or expected.generation == generation
    of(bench).check(made)
    nothing_left(bench)


@case()
def the_same_content_is_the_same_generation(bench: Bench, top: Path) -> None:
    first, second, other = image(bench, top, 7), image(bench, top, 8), image(bench, top, 9, 0xB2)
    assert known(bench, first) == known(bench, second) != known(bench, other)


@case()
def what_does_not_arrive_whole_is_no_image(bench: Bench, top: Path) -> None:
    made = ref(bench)
    with pytest.raises(TransferCorrupt):
        receive(bench, made, raw_file(top / "source"), said="0" * 32)
    with pytest.raises(MissingImage):
        of(bench).check(made)
    nothing_left(bench)
    receive(bench, made, top / "source")
    of(bench).check(made)


@case()
def an_empty_image_is_empty(bench: Bench, top: Path) -> None:
    made = ref(bench)
    of(bench).create(made, SIZE, "")
    data, _ = content(bench, made, top)
    assert data == bytes(SIZE)
    nothing_left(bench)


@case()
def a_draft_is_published_when_it_is_whole(bench: Bench, top: Path) -> None:
    made, source = ref(bench), str(raw_file(top / "source"))
    with pytest.raises(ZeroDivisionError), of(bench).made(made, SIZE) as draft:
        draft.fill(source, "raw")
        raise ZeroDivisionError
    with pytest.raises(MissingImage):
        of(bench).check(made)
    with of(bench).made(made, SIZE) as draft:
        draft.fill(source, "raw")
    assert content(bench, made, top)[0] == Path(source).read_bytes()
    nothing_left(bench)


@case()
def a_copy_is_independent(bench: Bench, top: Path) -> None:
    made, copy, then = image(bench, top), ref(bench, 8), ref(bench, 9)
    of(bench).keep(made, 0)
    bench.write(made.source, MiB, b"\xb2" * 65536)
    of(bench).copy(copy, made.source)
    of(bench).copy(then, made.source, 0)
    bench.write(made.source, MiB, b"\xc3" * 65536)
    assert [pattern(bench, found.source) for found in (made, copy, then)] == [0xC3, 0xB2, 0xA1]
    with pytest.raises(MissingImage):
        of(bench).copy(ref(bench, 10), made.source, 5)
    with pytest.raises(UploadTooLarge):
        of(bench).copy(ref(bench, 10), made.source, most=SIZE - 1)
    of(bench).remove(made)
    assert pattern(bench, copy.source) == 0xB2
    nothing_left(bench)


@case()
def an_image_is_removed_once_and_for_all(bench: Bench, top: Path) -> None:
    made, other = image(bench, top), image(bench, top, 8)
    of(bench).keep(made, 0)
    of(bench).remove(made)
    of(bench).remove(made)
    with pytest.raises(MissingImage):
        of(bench).check(made)
    of(bench).check(other)
    nothing_left(bench)
    again = made._replace(id=9)
    receive(bench, again, raw_file(top / "again", 0xC3))
    assert of(bench).snapshots(again) == []
    assert pattern(bench, again.source) == 0xC3


@case()
def an_image_grows_and_never_shrinks(bench: Bench, top: Path) -> None:
    made = image(bench, top)
    for size in (2 * SIZE, 2 * SIZE, SIZE):
        of(bench).grow(made, size)
        data, _ = content(bench, made, top)
        assert data == (top / "source-7").read_bytes() + bytes(SIZE)


@case()
def the_digest_is_that_of_the_content(bench: Bench, top: Path) -> None:
    import hashlib

    made = image(bench, top)
    assert of(bench).digest(made, "md5") == (hashlib.md5((top / "source-7").read_bytes()).hexdigest(), SIZE)


@case()
def what_is_opened_is_the_content_or_a_snapshot(bench: Bench, top: Path) -> None:
    made = image(bench, top)
    of(bench).keep(made, 3)
    bench.write(made.source, MiB, b"\xb2" * 65536)
    for snapshot, byte in ((-1, 0xB2), (3, 0xA1)):
        with of(bench).opened(made, snapshot) as name:
            bench.through(name, top / f"opened{snapshot}")
        assert (top / f"opened{snapshot}").read_bytes()[MiB : MiB + 65536] == bytes([byte]) * 65536


@case()
def libvirt_is_told_where_the_image_is(bench: Bench, top: Path) -> None:
    made = image(bench, top)
    path, network = of(bench).attach(made)
    assert of(bench).attach(made) == (path, network)
    assert bool(path) != bool(network)


# -- what its content is called -----------------------------------------------------------------------


@case()
def a_session_ends_the_generation(bench: Bench, top: Path) -> None:
    made = image(bench, top)
    first = content(bench, made, top)[1]
    assert first
    for _ in range(2):
        of(bench).begin_session(made)
        assert known(bench, made) == ""
    bench.write(made.source, MiB, b"\xb2" * 65536)
    data, second = content(bench, made, top)
    assert data[MiB : MiB + 65536] == b"\xb2" * 65536
    assert second not in ("", first)
    of(bench).begin_session(made)
    bench.write(made.source, MiB, b"\xa1" * 65536)
    assert content(bench, made, top)[1] == first, "the content came back"


@case()
def content_is_named_once_it_is_known(bench: Bench, top: Path) -> None:
    made = ref(bench)
    of(bench).create(made, SIZE, "")
    assert known(bench, made) == ""
    generation = content(bench, made, top)[1]
    assert known(bench, made) == generation == extents.Copy(None, SIZE).manifest("raw").generation
    assert content(bench, made, top, name=False)[1] == generation


@case()
def a_write_while_it_is_copied_is_noticed(bench: Bench, top: Path) -> None:
    made = image(bench, top)
    of(bench).freeze(made)
    found = of(bench).content(made)
    seen = found.see()
    of(bench).begin_session(made)
    bench.write(made.source, MiB, b"\xb2" * 65536)
    try:
        assert found.see() != seen
    except SemisharedError:
        pass  # what is frozen has gone with its generation


# -- content that is replaced -------------------------------------------------------------------------


@case()
def content_is_replaced_whole(bench: Bench, top: Path) -> None:
    made = image(bench, top)
    first, other = known(bench, made), raw_file(top / "other", 0xB2)
    of(bench).keep(made, 0)
    with of(bench).replaced(made, 2 * SIZE) as draft:
        draft.fill(str(other), "raw")
    data, generation = content(bench, made, top)
    assert data == other.read_bytes() + bytes(SIZE)
    assert generation not in ("", first)
    assert of(bench).snapshots(made) == [0]
    nothing_left(bench)


@case()
def content_that_fails_to_be_replaced_is_what_it_was(bench: Bench, top: Path) -> None:
    made = image(bench, top)
    with pytest.raises(ZeroDivisionError), of(bench).replaced(made, 2 * SIZE) as draft:
        draft.fill(str(raw_file(top / "other", 0xB2)), "raw")
        raise ZeroDivisionError
    assert content(bench, made, top)[0] == (top / "source-7").read_bytes()
    nothing_left(bench)


@case(lambda bench: bench.outlives_processes)
def who_is_killed_while_replacing_leaves_what_it_was(bench: Bench, top: Path) -> None:
    made, other = image(bench, top), raw_file(top / "other", 0xB2)
    bench.killed_replacing(made, 2 * SIZE, other)
    assert len(of(bench).leftovers(bench.root)) == 1
    of(bench).begin_session(made)
    assert content(bench, made, top)[0] == (top / "source-7").read_bytes()
    nothing_left(bench)
    with of(bench).replaced(made, SIZE) as draft:
        draft.fill(str(other), "raw")
    assert content(bench, made, top)[0] == other.read_bytes()


# -- snapshots ----------------------------------------------------------------------------------------


@case()
def snapshots_are_kept_reverted_and_forgotten(bench: Bench, top: Path) -> None:
    made = image(bench, top)
    for number in range(3):
        bench.write(made.source, 8 * MiB, bytes([number + 1]) * 4096)
        of(bench).keep(made, number)
    of(bench).keep(made, 2)
    assert of(bench).snapshots(made) == [0, 1, 2]
    for number in (0, 2):
        of(bench).revert(made, number)
        assert pattern(bench, made.source, 8 * MiB) == number + 1
        assert pattern(bench, made.source) == 0xA1
    for _ in range(2):
        of(bench).forget(made, 1)
        assert of(bench).snapshots(made) == [0, 2]
    with pytest.raises(MissingImage):
        of(bench).revert(made, 1)
    nothing_left(bench)


@case()
def what_was_planned_in_another_session_is_late(bench: Bench, top: Path) -> None:
    made = image(bench, top)
    of(bench).keep(made, 0)
    of(bench).begin_session(made)
    planned = of(bench).session(made)
    of(bench).begin_session(made)
    bench.write(made.source, MiB, b"\xb2" * 4096)
    for late in (of(bench).revert, of(bench).forget):
        with pytest.raises(Overtaken, match="was given to a guest"):
            late(made, 0, session=planned)
    assert (pattern(bench, made.source), of(bench).snapshots(made)) == (0xB2, [0])
    nothing_left(bench)
    now = of(bench).session(made)
    of(bench).revert(made, 0, session=now)
    assert pattern(bench, made.source) == 0xA1


@case()
def a_revert_makes_another_generation(bench: Bench, top: Path) -> None:
    made = image(bench, top)
    first = known(bench, made)
    of(bench).keep(made, 0)
    of(bench).begin_session(made)
    bench.write(made.source, MiB, b"\xb2" * 65536)
    second = content(bench, made, top)[1]
    of(bench).revert(made, 0)
    assert known(bench, made) == ""
    assert content(bench, made, top)[1] == first != second


@case()
def a_revert_keeps_the_size_that_is_wanted(bench: Bench, top: Path) -> None:
    made = image(bench, top)
    of(bench).keep(made, 0)
    of(bench).grow(made, 2 * SIZE)
    of(bench).revert(made, 0, 2 * SIZE)
    assert content(bench, made, top)[0] == (top / "source-7").read_bytes() + bytes(SIZE)


@case()
def a_flattened_image_has_no_snapshots(bench: Bench, top: Path) -> None:
    made = image(bench, top)
    of(bench).flatten(made, 0)
    assert pattern(bench, made.source) == 0xA1, "without any it is done"
    of(bench).keep(made, 0)
    bench.write(made.source, MiB, b"\xb2" * 65536)
    of(bench).keep(made, 1)
    with pytest.raises(MissingImage):
        of(bench).flatten(made, 7)
    assert of(bench).snapshots(made) == [0, 1]
    for _ in range(2):
        of(bench).flatten(made, 0)
        assert of(bench).snapshots(made) == []
        assert pattern(bench, made.source) == 0xA1
    nothing_left(bench)


@case()
def nothing_is_kept_that_is_not_wanted_any_more(bench: Bench, top: Path) -> None:
    made = image(bench, top)

    def refuse() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        of(bench).keep(made, 0, check=refuse)
    assert of(bench).snapshots(made) == []
    nothing_left(bench)


# -- clones -------------------------------------------------------------------------------------------


@case()
def a_clone_is_of_the_present_content_and_its_own(bench: Bench, top: Path) -> None:
    made = image(bench, top)
    clone = of(bench).clone_of(made, 23, 1)
    of(bench).clone(made, clone, 0)
    bench.write(clone, MiB, b"\x55" * 65536)
    assert (pattern(bench, clone), pattern(bench, made.source)) == (0x55, 0xA1)
    of(bench).clone(made, clone, 2 * SIZE)
    assert pattern(bench, clone) == 0xA1, "made anew: what was there belonged to an action given up"
    assert bench.read(clone, 2 * SIZE - 4096, 4096) == bytes(4096)
    other = of(bench).clone_of(made, 24, 1)
    of(bench).clone(made, other, 0)
    for _ in range(2):
        of(bench).remove_clone(made, clone)
    assert pattern(bench, other) == 0xA1
    of(bench).remove_clone(made, other)
    of(bench).remove(made)
    nothing_left(bench)


@case()
def a_clone_is_found_by_its_disk_as_its_guest_left_it(bench: Bench, top: Path) -> None:
    made = image(bench, top)
    assert of(bench).clone_found(made, 23, 1) == ""
    clone = of(bench).clone_of(made, 23, 1)
    of(bench).clone(made, clone, 0)
    found = of(bench).clone_found(made, 23, 1)
    assert found.startswith(clone)
    bench.write(found, MiB, b"\x55" * 65536)
    assert pattern(bench, found) == 0x55
    assert of(bench).clone_found(made, 23, 2) == of(bench).clone_found(made, 2, 1) == ""
    of(bench).remove_clone(made, clone)
    assert of(bench).clone_found(made, 23, 1) == ""
    nothing_left(bench)


@case()
def an_epoch_is_a_vms_own_and_never_falls(bench: Bench, top: Path) -> None:
    made = image(bench, top)
    assert of(bench).epoch(made, 23) == -1
    for epoch in (9, 9, 4):
        of(bench).note_epoch(made, 23, epoch)
        assert (of(bench).epoch(made, 23), of(bench).epoch(made, 2)) == (9, -1)
    of(bench).note_epoch(made, 23, 12)
    assert of(bench).epoch(made, 23) == 12
    nothing_left(bench)


# -- who else -----------------------------------------------------------------------------------------


@case()
def who_writes_is_seen(bench: Bench, top: Path) -> None:
    made = image(bench, top)
    assert of(bench).writers(made) == []
    with bench.writing(made.source), pytest.raises(AnotherWriter):
        of(bench).writers(made)
    assert of(bench).writers(made) == []


@case()
def who_writes_is_not_robbed(bench: Bench, top: Path) -> None:
    made = image(bench, top)
    of(bench).keep(made, 0)
    with bench.writing(made.source):
        bench_errors: List[Any] = []
        for change in (lambda: of(bench).revert(made, 0), lambda: of(bench).replaced(made, SIZE).__enter__()):
            try:
                change()
            except SemisharedError as e:
                bench_errors.append(e.id)
        assert len(bench_errors) == 2
    nothing_left(bench)


@case()
def the_capacity_is_told(bench: Bench, top: Path) -> None:
    used, total, free = of(bench).capacity(bench.root)
    assert 0 <= used <= total
    assert 0 < free <= total


@case()
def what_is_not_there_is_said(bench: Bench, top: Path) -> None:
    gone = ref(bench)
    stored = of(bench)
    of(bench).reach(bench.root)
    for ask in (
        lambda: stored.check(gone),
        lambda: stored.freeze(gone),
        lambda: stored.begin_session(gone),
        lambda: stored.grow(gone, SIZE),
        lambda: stored.keep(gone, 0),
        lambda: stored.revert(gone, 0),
        lambda: stored.copy(ref(bench, 8), gone.source),
        lambda: stored.clone(gone, stored.clone_of(gone, 1, 1), 0),
        lambda: stored.replaced(gone, SIZE).__enter__(),
    ):
        with pytest.raises(MissingImage):
            ask()
    stored.remove(gone)
    stored.remove_clone(gone, stored.clone_of(gone, 1, 1))
    nothing_left(bench)
