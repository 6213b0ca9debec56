# SPDX-License-Identifier: Apache-2.0
"""Plans for a whole VM: move, live migration, failover, hypervisor actions, datastore change."""
