# SPDX-License-Identifier: Apache-2.0
"""The upgrade with images on a mounted store."""

from upgrade.scenario import Upgrade


class TestMountedStore(Upgrade):
    kind = "dir"
