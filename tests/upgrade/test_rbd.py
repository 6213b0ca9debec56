# SPDX-License-Identifier: Apache-2.0
"""The upgrade with images on a real Ceph cluster."""

from upgrade.scenario import Upgrade


class TestCeph(Upgrade):
    kind = "rbd"
