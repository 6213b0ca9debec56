# SPDX-License-Identifier: Apache-2.0
"""Clones of images in mounted stores: layers (tools/layers.py) over the image, for one disk each.

    <datastore>/.semishared/9b6635f6/clones/
        VM-DISK-CLOUD                    -> VM-DISK-CLOUD.snap/0
        VM-DISK-CLOUD.snap/seq.json      {version, seq}: the SEQ of its VM's history

A late step, sent to another host at an earlier SEQ, changes no clone of a later SEQ.
"""

from __future__ import annotations

import errno
import json
import os
from contextlib import ExitStack, contextmanager
from typing import Callable, Iterator

from ...errors import BadRecord, LateAction, UnexpectedFile, UnexpectedLink
from ...model.disk import names as disk_names
from ...model.store import dir_names
from ...tools import beneath, files, inspection, layers, qemu_img
from ...tools.effects import Undo, point
from . import image as dir_image
from .image import Stored

FOLDER = "layers-"
"""Prefix of the names of staged directories of layers."""


@contextmanager
def made(
    stored: Stored, format: str, clone: str, min_size: int, seq: int = -1
) -> Iterator[Callable[[], None]]:
    """Make an overlay of at least `min_size` bytes over the image; yield the function that publishes it.

    Another host may have published a clone of that name for a newer VM: raise LateAction if its SEQ is later
    than `seq` (-1: unknown). An undo removes only what this call has made.
    """
    dir_image.make_link(stored)
    with dir_image.side(stored, dir_names.CLONES, make=True) as clones:
        here = f"{clones}/{os.path.basename(clone)}"
        staged = files.staged_name(here)
        _tidy(clones, os.path.basename(clone))
        try:
            with files.enough_space(os.path.dirname(clone)):
                with dir_image.opened(stored.source) as path:
                    # The size comes from the very file that was checked.
                    inspection.check(path, format, stored.source)
                    size = max(min_size, qemu_img.virtual_size(path, format))
                with files.made(staged) as path:
                    qemu_img.create_overlay(path, stored.link, format, size, "", look=False)
                point("store clone staged")

            def publish() -> None:
                with files.enough_space(os.path.dirname(clone)):
                    _publish(clones, os.path.basename(clone), staged, seq)

            yield publish
        finally:
            files.unlink(staged)


def _publish(clones: str, name: str, staged: str, seq: int) -> None:
    """Replace a clone's directory of layers by a new one, with `staged` as its only layer.

    A late step of another host then writes into the old directory: it finds the layers by their open
    directory.
    """
    own, here = _staged_folder(clones, name), f"{clones}/{name}"
    with beneath.directory(clones, os.path.basename(own), make=True) as folder, Undo() as undo:
        undo.add(lambda: files.remove_folder(own, ignore_errors=True))
        if seq >= 0:
            files.write_json(dir_names.seq_note(folder), {"version": 1, "seq": seq})
        os.rename(staged, f"{folder}/0")
        point(f"{name} layer renamed")
        files.fsync(folder)
        older = _set_aside(clones, name, seq)
        try:
            os.rename(own, disk_names.layers(here))
        except OSError as e:
            if e.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT):
                raise
            raise LateAction(
                f"another host has made the clone {name} on the store meanwhile: it is left as it is"
            ) from None
        undo.add(lambda: _remove_itself(clones, name, folder))
        point("store clone in its place")
        files.fsync(clones)

        def check() -> None:
            if not files.is_at(disk_names.layers(here), os.stat(folder)):
                raise LateAction(
                    f"another host has made the clone {name} on the store anew meanwhile: it is left as it is"
                )

        files.symlink(disk_names.layer(name, 0), here, check)
        undo.keep()
    if older:
        files.remove_folder(older)


def _remove_itself(clones: str, name: str, folder: str) -> None:
    if files.is_at(f"{clones}/{disk_names.layers(name)}", os.stat(folder)):
        layers.remove(f"{clones}/{name}")


def _set_aside(clones: str, name: str, seq: int) -> str:
    """Move a clone's directory of layers away by one rename; return its new path, '' if there was none.

    Raise LateAction if it belongs to a later SEQ.
    """
    place, aside = f"{clones}/{disk_names.layers(name)}", _staged_folder(clones, name)
    try:
        with beneath.directory(clones, disk_names.layers(name)) as folder:
            _compare(folder, name, seq)
            os.rename(place, aside)
            if not files.is_at(aside, os.stat(folder)):
                os.rename(aside, place)
                raise LateAction(
                    f"another host has made the clone {name} on the store meanwhile: it is left as it is"
                )
    except FileNotFoundError:
        return ""
    except (NotADirectoryError, UnexpectedLink):
        files.unlink(place)  # a link there belongs to nothing of ours, wherever it leads
        return ""
    point("store clone set aside")
    return aside


