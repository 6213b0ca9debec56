# SPDX-License-Identifier: Apache-2.0
"""Look after shares: directories for guests, which images of a datastore with DISK_TYPE = FILESYSTEM are.

  init DATASTORE        make SEMISHARED_FS_ROOT the root of the datastore's shares: look whether quotas are
  on, mark it
  list [DATASTORE]      which shares there are, whose, how large and how full
  usage IMAGE           how full one share is, in bytes
  resize IMAGE SIZE     hold a share to another size (20G); OpenNebula goes on counting the size that the
  image was made with
  snapshot create IMAGE NAME, snapshot list IMAGE, snapshot remove IMAGE NAME
                        keep what is in a share (btrfs, CephFS); it goes with the share, and no size counts it
  credentials IMAGE     print a key of Ceph for that share alone and what a client needs besides, which is
  SECRET (CephFS)
  drop DATASTORE IMAGE  remove the share of an image that OpenNebula does not have, WITH ALL IN IT (list says
  which there are)

exit codes: 0 done; 2 it could not be done. Images and datastores are named by their ids.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from typing import Callable, Optional, Sequence

from ..config import load
from ..errors import BadArguments, MissingImage, NotSupported, from_id
from ..front.stores import cloud_of
from ..model.attributes import CLOUD, STORE
from ..model.exchange import T
from ..model.refs import Step
from ..model.share import share
from ..model.share import steps as share_steps
from ..model.share.share import Tree
from ..model.share.steps import GivenKey, ListedShare, ShareSnapshot
from ..model.store import template
from ..named import NamedTuple, to_data
from ..opennebula.args import number
from ..opennebula.oned import Oned
from ..opennebula.xml import Image
from ..plan.care import gc_stores
from ..plan.share.client_keys import SHUT_OUT, checked
from ..plan.share.shares import size_of
from ..units import GiB, MiB, human
from . import command as on
from .command import Row, argument, flag, put_all, put_json, table


class Found(NamedTuple):
    """A share of a datastore, and what is wrong with it ('' for nothing)."""

    share: ListedShare
    datastore: int
    state: str

    def to_data(self) -> Row:
        """Return all of it as JSON data."""
        more = {"bytes": self.share.used, "datastore": self.datastore, "state": self.state}
        return {**to_data(self.share), **more}


def share_state(row: ListedShare, image: Optional[Image], store: int) -> str:
    """Return what is wrong with a share in datastore `store`, '' for nothing; `image`: oned's, of its id."""
    if image is None:
        return "OpenNebula has no such image"
    if not gc_stores.is_of(row, store, image.store_id, image.number("REGTIME")):
        return f"it is of another image {image.id} than OpenNebula has"
    if row.wrong:
        return from_id(*row.wrong).line()
    return "" if row.source else "not ready"


def state_column(row: ListedShare, state: str) -> str:
    """Return the state as a column; for a directory that was there before with its path."""
    return state or (f"ok, is {row.directory}" if row.directory else "ok")


def number_columns(row: ListedShare) -> list[str]:
    """Return owner, size, bytes used and number of snapshots, as columns."""
    used = human(row.used) if row.used >= 0 else "-"
    owner = str(row.owner) if row.owner >= 0 else "-"
    size = human(row.size) if row.size >= 0 and not row.directory else "-"
    return [owner, size, used, str(len(row.snapshots or ()))]


def _lines(image: int, vm: int, one: GivenKey) -> str:
    does = "reads" if one.access == "ro" else "reads and writes"
    revoke = f"semishared share credentials {image}{f' --vm {vm}' if vm >= 0 else ''} --revoke"
    rows = [f"secret: who has this key {does} image {image}, until `{revoke}`"]
    rows += [f"{name} {value}" for name, value in one._asdict().items()]
    options = f"name={one.user},fs={one.fs},secretfile=FILE"
    rows.append(f"mount -t ceph {one.monitors}:{one.path} /mnt -o {options}")
    return "\n".join(rows)


SNAPSHOT_WORDS = {"create": ("IMAGE", "NAME"), "list": ("IMAGE",), "remove": ("IMAGE", "NAME")}


def check_snapshot_words(words: Sequence[str]) -> None:
    """Raise BadArguments unless these are words after `snapshot`."""
    if not words or words[0] not in SNAPSHOT_WORDS:
        raise BadArguments(f"snapshot takes one of {', '.join(SNAPSHOT_WORDS)}")
    if len(words) != len(SNAPSHOT_WORDS[words[0]]) + 1:
        raise BadArguments(f"snapshot {words[0]} takes {' and '.join(SNAPSHOT_WORDS[words[0]])}")


def _where(row: ShareSnapshot) -> str:
    if row.wrong:
        return from_id(*row.wrong).line()
    return row.path + (f", in guests {row.in_guest}" if row.in_guest else "")


def show_snapshots(rows: Sequence[ShareSnapshot]) -> None:
    """Print snapshots as a table."""
    lines = []
    for row in rows:
        made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.made)) if row.made >= 0 else "-"
        lines.append([row.name, made, human(row.alone) if row.alone >= 0 else "-", _where(row)])
    table("NAME|MADE|KEEPS ALONE|WHERE", lines)


