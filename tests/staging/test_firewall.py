# SPDX-License-Identifier: Apache-2.0
"""The firewall of docs/how-to/before-you-install.md on all hosts: what it lets in is enough for our work."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import Node
from lab.cloud import SYSTEM
from staging.test_stage import DATA, check, summary
from staging.world import Staging

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/before-you-install.md"
NETWORK = "10.0.0.0/24"


def nft(node: Node, text: str) -> str:
    words = ["nsenter", "-t", str(node.pid), "-n", "--", "nft", "-f", "-"]
    return subprocess.run(words, input=text, text=True, check=True, capture_output=True).stdout


def rules(network: str) -> str:
    """Return the page's lines for the lab's network."""
    (block,) = re.findall(r"```nft\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block.count(NETWORK) == 2
    return str(block.replace(NETWORK, network))


@pytest.fixture
def behind(staging: Staging) -> Iterator[str]:
    """Put all hosts behind the page's firewall; return its lines."""
    text = rules(f"{staging.lab.fe.ip.rpartition('.')[0]}.0/24")
    for host in staging.lab.hosts:
        nft(host, text)
    yield text
    for host in staging.lab.hosts:
        nft(host, "delete table inet semishared\n")


def test_what_the_firewall_of_the_page_lets_in_is_enough(staging: Staging, behind: str) -> None:
    image = staging.image("walled")
    found = summary(staging.command("stage", str(image), "--hosts", "h1,h2,h3", "--transport", "multicast"))
    assert found["complete"] and found["transports"] == ["multicast"], found
    assert found["bytes"]["stream"] >= 2 * DATA and not found["bytes"]["peers"]
    staging.cloud.terminate(staging.deploy("walled", image, "h4"))
    check(staging, image, "h1 h2 h3 h4")
    cloud = staging.cloud
    own = {"TYPE": "fs", "SIZE": "32", "FORMAT": "qcow2"}
    vm = cloud.deploy("walled-move", [{"IMAGE_ID": str(cloud.os_image("walled-os"))}, own], "h1")
    cloud.guest(vm).write("vdb", "own", 0, 8 << 10)
    cloud.oned.vm_migrate(vm, "h2", SYSTEM, how="live")
    cloud.guest(vm).check("vdb", "own", 0, 8 << 10)
    cloud.terminate(vm)


def test_without_its_line_for_multicast_none_arrives(staging: Staging, behind: str) -> None:
    """So the firewall is one: what the page leaves out is kept out."""
    image = staging.image("closed")
    closed = "\n".join(line for line in behind.splitlines() if "udp" not in line)
    for host in staging.lab.hosts:
        nft(host, f"delete table inet semishared\n{closed}\n")
    found = summary(staging.command("stage", str(image), "--hosts", "h1,h2,h3", "--transport", "multicast"))
    assert found["complete"] and not found["bytes"]["stream"], found
