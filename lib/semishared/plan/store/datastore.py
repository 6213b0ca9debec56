# SPDX-License-Identifier: Apache-2.0
"""Plans of the datastore actions: each returns what goes to stdout.

What they ask of a store is the same for all kinds; the machine that changes it does it.
"""

from __future__ import annotations

from typing import Mapping, Tuple

from ...errors import BadAttribute, NotSupported, RestrictedPath
from ...model.exchange import AskOned, Here, Part, T, ask, here, warn
from ...model.refs import ImageRef, Step
from ...model.store import access as store_access
from ...model.store import datastore_steps as d
from ...model.store import template
from ...named import NamedTuple
from ...opennebula.args import absolute, image_source, number
from ...opennebula.states import ImageType
from ...opennebula.xml import Datastore, Image
from ...units import MiB, mib_ceil
from ..image import images

SAVE_AS = "save_as"
MAKE = ("cp", "mkfs", "clone")
"""Actions that make an image as attributes say: what cannot work is refused here, not when the image goes."""
CHANGES = (*MAKE, "rm")
"""Actions that could make an image below a mount point, or take an image there for removed."""
UNSAID = ("", "-")
"""SOURCE of an image that was not made, or whose maker's answer one_datastore did not read in time."""


class Asked(NamedTuple):
    """The request of a datastore action, and the front-end's additions."""

    image: Image
    datastore: Datastore
    max_size: int
    file_systems: Mapping[str, Tuple[str, ...]]
    """File systems that the site supports, and words for mkfs (front/stock_conf.py)."""
    token: str
    """A name that no image has."""
    node: str
    """The front-end's name."""
    bridge: str = ""
    """The bridge of a mounted store that has answered, '' if none was asked yet."""
    from_bridges: bool = False
    """Whether what is cloned is in another datastore, whose bridges may be all that mount it."""

    @property
    def access(self) -> store_access.Access:
        return template.access(self.datastore)

    @property
    def directory(self) -> str:
        return absolute(self.datastore.base_path, "BASE_PATH")

    @property
    def root(self) -> str:
        """The pool or directory that its images are in."""
        return self.directory if self.access.can.is_mounted else template.pool(self.datastore)

    @property
    def staging(self) -> str:
        """The directory on the front-end in which an upload is worked on."""
        said = self.datastore.attribute("STAGING_DIR") if self.machine else ""
        return absolute(said, "STAGING_DIR") if said else self.directory

    @property
    def machine(self) -> str:
        """The machine that changes the store, '' for this one."""
        return self.bridge or self.machines[0]

    @property
    def machines(self) -> list[str]:
        """The machines that may change the store, this one first."""
        return template.changers(self.datastore, max(self.image.id, 0))

    @property
    def format(self) -> str:
        """The format of the image; where there is no choice, FORMAT does not matter."""
        formats = self.access.can.formats
        return images.format_of(self.image, self.datastore) if len(formats) > 1 else formats[0]

    @property
    def new(self) -> ImageRef:
        """The image that is to be made."""
        source = store_access.new_source(self.access, self.root, self.image.id, self.token)
        return ImageRef(self.datastore.id, self.image.id, self.format, source, access=self.access)

    def source(self, text: str, what: str) -> str:
        """Return `text` if it names an image in a store of this kind; raise BadArguments."""
        return image_source(store_access.check_source(self.access, text, what), what)

    @property
    def stored(self) -> ImageRef:
        """SOURCE, if it is an image of this datastore; raise RestrictedPath."""
        found = self.new._replace(source=self.source(self.image.source, "SOURCE"))
        if found.root != self.root or found.source[len(found.root) :].startswith("/."):
            raise RestrictedPath(
                f"{found.source} is no image of datastore {self.datastore.id}, which has them in {self.root}"
            )
        return found

    @property
    def snapshot(self) -> int:
        return number(self.image.text("TARGET_SNAPSHOT"), "TARGET_SNAPSHOT")

    def done(self, step: Step[T]) -> Part[T]:
        """Have a step carried out where the store is changed; return its answer."""
        return (yield from (ask(self.machine, step) if self.machine else here(step)))


def stat(asked: Asked) -> Part[str]:
    """Plan stat: the size in MiB that the image at PATH will have."""
    size = yield from here(d.MeasureSource(asked.image.path))
    return str(mib_ceil(size))