def _staged_folder(clones: str, name: str) -> str:
    """Return a name for a directory of layers that is not published, or no longer."""
    return files.staged_name(f"{clones}/{FOLDER}{name}")


def _tidy(clones: str, name: str) -> None:
    """Remove the staged files and directories of layers that killed processes left for a clone."""
    files.remove_staged(clones, name)
    for entry in os.listdir(clones):
        if disk_names.is_staged(entry, f"{FOLDER}{name}"):
            files.remove_folder(f"{clones}/{entry}")


def _seq_in(folder: str) -> int:
    """Return the SEQ recorded in a clone's directory of layers, -1 for none; raise BadRecord."""
    noted = (files.read_json(dir_names.seq_note(folder)) or {}).get("seq")
    return noted if type(noted) is int else -1


def _compare(folder: str, name: str, seq: int) -> None:
    own = _seq_in(folder) if seq >= 0 else -1
    if own > seq:
        raise LateAction(
            f"the clone {name} on the store is of SEQ {own} of its VM's history, and this of SEQ "
            f"{seq}: it is left as it is"
        )


def _refuse_late(clones: str, name: str, seq: int) -> None:
    try:
        with beneath.directory(clones, disk_names.layers(name)) as folder:
            _compare(folder, name, seq)
    except (FileNotFoundError, NotADirectoryError, UnexpectedLink):
        pass


def _note_seq(clones: str, name: str, seq: int) -> None:
    _refuse_late(clones, name, seq)
    if seq >= 0:
        with beneath.directory(clones, disk_names.layers(name), make=True) as folder:
            note = dir_names.seq_note(folder)
            files.remove_staged(*os.path.split(note))
            files.write_json(note, {"version": 1, "seq": seq})
            point("clone dated")


def take_over(stored: Stored, clone: str, seq: int) -> None:
    """Record that a clone belongs to SEQ `seq` now, after its host was lost; raise LateAction."""
    with dir_image.side(stored, dir_names.CLONES) as clones:
        _note_seq(clones, os.path.basename(clone), seq)


def refuse_late(clone: str, seq: int) -> None:
    """Raise LateAction if a clone belongs to a later SEQ than the plan's; a missing clone has no SEQ."""
    try:
        with beneath.directory(*os.path.split(os.path.dirname(clone))) as clones:
            _refuse_late(clones, os.path.basename(clone), seq)
    except (FileNotFoundError, NotADirectoryError):
        pass


def active(stored: Stored, vm: int, disk: int, cloud: str) -> str:
    """Return the active layer of a disk's clone, '' if there is none; raise BrokenChain if it is ambiguous.

    A snapshot updates the clone's link last. If it died before that, its guest wrote to the one layer above,
    which is empty until then. So the topmost layer has the guest's data either way.
    """
    for path in dict.fromkeys((stored.clone(vm, disk, cloud), stored.clone(vm, disk))):
        name = os.path.basename(path)
        try:
            with (
                dir_image.side(stored, dir_names.CLONES) as clones,
                beneath.directory(clones, disk_names.layers(name)) as folder,
            ):
                number = disk_names.layer_of(os.readlink(f"{clones}/{name}"))
                if number:
                    return disk_names.layer(path, layers.topmost(folder, int(number)))
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as e:
            raise UnexpectedLink(
                f"{path} on {os.uname().nodename} is no link to a layer: {e.strerror}"
            ) from None
    return ""


def note_pull(path: str) -> None:
    """Record beside a clone's layer the file below it, before QEMU pulls that into it (see `put_back`)."""
    (folder, layer), (below, format) = os.path.split(path), layers.backing_of(path)
    files.write_json(
        dir_names.pull_note(folder), {"version": 1, "layer": layer, "below": below, "format": format}
    )
    point("pull noted beside the clone")


def forget_pull(folder: str) -> None:
    """Remove the record of a pull: the layers in `folder` are complete."""
    files.unlink(dir_names.pull_note(folder))


