# SPDX-License-Identifier: Apache-2.0
"""A real Ceph cluster on a node of the lab: one monitor, one manager, OSDs on bluestore (one, where it is not
said), cephx.

    with Lab.up(hosts=2, ceph=True) as lab:
        lab.ceph.images()                 # of pool `one`
        with lab.ceph.stopped(): ...      # the whole cluster; data is kept
        before = lab.ceph.bytes_read()

The keys lie where a real site has them: the bridge's on the front-end, CEPH_USER's and the readers' on the
hosts, the admin's on the cluster's own node and nowhere else.
"""

from __future__ import annotations

from lab.ceph.cluster import BRIDGE, POOL, READER, REMOTE, REMOTE_SECRET, SECRET, USER, Cluster

__all__ = ["BRIDGE", "POOL", "READER", "REMOTE", "REMOTE_SECRET", "SECRET", "USER", "Cluster"]
