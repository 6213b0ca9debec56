# SPDX-License-Identifier: Apache-2.0
"""CephFS on the lab's cluster, mounted by ceph-fuse on each node by itself: a shared file system with its
real locks.

A bind mount, which the lab's stores usually are, is one file system of one kernel, and hides what locks and
caches do between machines.
"""

from __future__ import annotations

import os
from typing import Sequence

from lab.ceph.cluster import Cluster
from lab.node import Node

NAME = "semishared"
USER = "semishared-fs"
# Without them ceph-fuse (16.2) goes on serving what it has cached of a file after a direct write through the
# same mount, and QEMU writes directly. And as a daemon it has a pipe of FUSE's in the place of its stderr: an
# error that it tells there stands in the way of all requests for ever. docs/reference/support.md.
OPTIONS = ("--client_oc=false", "--fuse_disable_pagecache=true", "--err_to_stderr=false")


def create(cluster: Cluster) -> None:
    """Make the file system, start its metadata server and wait until it serves."""
    cluster.ask(
        ["command", ["osd pool create"], {"pool": f"{NAME}.meta", "pg_num": 8, "pgp_num": 8}],
        ["command", ["osd pool create"], {"pool": f"{NAME}.data", "pg_num": 8, "pgp_num": 8}],
        ["command", ["fs new"], {"fs_name": NAME, "metadata": f"{NAME}.meta", "data": f"{NAME}.data"}],
        # Whoever opens a file of a dead client waits as long as this; 30 s is the least there is.
        ["command", ["fs set"], {"fs_name": NAME, "var": "session_timeout", "val": "30"}],
    )
    cluster.start("mds")
    cluster.ask(["wait", ["mds"], {}])


def make_key(cluster: Cluster) -> str:
    """Make the user that may read and write this file system, and return its key."""
    caps = [
        "mon",
        f"allow r fsname={NAME}",
        "mds",
        f"allow rw fsname={NAME}",
        "osd",
        f"allow rw tag cephfs data={NAME}",
    ]
    made = cluster.ask(["command", ["auth get-or-create"], {"entity": f"client.{USER}", "caps": caps}])[0]
    return str(made[0]["key"])


def mount(node: Node, path: str) -> None:
    """Mount the file system on a node."""
    node.run(["mkdir", "-p", path], user="root")
    node.run(["ceph-fuse", "--id", USER, "--client_fs", NAME, *OPTIONS, path], user="root", cwd="/")


def serve(cluster: Cluster, nodes: Sequence[Node], path: str) -> None:
    """Make the file system and mount it on all `nodes` at `path`, writable by oneadmin."""
    create(cluster)
    key = make_key(cluster)
    for node in nodes:
        cluster.give_key(node, USER, key)
        mount(node, path)
    uid = nodes[0].uid_of("oneadmin")
    os.chown(nodes[0].path(path), uid, uid)


def fence(cluster: Cluster, node: Node) -> None:
    """Shut a node's client out, as the admin of a cloud does with a host that is known dead: its locks are
    free at once.
    """
    for client in cluster.mds("session ls"):
        if client["client_metadata"]["hostname"] == node.name:
            cluster.mds("session evict", id=client["id"])
