# SPDX-License-Identifier: Apache-2.0
"""Plans for image datastores: their actions, RBD, Ceph capabilities, turns of commits."""
