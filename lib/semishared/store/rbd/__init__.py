# SPDX-License-Identifier: Apache-2.0
"""Image stores in an RBD pool of Ceph."""
