# SPDX-License-Identifier: Apache-2.0
"""The context ISO: volume CONTEXT with context.sh and the files the VM template names."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from contextlib import contextmanager
from typing import Iterator

from ..errors import BadArguments, MissingImage, ToolMissing
from .run import PATH, run

TOOLS = (["genisoimage"], ["mkisofs"], ["xorriso", "-as", "mkisofs"])
NAME = re.compile(r"[^/\x00-\x1f]{1,200}\Z")
URL = re.compile(r"https?://[A-Za-z0-9._~:/?#@&+,=%\-]+\Z")


def _split(argument: str) -> tuple[str, str]:
    """Return path and name in the ISO of a `path[:name]` argument; raise BadArguments."""
    if "://" in argument:
        if not URL.match(argument):
            raise BadArguments(f"not a URL that can be fetched: {argument!r}")
        return argument, os.path.basename(argument.split("?")[0]) or "file"
    path, colon, name = argument.partition(":")
    name = name.strip("'") if colon else os.path.basename(path)
    if not path.startswith("/") or not NAME.match(name) or name in (".", ".."):
        raise BadArguments(f"not a file for the context: {argument!r}")
    return path, name


@contextmanager
def built(files: tuple[str, ...], more: bytes = b"") -> Iterator[str]:
    """Yield the path of an ISO with `files`, removed when the block ends; `more` is added to context.sh, and secret."""
    pairs = [_split(argument) for argument in files]
    for tool in TOOLS:
        if shutil.which(tool[0], path=f"{os.environ.get('PATH', '')}:{PATH}"):
            break
    else:
        raise ToolMissing("none of genisoimage, mkisofs, xorriso is installed on the front-end")
    with tempfile.TemporaryDirectory(prefix="semishared-context-") as directory:
        content = f"{directory}/content"
        os.mkdir(content)
        for path, name in pairs:
            if "://" in path:
                run(["curl", "-sSfL", "--proto", "=http,https", "-o", f"{content}/{name}", "--", path])
                continue
            try:
                if os.path.isdir(path):
                    shutil.copytree(path, f"{content}/{name}", dirs_exist_ok=True)
                else:
                    shutil.copyfile(path, f"{content}/{name}")
            except OSError as e:
                raise MissingImage(f"context file {path}: {e.strerror}") from None
        if more:
            with open(f"{content}/context.sh", "ab") as file:
                # In the guest too: Rock Ridge has modes.
                os.fchmod(file.fileno(), 0o600)
                file.write(more)
        iso = f"{directory}/context.iso"
        run([*tool, "-quiet", "-o", iso, "-V", "CONTEXT", "-J", "-R", content])
        yield iso
