# SPDX-License-Identifier: Apache-2.0
"""One front-end with two hosts for all tests here, for each kind of file system: they boot once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab import Lab
from lab.kernel_host import Wire
from lab.switch import Switch
from nfs.cephfs import CephSite
from nfs.site import Host, NfsSite, Site


@pytest.fixture(scope="session")
def nfs_site() -> Iterator[NfsSite]:
    wire = Wire()
    with Host("fe", wire, serves=True) as fe, Host("h1", wire) as h1, Host("h2", wire) as h2:
        site = NfsSite(fe, [h1, h2])
        site.prepare()
        yield site


@pytest.fixture(scope="session")
def cephfs_site() -> Iterator[CephSite]:
    with Lab.up(hosts=1, stores=(), ceph=True) as lab:
        switch = Switch(lab)
        with Host("fe", switch) as fe, Host("h1", switch) as h1, Host("h2", switch) as h2:
            site = CephSite(lab.ceph, fe, [h1, h2])
            site.prepare()
            yield site


@pytest.fixture(scope="session", params=["nfs", pytest.param("cephfs", marks=pytest.mark.long)])
def site(request: pytest.FixtureRequest) -> Site:
    """Return the machines with each kind of file system in turn."""
    made: Site = request.getfixturevalue(f"{request.param}_site")
    return made
