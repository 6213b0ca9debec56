# SPDX-License-Identifier: Apache-2.0
"""Plans for shares: make, resize, remove, and the Ceph keys of guests."""