def cp(asked: Asked) -> Part[str]:
    """Plan cp: bring the image at PATH into the datastore; SOURCE and FORMAT."""
    known = asked.format if len(asked.access.can.formats) == 1 else ""
    image = asked.new._replace(format=known)
    found = yield from here(d.StoreUpload(asked.image.path, asked.staging, image, asked.machine))
    return f"{image.source} {known or found}"


def mkfs(asked: Asked) -> Part[str]:
    """Plan mkfs: an empty image; SOURCE alone, as oned takes the whole line for it."""
    image, formats, new = asked.image, asked.access.can.formats, asked.new
    if image.format == SAVE_AS:
        return new.source
    format = images.format_of(image, asked.datastore)
    if format not in formats:
        possible = (
            f", not one of {', '.join(formats)}" if len(formats) > 1 else f"; images on Ceph are {formats[0]}"
        )
        raise BadAttribute(f"FORMAT of image {image.id} is {format!r}{possible}")
    fs = image.file_system or image.attribute("FS").lower()
    if fs and fs not in asked.file_systems:
        raise BadAttribute(
            f"FS of image {image.id} is {fs!r}, not one of {', '.join(sorted(asked.file_systems))}"
        )
    if not 0 < image.size <= asked.max_size:
        raise BadAttribute(
            f"SIZE of image {image.id} is {image.size // MiB} MiB; 1 to {asked.max_size // MiB} are possible"
        )
    yield from asked.done(d.CreateImage(new, image.size, fs, asked.file_systems.get(fs, ())))
    return new.source


def clone(asked: Asked) -> Part[str]:
    """Plan clone: copy another image (PATH is its SOURCE) into the datastore; SOURCE and FORMAT.

    The copy has the format that the datastore's DRIVER says, and may come from another kind of store.
    """
    new, path, number = asked.new, asked.image.path, asked.image.number("CLONING_ID")
    is_across = not asked.access.holds(path)
    if number >= 0 and (is_across or asked.from_bridges or asked.datastore.attribute("DRIVER")):
        original = yield AskOned("image", number)
        wanted = _wanted(asked, original)
        if is_across or asked.from_bridges or wanted != (original.format or asked.access.can.formats[0]):
            new = new._replace(format=wanted)
            yield from _copied_across(asked, new, original)
            return f"{new.source} {new.format}"
    yield from asked.done(d.CopyStored(new, asked.source(path, "PATH"), most=asked.max_size))
    return f"{new.source} {new.format}"


def _wanted(asked: Asked, original: Image) -> str:
    """Return the format that a clone is to have."""
    formats = asked.access.can.formats
    if len(formats) == 1:
        return formats[0]
    found = original.format or formats[0]
    return images.stored_format(found, original, asked.datastore, encrypted=bool(original.luks_secret))


def _copied_across(asked: Asked, new: ImageRef, original: Image) -> Part[None]:
    """Have a machine make the copy that reaches both stores: the one that changes the store on Ceph, else a
    bridge of the new image's store, else of the original's.

    Raise NotSupported if nothing would tell whether a mounted one is there.
    """
    datastore = yield AskOned("datastore", original.store_id)
    if original.source != asked.image.path:
        raise BadAttribute(f"PATH is {asked.image.path!r}, image {original.id} is at {original.source!r}")
    ref = images.image_ref(original, datastore)
    machines = ["" if asked.access.can.is_mounted else asked.machine]
    machines += [template.machine(datastore, original.id)]
    machines += [asked.machine, template.changers(datastore, original.id)[0]]
    machine = next(filter(None, machines), "")
    is_elsewhere = bool(machine) and machine != "localhost"
    for mounted in (new, ref):
        if is_elsewhere and mounted.access.can.is_in_doubt(mounted.access.marker):
            raise NotSupported(
                f"{machine} is to copy image {original.id} from one store to another, and nothing would tell "
                f"whether {mounted.root} is mounted there: `semishared setup --apply` marks it"
            )
    image = new._replace(access=new.access.by_bridge())
    step = d.CopyAcross(image, ref.source, ref.format, ref.access.by_bridge(), asked.max_size)
    yield from (ask(machine, step) if machine else here(step))


def rm(asked: Asked) -> Part[str]:
    """Plan rm: remove the image SOURCE, if it is there."""
    if asked.image.source not in UNSAID:
        yield from asked.done(d.RemoveImage(asked.stored, template.is_trashed(asked.datastore)))
    return ""


