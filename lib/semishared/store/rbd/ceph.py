# SPDX-License-Identifier: Apache-2.0
"""Connections to Ceph: as a named user, with a time limit on every call, and with errors of semishared.

Keys come from the keyring that the user's Ceph configuration names on this machine; no key is ever an
argument.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from typing import Any, ContextManager, Iterator

from ...errors import (
    CephRefused,
    CephUnavailable,
    ImageInUse,
    MissingImage,
    NoSpace,
    SemisharedError,
    ToolFailed,
    ToolMissing,
)
from ...model.steps import Access, ImageRef, pool_and_name
from ...named import NamedTuple
from ...tools import progress, this_machine

CONNECT_S = 10
ANSWER_S = 30
"""Seconds for one operation. A full pool, or an OSD that is down, never answers."""
LIMITS = {
    "client_mount_timeout": CONNECT_S,
    "rados_mon_op_timeout": ANSWER_S,
    "rados_osd_op_timeout": ANSWER_S,
}
_clusters: dict[tuple[str, str], Any] = {}


class Pool(NamedTuple):
    """A pool, opened as one user."""

    access: Access
    name: str
    user: str
    ioctx: Any

    @property
    def rbd(self) -> Any:
        return _bindings()[1].RBD()


def long() -> ContextManager[None]:
    """Return a context for a call that processes a whole image; each request still has a limit (LIMITS)."""
    return progress.waiting()


def _bindings() -> Any:
    this_machine.reach_bindings()
    try:
        import rados
        import rbd
    except ImportError as e:
        raise ToolMissing(
            f"{e.name} (python3-rados, python3-rbd) is not installed on {os.uname().nodename}"
        ) from None
    return rados, rbd


@contextmanager
def understood(what: str, user: str) -> Iterator[None]:
    """Turn Ceph's errors within the block into errors that name the operation, the user and this machine."""
    rados, rbd = _bindings()
    try:
        yield
    except (rados.Error, rbd.Error) as e:
        raise _translated(e, f"{what} as client.{user} on {os.uname().nodename}", rbd) from None


def _translated(e: Any, what: str, rbd: Any) -> SemisharedError:
    number = abs(getattr(e, "errno", 0) or 0)
    said = str(e)
    if isinstance(e, rbd.ImageNotFound):
        return MissingImage(f"{what}: it is not there")
    if number in (errno.ETIMEDOUT, errno.EAGAIN, errno.ESHUTDOWN, errno.ENOTCONN):
        return CephUnavailable(f"{what}: no answer within {ANSWER_S} s: {said}")
    if number in (errno.EPERM, errno.EACCES):
        return CephRefused(f"{what}: {said}")
    if number in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(f"{what}: {said}")
    if number == errno.EBUSY:
        return ImageInUse(f"{what}: {said}")
    return ToolFailed(f"{what}: {said}")


def cluster(access: Access, user: str) -> Any:
    """Return this process's connection as `user`; raise CephUnavailable, CephRefused, ToolMissing."""
    key = (access.conf, user)
    if key not in _clusters:
        _clusters[key] = _connected(access.conf, user)
    return _clusters[key]


def _connected(conf: str, user: str) -> Any:
    rados, _ = _bindings()
    where = f"on {os.uname().nodename}"
    name = conf or "/etc/ceph/ceph.conf"
    try:
        # '' makes Ceph search its default places.
        found = rados.Rados(rados_id=user, conffile=conf)
    except rados.Error as e:
        raise CephUnavailable(f"{name} {where}: {e}") from None
    for option, seconds in LIMITS.items():
        found.conf_set(option, str(seconds))
    try:
        found.connect(timeout=CONNECT_S)
    except rados.ObjectNotFound:
        raise CephRefused(f"client.{user} has no key in the keyrings that {name} names {where}") from None
    except rados.PermissionDeniedError:
        raise CephRefused(f"the monitors do not accept the key of client.{user} {where}") from None
    except rados.Error as e:
        if abs(getattr(e, "errno", 0) or 0) in (errno.EACCES, errno.EPERM):
            raise CephRefused(f"the monitors do not accept the key of client.{user} {where}: {e}") from None
        raise CephUnavailable(
            f"no monitor of {name} answers client.{user} {where} within {CONNECT_S} s: {e}"
        ) from None
    return found


def pool(access: Access, user: str, name: str) -> Pool:
    """Return pool `name`, opened as `user`; raise as `cluster`, MissingImage if there is no such pool."""
    rados, _ = _bindings()
    connected = cluster(access, user)
    try:
        return Pool(access, name, user, connected.open_ioctx(name))
    except rados.ObjectNotFound:
        raise MissingImage(f"pool {name} is not there, or client.{user} may not see it") from None


def pool_of(image: ImageRef, user: str) -> tuple[Pool, str]:
    """Return the pool of an image and the image's name in it."""
    name, image_name = pool_and_name(image.source)
    return pool(image.access, user, name), image_name


def bridged(image: ImageRef) -> tuple[Pool, str]:
    """Return pool and name of an image, opened as the bridge's user, which may change images."""
    return pool_of(image, image.access.bridge_user)


@contextmanager
def opened(where: Pool, name: str, *, snapshot: int | None = None, read_only: bool = False) -> Iterator[Any]:
    """Open an image, or its snapshot of that id; raise MissingImage, CephUnavailable, CephRefused."""
    _, rbd = _bindings()
    with (
        understood(f"image {where.name}/{name}", where.user),
        rbd.Image(where.ioctx, name, read_only=read_only) as image,
    ):
        if snapshot is not None:
            image.set_snap_by_id(snapshot)
        yield image
    progress.touch()