WORDS = {
    "init": ("DATASTORE",),
    "list": (),
    "usage": ("IMAGE",),
    "resize": ("IMAGE", "SIZE"),
    "drop": ("DATASTORE", "IMAGE"),
    "snapshot": (),
    "credentials": ("IMAGE",),
}


ARGUMENTS = (
    argument("verb", choices=tuple(WORDS)),
    argument("words", nargs="*", metavar="WORD", help="as above"),
    on.JSON_FOR_LINES,
    *on.consent("drop, snapshot remove"),
    argument("--vm", metavar="ID", help="credentials: of that VM, not an operator's"),
    flag("--readonly", "credentials: an operator's other one, which writes nothing"),
    flag("--revoke", "credentials: take both keys back"),
)


def run(arguments: argparse.Namespace) -> int:
    """Carry out `semishared share`."""
    verb, words = arguments.verb, arguments.words
    if verb == "snapshot":
        check_snapshot_words(words)
    elif len(words) != len(WORDS[verb]) and not (verb == "list" and len(words) == 1):
        raise BadArguments(f"{verb} takes {' and '.join(WORDS[verb]) or 'at most a datastore'}")
    if verb != "credentials" and (arguments.vm or arguments.readonly or arguments.revoke):
        raise BadArguments("--vm, --readonly and --revoke are for credentials")
    if (arguments.yes or arguments.dry_run) and verb != "drop" and words[:1] != ["remove"]:
        raise BadArguments("--yes and --dry-run are for drop and snapshot remove, which remove data")
    oned, may, is_dry = on.administrator(), partial(on.agreed, arguments), arguments.dry_run
    if verb == "list":
        stores = words or [str(one.id) for one in oned.datastores() if template.is_shares(one)]
        found = [row for word in stores for row in listed(oned, Place(oned, word))]
        put_json(to_data({"shares": found})) if arguments.json else show(found)
        return 0
    verbs: dict[str, Callable[..., Row]] = {
        "init": init,
        "usage": usage,
        "resize": resize,
        "snapshot": partial(snapshot, may=may, is_dry=is_dry),
        "drop": partial(drop, may=may, is_dry=is_dry),
        "credentials": partial(
            credentials, of_vm=arguments.vm, readonly=arguments.readonly, revoke=arguments.revoke
        ),
    }
    answer = verbs[verb](oned, *words)
    if arguments.json:
        put_json(to_data(answer))
    elif "snapshots" in answer:
        show_snapshots(answer["snapshots"])
    else:
        put_all(str(answer["said"]))
    return 0


class Place:
    """A datastore of shares, and the machine that makes them; raise BadArguments for another datastore."""

    def __init__(self, oned: Oned, word: str) -> None:
        self.datastore = on.known(oned.datastore, number(word, "datastore"), "datastore")
        if not template.is_shares(self.datastore):
            raise BadArguments(
                f"datastore {self.datastore.id} has no shares: its DISK_TYPE is not FILESYSTEM"
            )

    @property
    def tree(self) -> Tree:
        return share.tree(self.datastore)

    def ask(self, step: Step[T]) -> T:
        return on.ask(share.bridge(self.datastore), "share", load(), step)


def _of_image(oned: Oned, word: str) -> tuple[Place, int]:
    image = number(word, "image")
    return Place(oned, str(on.known(oned.image, image, "image").store_id)), image


def init(oned: Oned, word: str) -> Row:
    """Make a directory the root of a datastore's shares, and note that in the datastore."""
    place = Place(oned, word)
    if not CLOUD.text(place.datastore):
        # Before the root names it: if this is killed in between, the root is found to be this cloud's.
        oned.update_datastore(place.datastore.id, CLOUD.line(cloud_of(oned.datastores())))
        place = Place(oned, word)
    tree, number_of = place.tree, place.datastore.id
    marker = place.ask(share_steps.MarkRoot(tree, os.urandom(16).hex())).marker
    others = [one for one in oned.datastores() if one.id != number_of and STORE.text(one) == marker]
    if others:
        raise BadArguments(f"{tree.root} belongs to datastore {others[0].id} ({others[0].name})")
    if not tree.marker:
        oned.update_datastore(number_of, STORE.line(marker))
    said = f"{tree.root} is the root of the shares of datastore {number_of} ({tree.fs})"
    return {"datastore": number_of, "root": tree.root, "marker": marker, "said": said}


def listed(oned: Oned, place: Place) -> list[Found]:
    """Return the shares of a datastore."""
    shares, store = place.ask(share_steps.ListShares(place.tree)).shares, place.datastore.id
    # oned knows an image before its share is made: asked after the shares, it knows all of them.
    images = {image.id: image for image in oned.images()}
    return [Found(row, store, share_state(row, images.get(row.image), store)) for row in shares]


def show(rows: list[Found]) -> None:
    """Print shares as a table."""
    table(
        "IMAGE|DATASTORE|OWNER|SIZE|USED|SNAPSHOTS|STATE",
        [
            [str(row.image), str(store), *number_columns(row), state_column(row, state)]
            for row, store, state in rows
        ],
    )


