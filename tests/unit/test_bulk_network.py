# SPDX-License-Identifier: Apache-2.0
"""Where hosts take bulk data, of the addresses that they tell: any words."""

from __future__ import annotations

import ipaddress
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semishared.config import Config
from semishared.front import bulk_network as front
from semishared.model import bulk_network
from semishared.opennebula.xml import Host
from semishared.plan.care.diagnosis import of_bulk
from semishared.tools import this_machine

BULK = "10.20.0.0/16"


def host(name: str, addresses: str) -> Host:
    told = f"<TEMPLATE><SEMISHARED><ADDRESSES>{addresses}</ADDRESSES></SEMISHARED></TEMPLATE>"
    return Host(ElementTree.fromstring(f"<HOST><NAME>{name}</NAME>{told}</HOST>"))


HOSTS = [
    host("h1", "10.0.0.1 10.20.0.1 10.20.0.9 fd00::1"),
    host("h2", "10.20.0.2"),
    host("h3", "10.0.0.3 10.200.0.3 -oProxyCommand=x 10.20.0.4%eth0 10.20.0"),
    host("h4", ""),
]


def test_a_host_has_the_first_address_that_it_tells_within_the_network() -> None:
    assert front.addresses_of(Config(network_bulk=BULK), HOSTS) == {"h1": "10.20.0.1", "h2": "10.20.0.2"}
    assert front.addresses_of(Config(network_bulk="fd00::/16"), HOSTS) == {"h1": "fd00::1"}


def test_an_address_that_two_hosts_tell_leads_to_neither() -> None:
    """A floating one, a bridge's that each host has, or a host that lies."""
    told = [*HOSTS, host("h5", "10.20.0.1 10.20.0.2")]
    assert front.addresses_of(Config(network_bulk=BULK), told) == {"h1": "10.20.0.9"}


def test_doctor_names_the_hosts_that_have_none_and_why() -> None:
    found = of_bulk([*HOSTS, host("h5", "10.20.0.2")], BULK)
    assert [item.machine for item in found] == ["h2", "h3", "h4", "h5"]
    assert "its address 10.20.0.2 is one of h5 too" in found[0].what
    assert f"its monitoring has told no address in {BULK}" in found[1].what
    assert of_bulk(HOSTS, "") == of_bulk(HOSTS[:2], BULK) == []


def test_a_bridge_is_the_host_that_it_is_under_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"h1": "10.20.0.1", "h2": "10.20.0.2"}
    monkeypatch.setattr(this_machine, "are_one", lambda name, other: other == f"{name}.site.example")
    assert front.of("h2", addresses) == front.of("h2.site.example", addresses) == "10.20.0.2"
    assert front.of("h2.other.example", addresses) == ""


IPV4 = st.ip_addresses(v=4)
EITHER = st.ip_addresses() | IPV4


@given(EITHER, st.integers(0, 128), st.lists(EITHER))
def test_networks_are_those_of_the_standard_library(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
    length: int,
    others: list[ipaddress.IPv4Address | ipaddress.IPv6Address],
) -> None:
    bulk = f"{address}/{length}"
    assert bulk_network.is_network(bulk) == (length <= address.max_prefixlen)
    if length <= address.max_prefixlen:
        network = ipaddress.ip_network(bulk, strict=False)
        expected = [str(one) for one in others if one.version == network.version and one in network]
        assert bulk_network.within(bulk, map(str, others)) == expected


@given(st.text())
def test_no_text_of_a_host_is_a_traceback(text: str) -> None:
    bulk_network.is_network(text)
    assert bulk_network.within("0.0.0.0/0", [text]) in ([], [text])
