# SPDX-License-Identifier: Apache-2.0
"""What a disk lies over, in libvirt's words: every file of the chain, with its format, down to the end.

libvirt would find it by itself, in the headers. Whoever makes AppArmor's rules of the XML may not read our layers
(virt-aa-helper's own profile lets it read `disk.N`, not `disk.N.snap/K`): what is not in the XML, QEMU may not open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Optional

from ..opennebula.xml_edit import Element, Markup, escape

Chain = Sequence["tuple[str, str]"]
"""Path and format of each file below a disk's active layer, the topmost first."""
Chains = Mapping[int, Chain]
"""Those of a VM's disks in qcow2."""
NO_CHAINS: Chains = {}


def backing(chain: Chain) -> str:
    """Return `<backingStore>` for the files of `chain` and nothing below them."""
    end = "</backingStore>" * len(chain)
    layers = "".join(
        f"<backingStore type='file'><format type='{escape(format)}'/><source file='{escape(path)}'/>" for path, format in chain
    )
    return f"{layers}<backingStore/>{end}"


def _chain_in(disk: Element) -> Optional[list[tuple[str, str]]]:
    """Return the files that the XML says a disk lies over, None if it does not say so down to the end."""
    found, here = [], disk.first("backingStore")
    while here is not None and here.children:
        format, source = here.first("format"), here.first("source")
        found.append((source.attributes.get("file", "") if source else "", format.attributes.get("type", "") if format else ""))
        here = here.first("backingStore")
    return None if here is None else found


def lay_over(markup: Markup, disk: Element, source: Element, chain: Chain) -> None:
    """Let a disk lie over the files of `chain`, whatever it lay over."""
    if _chain_in(disk) == list(chain):
        return
    for child in disk.all("backingStore"):
        markup.remove_line(child)
    markup.insert_after(source, backing(chain))
