# SPDX-License-Identifier: Apache-2.0
"""Commands of the pages for operators, run in one lab (commands.md): each ends well, and says something."""

from __future__ import annotations

import re
import shlex
from typing import Iterator

import pytest

import pages
from lab.cloud import Cloud
from lab.one_cli import Cli
from lab.systemd import Systemd
from operate.test_status import COMMAND

HERE = "docs/test_commands.py"
QUIET = ("install", "jq", "onehost", "onevm")
"""Programs that say nothing where all is well."""
NAME = "opennebula-node-exporter"


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    with Cloud.up(hosts=2, forks=True) as up:
        yield up
        up.delete_all()


def run(cloud: Cloud, how: str) -> str:
    """Run a command of the table; return what it printed."""
    place, _, rest = how.partition(": ")
    where, line = (place, rest) if place in ("root", "h1") else ("", how)
    node = cloud.lab.node("h1" if where == "h1" else "fe")
    words, cli = shlex.split(line), Cli(cloud.lab, cloud.oned)
    if cli.knows(words):
        return cli.run(words)
    words[0] = COMMAND if words[0] == "semishared" else words[0]
    done = node.run(words, user="root" if where else "oneadmin", check=False, timeout=120)
    assert done.returncode == 0, (how, done.stdout, done.stderr)
    return done.stdout.decode()


@pytest.mark.fault(82, "each command of the pages for operators runs in a test")
def test_commands_run(cloud: Cloud) -> None:
    image = cloud.data_image("commands", b"commands" * 512)
    local = cloud.data_image("mine", b"mine" * 1024, persistent=True, SEMISHARED_PLACE="local")
    vm = cloud.deploy("commands", [{"IMAGE_ID": str(number)} for number in (image, local)])
    rows = [row for row in pages.runs() if (row.file, row.test) == (HERE, "test_commands_run")]
    for row in sorted(rows, key=lambda row: not row.command.startswith("install ")):
        how = row.how.strip("`").format(vm=vm, image=image)
        said = run(cloud, how)
        assert said or shlex.split(how.removeprefix("root: "))[0] in QUIET or "--output" in how, how
    metrics = cloud.lab.fe.path("/var/lib/semishared-metrics/semishared.prom").read_text()
    assert "semishared_build_info{" in metrics
    cloud.terminate(vm)


@pytest.mark.fault(82, "what a page says of a unit of others is understood by systemd")
def test_node_exporter_gets_our_directory(cloud: Cloud) -> None:
    """Units are stand-ins. That of OpenNebula's has the page's lines in the place of its command."""
    page = (pages.DOCS / "how-to/metrics.md").read_text()
    found = re.search(rf"systemctl edit {NAME}\n\n((?:    .*\n)+)\n    (systemctl restart {NAME})\n", page)
    assert found
    lines = "".join(f"{line.strip()}\n" for line in found[1].splitlines())
    with Systemd(cloud.lab.fe) as systemd:
        systemd.put(f"{NAME}.service", "[Service]\nExecStart=/usr/bin/node_exporter --log.level=warn\n")
        systemd.edit(f"{NAME}.service", lines)
        systemd.run(*found[2].split())
        started = systemd.shown(f"{NAME}.service", "ExecStart")
        systemd.put("libvirtd.service", "[Service]\nExecStart=/bin/sleep infinity\n")
        systemd.run("systemctl", "restart", "libvirtd")
        assert systemd.shown("libvirtd.service", "ActiveState") == "active"
    directory = "/var/lib/semishared-metrics"
    assert f"argv[]=/usr/bin/node_exporter --collector.textfile.directory={directory} ;" in started, started
