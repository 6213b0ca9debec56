# SPDX-License-Identifier: Apache-2.0
"""The configuration of the lab's cluster: small, quick to start, healthy with a copy of everything on each of
its OSDs, three at the most.
"""

from __future__ import annotations

# What looks odd, and why:
# - mgr modules: half of the manager's memory and start-up; an always-on module in the list would be
#   HEALTH_ERR.
# - pg logs, no cache autotune: Debian's Ceph has no tcmalloc, and its OSD grows with them.
# - global id reclaim: false, or the cluster is never HEALTH_OK.
# - mon data avail: the disk of a shared machine may be rather full.
# - osd class dir: Ceph 18 of Debian has it relative to where a daemon is started.
# - heartbeats: an OSD that hangs is found out after 8 s in the place of 20; by OSDs, since all are on one
#   machine.
DAEMONS = """\
[global]
fsid = {fsid}
mon host = [v2:{address}:3300/0,v1:{address}:6789/0]
public addr = {address}
cluster addr = {address}
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
log to stderr = false
mon cluster log file = /dev/null
debug none = 0/0
osd pool default size = {copies}
osd pool default min size = {least}
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon allow pool delete = true
mon warn on pool no redundancy = false
mgr initial modules =
osd heartbeat interval = 1
osd heartbeat grace = 8
[mon]
mon osd reporter subtree level = osd
mon data avail warn = 2
mon data avail crit = 1
mon pg warn min per osd = 0
mon memory target = 268435456
mon osd min in ratio = 0
mon clock drift allowed = 1
paxos propose interval = 0.05
mon mgr beacon grace = 15
[mgr]
mgr disabled modules = {disabled}
mgr tick period = 1
mgr stats period = 2
[osd]
osd objectstore = bluestore
osd class dir = /usr/lib/x86_64-linux-gnu/rados-classes
bluestore block size = {bytes}
bluestore block create = true
bluestore block db create = false
bluestore block wal create = false
bluestore cache autotune = false
bluestore cache size = 67108864
osd memory target = 939524096
osd op num shards = 2
osd op num threads per shard = 1
osd class update on start = false
osd crush initial weight = 1
osd max pg per osd hard ratio = 100
osd min pg log entries = 100
osd max pg log entries = 200
osd pg log dups tracked = 100
osd scrub begin hour = 0
osd scrub end hour = 1
bdev aio max queue depth = 256
osd mclock skip benchmark = true
[mds]
mds beacon interval = 1
mds beacon grace = 5
mds cache memory limit = 67108864
mds reconnect timeout = 5
"""
DISABLED = (
    "restful nfs iostat alerts prometheus dashboard zabbix influx telegraf insights localpool "
    "osd_perf_query osd_support "
    "selftest snap_schedule stats test_orchestrator mirroring mds_autoscaler cephadm rook k8sevents "
    "diskprediction_local feedback hello cli_api"
)
CLIENTS = """\
[global]
fsid = {fsid}
mon host = [v2:{address}:3300/0,v1:{address}:6789/0]
"""


def daemons(fsid: str, address: str, gib: int, osds: int) -> str:
    """Return ceph.conf of the cluster's own node; `gib` is the size of each (sparse) OSD.

    One that is lost of three stops nobody, as on a site: two copies are enough to write.
    """
    copies = min(osds, 3)
    words = {"copies": copies, "least": copies // 2 + copies % 2, "bytes": gib << 30}
    return DAEMONS.format(fsid=fsid, address=address, disabled=DISABLED, **words)


def clients(fsid: str, address: str) -> str:
    """Return ceph.conf of everybody else."""
    return CLIENTS.format(fsid=fsid, address=address)
