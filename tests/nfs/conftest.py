# SPDX-License-Identifier: Apache-2.0
"""One front-end with two hosts for all tests here: they boot once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab.kernel_host import Wire
from nfs.site import Host, Site


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    wire = Wire()
    with Host("fe", wire) as fe, Host("h1", wire) as h1, Host("h2", wire) as h2:
        site = Site(fe, [h1, h2])
        site.prepare()
        yield site
