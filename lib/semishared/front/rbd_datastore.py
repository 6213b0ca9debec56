# SPDX-License-Identifier: Apache-2.0
"""Uploads to stores that are reached over the network.

They are read, checked and converted on the front-end, in BASE_PATH; to the bridge go extents, which it writes straight
into the new image. Nothing of an image is ever staged on the bridge.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..model import steps_image as i
from ..store import dir_upload
from ..tools import extents
from ..units import human
from .datastore import bring, judge

if TYPE_CHECKING:
    from ..model.steps_front import SendUpload
    from .datastore import Request


def send_upload(request: Request, step: SendUpload) -> None:
    """Bring the image at PATH into the pool."""
    source, image = request.source, step.image
    if source.is_url:
        request.check_allowed_url(source)
    # No store: where the front-end works on uploads, which nobody else has made.
    os.makedirs(step.directory, exist_ok=True)
    with dir_upload.uploading(step.directory) as up:
        kept = bring(request, source, up)
        found = judge(request, source, kept)
        sent = _send(request, dir_upload.convert(kept.path, found, image.format, up), step)
    request.report.info(f"{source.path} stored as {image.source} ({human(sent)} of data)")


def _send(request: Request, path: str, step: SendUpload) -> int:
    """Have the raw file `path` published as an image; return the bytes that crossed."""
    from ..wire.session import Session

    sent = 0
    with open(path, "rb") as file, Session(step.bridge, "cp", request.config, bulk=True) as session:
        size = os.fstat(file.fileno()).st_size
        made = extents.Copy(None, size)
        session.begin([i.ReceiveImage(step.image, size)])
        for index, content in extents.data(file.fileno(), size):
            if extents.is_zero(content):
                continue
            made.add(index, content)
            session.send(extent=index)
            session.send_data(content)
            sent += len(content)
        session.send(end=True, sha256=made.manifest(step.image.format).generation)
        session.finish()
    return sent
