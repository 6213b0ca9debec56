# SPDX-License-Identifier: Apache-2.0
"""The part of the vocabulary that the front-end carries out itself, in the process of a datastore action (exchange.Here).

A mounted store is a directory here as everywhere; uploads are read, checked and converted here whatever the store is.
"""

from __future__ import annotations

from typing import NamedTuple

from .refs import ImageRef


class CheckMarker(NamedTuple):
    """Fail unless `directory` holds the store with the id `marker`; '' is one that was never marked."""

    directory: str
    marker: str


class MeasureSource(NamedTuple):
    """Return the size in bytes that the image at the action's PATH will have; its content stays where it is."""

    path: str


class StoreUpload(NamedTuple):
    """Publish in `directory` what is at the action's PATH; return its path and its format."""

    path: str
    directory: str


class SendUpload(NamedTuple):
    """Have what is at the action's PATH published by `bridge` as `image`, by way of `directory`."""

    path: str
    directory: str
    image: ImageRef
    bridge: str


class MakeFile(NamedTuple):
    """Publish an empty image in `directory`, with a file system unless `fs` is ''; return its path."""

    directory: str
    format: str
    size: int
    fs: str


class CopyStoredFile(NamedTuple):
    """Publish a copy of the image `path` of another store in `directory`; return its path."""

    path: str
    directory: str
    format: str


class RemoveStored(NamedTuple):
    """Remove the image `path` with all that is beside it."""

    path: str


class DropSnapshot(NamedTuple):
    """Remove a snapshot beside the image `path`."""

    path: str
    format: str
    snapshot: int


class RevertStored(NamedTuple):
    """Make a snapshot beside the image `path` its content, of at least `min_size` bytes."""

    path: str
    format: str
    snapshot: int
    min_size: int


class FlattenStored(NamedTuple):
    """Do that, and remove all snapshots."""

    path: str
    format: str
    snapshot: int
    min_size: int


class DigestStored(NamedTuple):
    """Return the hex digest (`kind` as hashlib names it) of the image `path`."""

    path: str
    format: str
    kind: str


class MakeStore(NamedTuple):
    """Make the directory of a store that nobody has marked."""

    directory: str


class MeasureStore(NamedTuple):
    """Return bytes used, in total and free of the file system of a store."""

    directory: str


LOOKS = frozenset({"CheckMarker", "DigestStored", "MeasureSource", "MeasureStore"})
"""Those that change nothing."""
