# SPDX-License-Identifier: Apache-2.0
"""The names of what lies beside a diff, a local disk of a persistent image (disk/commits.py)."""

from __future__ import annotations

from . import layout


def last(vm_dir: str, disk: int) -> str:
    """Return the manifest of what the last commit has made of the image: the next one leaves out what that has."""
    return f"{layout.records(vm_dir)}/committed.{disk}"
