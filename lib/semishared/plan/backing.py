# SPDX-License-Identifier: Apache-2.0
"""What a disk lies over, in libvirt's words: every file of the chain, with its format, down to the end.

libvirt would find it by itself, in the headers. Whoever makes AppArmor's rules of the XML may not read our
layers (virt-aa-helper's own profile lets it read `disk.N`, not `disk.N.snap/K`): what is not in the XML, QEMU
may not open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Optional, Union

from ..model.network_disk import NetworkDisk
from ..model.record import Record
from ..opennebula.xml_edit import Element, Markup, escape

Chain = Sequence["tuple[Union[str, NetworkDisk], str]"]
"""Path (or, of the last, place on the network) and format of each image below a disk's active layer, the
topmost first.
"""
Chains = Mapping[int, Chain]
"""Those of a VM's disks in qcow2."""
NO_CHAINS: Chains = {}


def chain_of(record: Record, files: object) -> Chain:
    """Return what a disk lies over: what a ReadChain has answered, and below that what its record says."""
    assert isinstance(files, (list, tuple))
    found: list[tuple[Union[str, NetworkDisk], str]] = [(str(path), str(format)) for path, format in files]
    return [*found, (record.over, "raw")] if record.over else found


def backing(chain: Chain) -> str:
    """Return `<backingStore>` for the images of `chain` and nothing below them."""
    layers = ""
    for where, format in chain:
        kind, source = (
            ("file", f"<source file='{escape(where)}'/>")
            if isinstance(where, str)
            else ("network", on_network(where))
        )
        layers += f"<backingStore type='{kind}'><format type='{escape(format)}'/>{source}"
    return f"{layers}<backingStore/>{'</backingStore>' * len(chain)}"


def on_network(network: NetworkDisk) -> str:
    """Return `<source>` of a backing store: without its `<auth>` QEMU would connect as client.admin."""
    return (
        f"<source protocol='{escape(network.protocol)}' "
        f"name='{escape(network.name)}'>{reached(network)}{auth(network)}</source>"
    )


def reached(network: NetworkDisk) -> str:
    """Return where a source on the network is, and which snapshot of it is read."""
    hosts = "".join(
        f"<host name='{escape(name)}'" + (f" port='{escape(port)}'/>" if port else "/>")
        for name, port in network.monitors
    )
    snapshot = f"<snapshot name='{escape(network.snapshot)}'/>" if network.snapshot else ""
    return hosts + snapshot + (f"<config file='{escape(network.conf)}'/>" if network.conf else "")


def auth(network: NetworkDisk) -> str:
    """Return `<auth>`: as whom a source on the network is opened."""
    return (
        f"<auth username='{escape(network.user)}'><secret type='ceph' "
        f"uuid='{escape(network.secret)}'/></auth>"
    )


def _chain_in(disk: Element) -> Optional[list[tuple[str, str]]]:
    """Return the files (of an image on the network: '') that the XML says a disk lies over, None if it does
    not say so down to the end.
    """
    found, here = [], disk.first("backingStore")
    while here is not None and here.children:
        format, source = here.first("format"), here.first("source")
        found.append(
            (
                source.attributes.get("file", "") if source else "",
                format.attributes.get("type", "") if format else "",
            )
        )
        here = here.first("backingStore")
    return None if here is None else found


def lay_over(markup: Markup, disk: Element, source: Element, chain: Chain) -> None:
    """Let a disk lie over the files of `chain`, whatever it lay over."""
    if _chain_in(disk) == list(chain):
        return
    for child in disk.all("backingStore"):
        markup.remove_line(child)
    markup.insert_after(source, backing(chain))