def usage(oned: Oned, word: str) -> Row:
    """Say how full a share is, and whether its size limits it; raise what keeps that from being found out."""
    place, image = _of_image(oned, word)
    row = next((found.share for found in listed(oned, place) if found.share.image == image), None)
    if row is None:
        raise MissingImage(f"image {image} has no share in datastore {place.datastore.id}")
    wrong = row.wrong
    if wrong and row.used < 0:
        raise from_id(*wrong)
    if row.directory:
        raise NotSupported(
            f"image {word} is {row.directory}, which was there before: nobody counts what is in it"
        )
    said = f"{_used(row)} of {human(row.size)}"
    answer = {"image": image, "bytes": row.used, "used": row.used, "size": row.size, "said": said}
    return {**answer, "wrong": wrong, "said": f"{said}; {wrong.detail}"} if wrong else answer


def _used(row: ListedShare) -> str:
    return human(row.used) if row.used >= 0 else "nobody knows how much"


def resize(oned: Oned, word: str, size: str) -> Row:
    """Hold a share to another size."""
    place, image = _of_image(oned, word)
    wanted = size_of(size, load().images_max_virtual_size_gib * GiB, "SIZE")
    before = place.ask(share_steps.ResizeShare(place.tree, image, wanted)).before
    quota = f"counting {oned.image(image).size // MiB} MiB against the quota of its owner"
    said = f"{human(before)} -> {human(wanted)}; OpenNebula goes on {quota}"
    return {"image": image, "before": before, "size": wanted, "said": said}


Agreed = Callable[[list[str]], bool]


def snapshot(oned: Oned, *words: str, may: Agreed, is_dry: bool) -> Row:
    """Carry out `words`, which are checked, on a share's snapshots."""
    place, image = _of_image(oned, words[1])
    if words[0] == "create":
        made = place.ask(share_steps.MakeSnapshot(place.tree, image, words[2]))
        said = f"snapshot {made.name} of the share of image {image}: {_where(made)}"
        return {"image": image, "snapshot": made, "said": said}
    if words[0] == "remove":
        what = f"snapshot {words[2]} of the share of image {image}"
        if is_dry or not may([f"{what} would be removed"]):
            return {"image": image, "said": f"{what} {'would be' if is_dry else 'is not'} removed"}
        place.ask(share_steps.RemoveSnapshot(place.tree, image, words[2]))
        return {"image": image, "said": f"{what} is gone"}
    return {"image": image, "snapshots": place.ask(share_steps.ListSnapshots(place.tree, image)).snapshots}


def credentials(oned: Oned, word: str, of_vm: Optional[str], *, readonly: bool, revoke: bool) -> Row:
    """Return the operator's key, made if need be, or the key of a VM; raise MissingImage if it has none.

    With `revoke` take it back; of the operator both keys, for writing and for reading. What the command
    prints of it is secret.
    """
    place, image = _of_image(oned, word)
    vm = -1 if of_vm is None else number(of_vm, "VM")
    if revoke:
        taken = place.ask(share_steps.TakeKeys(place.tree, image, vm)).taken
        whose = "the operator's key" if vm < 0 else f"the key of VM {vm}"
        out = f"mounts nothing any more, and who has the share itself mounted by it is shut out; {SHUT_OUT}"
        said = f"{whose} for image {image} {out if taken else 'is not there'}"
        return {"image": image, "taken": taken, "said": said}
    where = place.tree, image, oned.image(image).source
    give = share_steps.GiveKey(*where, vm, readonly) if vm < 0 else share_steps.ShowKey(*where, vm)
    given = checked(place.ask(give))
    return {"image": image, "credentials": given, "said": _lines(image, vm, given)}


def drop(oned: Oned, word: str, image: str, *, may: Agreed, is_dry: bool) -> Row:
    """Remove the share of an image that oned does not have, if `may` agrees to the named directories."""
    place, wanted = Place(oned, word), number(image, "image")
    tree, store = place.tree, place.datastore.id
    found = place.ask(share_steps.ListShares(tree))
    if not found.cloud:
        mend = f"if of this, `semishared share init {store}`"
        raise BadArguments(f"{tree.root} does not say of which OpenNebula it is: {mend}")
    row = next((row for row in found.shares if row.image == wanted), None)
    if row is None:
        raise MissingImage(f"datastore {store} has no share of image {wanted}")
    having = next((one for one in oned.images() if one.id == wanted), None)
    if having and gc_stores.is_of(row, store, having.store_id, having.number("REGTIME")):
        raise BadArguments(f"OpenNebula has image {wanted}: oneimage delete removes its share")
    what = f"the share of image {wanted} in {tree.root}, with all in it ({_used(row)}),"
    if is_dry or not may([f"{what} would be removed"]):
        return {"image": wanted, "said": f"{what} {'would be' if is_dry else 'is not'} removed"}
    place.ask(share_steps.RemoveShare(tree, wanted, ""))
    return {"image": wanted, "said": f"the share of image {wanted} is gone"}