def snap_delete(asked: Asked) -> Part[str]:
    """Plan snap_delete: remove the image's TARGET_SNAPSHOT, if it is there."""
    yield from asked.done(d.ForgetSnapshot(asked.stored, asked.snapshot))
    return ""


def snap_revert(asked: Asked) -> Part[str]:
    """Plan snap_revert: make the image's TARGET_SNAPSHOT its content; all snapshots stay."""
    yield from asked.done(d.RevertImage(asked.stored, asked.snapshot, asked.image.size))
    return ""


def snap_flatten(asked: Asked) -> Part[str]:
    """Plan snap_flatten: make TARGET_SNAPSHOT the image's content and remove all snapshots, if any."""
    yield from asked.done(d.FlattenImage(asked.stored, asked.snapshot, asked.image.size))
    return ""


def export(asked: Asked) -> Part[str]:
    """Plan export: IMPORT_INFO for the marketplace; OpenNebula's downloader reads SOURCE, perhaps by ssh."""
    # Not saxutils, which imports urllib.request: a third of this action's time.
    from xml.etree import ElementTree

    image, machine = asked.stored, asked.machine
    digest, _ = yield from asked.done(d.DigestImage(image, "md5"))
    host, source = asked.node if machine == "localhost" else machine, image.source
    if machine:
        url = image.access.can.url
        source = url.format(host=host, source=source, words=image.access.url_words)
    facts = {
        "IMPORT_SOURCE": source,
        "MD5": digest,
        "SIZE": str(asked.image.size // MiB),
        "FORMAT": image.format,
        "DISPOSE": "NO",
    }
    answer = ElementTree.Element("IMPORT_INFO")
    for name, text in facts.items():
        ElementTree.SubElement(answer, name).text = text
    return ElementTree.tostring(answer, encoding="unicode")


def monitor(asked: Asked) -> Part[str]:
    """Plan monitor: the store's capacity in MiB; a pool's after Ceph's replicas and quotas."""
    if template.unmarked(asked.datastore):
        yield Here(d.MakeStore(asked.directory))
    used, total, free = yield from asked.done(d.MeasureStore(asked.access, asked.root))
    return f"USED_MB={used // MiB}\nTOTAL_MB={total // MiB}\nFREE_MB={free // MiB}"


ACTIONS = {
    planner.__name__: planner
    for planner in (
        stat,
        cp,
        mkfs,
        clone,
        rm,
        monitor,
        snap_delete,
        snap_revert,
        snap_flatten,
        export,
    )
}


def planned(action: str, asked: Asked) -> Part[str]:
    """Plan a datastore action; below an unmounted mount point it makes, counts and removes nothing."""
    if template.is_shares(asked.datastore):
        from ..share import shares

        return (yield from shares.planned(action, asked))
    if asked.image.type == ImageType.FILESYSTEM or asked.image.path.startswith(images.NEW_SHARE):
        raise NotSupported(
            f"datastore {asked.datastore.id} holds disks: directories for guests are made where "
            f"DISK_TYPE is FILESYSTEM"
        )
    if action in MAKE:
        template.refuse_stock("datastore", asked.datastore, asked.datastore.fields("TEMPLATE"))
    if action != stat.__name__:
        asked = yield from _reached(action, asked)
    return (yield from ACTIONS[action](asked))


def _reached(action: str, asked: Asked) -> Part[Asked]:
    """See that a mounted store is there; return the request for the machine of the store that answers."""
    store, access = asked.datastore, asked.access
    if asked.machine and access.can.is_in_doubt(access.marker):
        raise BadAttribute(
            f"BRIDGE_LIST of datastore {store.id} needs its SEMISHARED_STORE: nothing else tells whether the "
            f"store is mounted on {asked.machine}; `semishared setup --apply` marks it"
        )
    if not access.can.is_mounted and len(asked.machines) == 1:
        return asked
    at = asked._replace(
        bridge=(yield from images.answering(store, asked.machines, d.CheckStore(access, asked.root)))
    )
    doubt = template.unmarked(store)
    if doubt and action in CHANGES:
        number = store.id if store.element.find("IMAGES/ID") is not None else -1
        removed = asked.image.source if action == rm.__name__ else ""
        yield from here(d.RefuseMountPoint(asked.directory, number, removed))
    if doubt:
        yield warn(doubt)
    return at
