# SPDX-License-Identifier: Apache-2.0
"""What is wrong with how a store is mounted, by the options that the kernel says are in force."""

from __future__ import annotations

from typing import Any, Iterator, Mapping

NFS = ("nfs", "nfs4")


def problems(mount: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """Yield (is it broken, what) of a mount as install/preflight.mount_of returns it; docs/how-to/nfs.md says
    why.
    """
    if mount.get("type") not in NFS:
        return
    options: dict[str, str] = {}
    for option in mount["options"]:
        name, _, value = option.partition("=")
        options[name] = value
    version = options.get("vers") or options.get("nfsvers") or ("4" if mount["type"] == "nfs4" else "3")
    if not version.startswith("4"):
        yield (
            True,
            f"NFS version {version}: between its clients QEMU's image locks do not hold; vers=4.2 is wanted",
        )
    local = options.get("local_lock", "none")
    if "nolock" in options or local != "none":
        name = "nolock" if "nolock" in options else f"local_lock={local}"
        yield True, f"mounted with {name}: no other host sees this one's locks"
    for name in ("soft", "softerr"):
        if name in options:
            yield False, f"mounted {name}: guests get I/O errors while the server is away; hard is wanted"
    if "softreval" in options:
        yield False, "mounted with softreval: while the server is away, old answers are taken for true"
    if options.get("lookupcache") not in ("pos", "positive", "none"):
        yield (
            False,
            "mounted without lookupcache=positive: a file that others have just made may seem "
            "absent for 30 s",
        )
