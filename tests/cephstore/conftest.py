# SPDX-License-Identifier: Apache-2.0
"""A cluster for the tests of images, which need no lab; the store's brings up one of its own in a lab."""

from __future__ import annotations

from tools.conftest import ceph, site, world

__all__ = ["ceph", "site", "world"]
