# SPDX-License-Identifier: Apache-2.0
"""Where hosts take bulk data (model/bulk_network.py), as oned knows their addresses."""

from __future__ import annotations

from functools import cache
from typing import Dict, Sequence

from ..config import Config
from ..errors import OnedUnavailable
from ..model import bulk_network
from ..opennebula.oned import Oned
from ..opennebula.xml import Host
from ..tools import this_machine


def addresses(config: Config) -> Dict[str, str]:
    """Return by name where each of oned's hosts takes bulk data; {} if oned cannot be asked.

    The usual way is by a host's name: an action that would go on without oned takes that.
    """
    try:
        return addresses_of(config, Oned().hosts())
    except OnedUnavailable:
        return {}


def addresses_of(config: Config, hosts: Sequence[Host]) -> Dict[str, str]:
    """Return by name where each of these hosts takes bulk data; one without an address there is left out."""
    return bulk_network.chosen(config.network_bulk, {host.name: host.told_addresses for host in hosts})


def of(machine: str, addresses: Dict[str, str]) -> str:
    """Return where a machine takes bulk data, of those of oned's hosts, '' if it is none of these.

    A bridge may have another name than the host that it is.
    """
    if machine in addresses:
        return addresses[machine]
    return next((address for name, address in addresses.items() if this_machine.are_one(name, machine)), "")


@cache
def is_in(config: Config) -> bool:
    """Tell whether this machine has an address in the network for bulk data."""
    return bool(bulk_network.within(config.network_bulk, this_machine.addresses()))