def put_back(stored: Stored, clone: str) -> None:
    """Restore the backing file of a layer whose pull died with its host; the layer below has all the data.

    QEMU changes the name in the header last but one. At that moment the map of the copied clusters is still
    in its memory.
    """
    with dir_image.side(stored, f"{dir_names.CLONES}/{disk_names.layers(os.path.basename(clone))}") as folder:
        noted = files.read_json(dir_names.pull_note(folder)) or {}
        layer, below, format = (str(noted.get(name, "")) for name in ("layer", "below", "format"))
        is_plain = disk_names.is_number(layer) and disk_names.is_number(below) and format in layers.FORMATS
        if is_plain and not files.is_absent(f"{folder}/{layer}") and not files.is_absent(f"{folder}/{below}"):
            fd = beneath.open_file(folder, layer, os.O_RDWR)
            try:
                if layers.backing_of(beneath.path_of(fd))[0] != below:
                    qemu_img.lay_over(beneath.path_of(fd), below, format)
                    point("layer put back")
            finally:
                os.close(fd)
        forget_pull(folder)


def remove(path: str, seq: int = -1) -> None:
    """Remove the store clone `path` (DATASTORE/.semishared/IMAGE/clones/NAME), unless its SEQ is later."""
    clones, name = os.path.split(path)
    side_dir = os.path.dirname(clones)
    _remove(os.path.dirname(os.path.dirname(side_dir)), os.path.basename(side_dir), name, seq)


def remove_unnamed(store_dir: str, vm: int, disk: int) -> None:
    """Remove a disk's store clone whose name has no cloud, in any image's directory."""
    try:
        with beneath.directory(store_dir, dir_names.side()) as path:
            images = [name for name in os.listdir(path) if dir_names.is_side(name)]
    except (FileNotFoundError, NotADirectoryError):
        return
    for image in images:
        _remove(store_dir, image, dir_names.clone_name(vm, disk))


def _remove(store_dir: str, image: str, name: str, seq: int = -1) -> None:
    try:
        with beneath.directory(store_dir, dir_names.clones(dir_names.side(image))) as path:
            aside = _set_aside(path, name, seq)
            # The link of a clone published meanwhile stays.
            found = files.is_absent(f"{path}/{disk_names.layers(name)}") and files.unlink(f"{path}/{name}")
            if aside:
                files.remove_folder(aside)
            if aside or found:
                point("store clone removed")
            _tidy(path, name)
    except LateAction:
        return
    except (FileNotFoundError, NotADirectoryError, UnexpectedLink):
        pass  # not a clone of ours: leave the target of a link alone


DEEPEST = 1000


@contextmanager
def opened_chain(
    stored: dir_image.Stored, path: str, format: str, image_format: str, raw_layer: object = None
) -> Iterator[str]:
    """Yield a `json:` name for the layer `path` of a clone; raise UnexpectedFile if its chain leads out.

    The name lists the whole chain, with a path to each open file, so that qemu-img follows no header:

        clones/VM-DISK.snap/2  over 1  over 0  over .semishared/NAME/image -> ../../NAME

    Every host can write there, and QEMU would follow the names in headers and every link on the way. This
    function believes a header in two things only: which layer beside it comes next, or that the image comes
    next.
    """
    folder, _, layer = path[len(stored.datastore) + 1 :].rpartition("/")
    if not layer.isdigit():
        raise BadRecord(f"{path} is no layer of a clone")
    with ExitStack() as stack:
        directory = stack.enter_context(beneath.directory(stored.datastore, folder))
        nodes: list[dict[str, object]] = []
        name = layer
        while len(nodes) < DEEPEST:
            file = stack.enter_context(beneath.file(directory, name))
            nodes.append(_node(format, file))
            if format == "raw" or (name.isdigit() and int(name) == raw_layer):
                break
            trouble = layers.reaches_out(file)
            below, below_format = layers.backing_of(file)
            if trouble and trouble != layers.outside(stored.link):
                raise UnexpectedFile(f"{path} on {os.uname().nodename} lies over a layer that has {trouble}")
            if not below:
                break
            if below == stored.link:
                image = stack.enter_context(dir_image.opened(stored.source))
                inspection.check(image, image_format, stored.source)
                nodes.append(_node(image_format, image))
                break
            name, format = below, below_format or "qcow2"
        else:
            raise UnexpectedFile(f"{path} on {os.uname().nodename} lies over itself")
        chain: dict[str, object] | None = None
        for node in reversed(nodes):
            if node["driver"] != "raw":
                node["backing"] = chain
            chain = node
        yield f"json:{json.dumps(chain)}"


def _node(format: str, path: str) -> dict[str, object]:
    return {"driver": format, "file": {"driver": "file", "filename": path}}
