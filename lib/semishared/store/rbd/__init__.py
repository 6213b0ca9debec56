# SPDX-License-Identifier: Apache-2.0
"""Image stores in a Ceph RBD pool."""
