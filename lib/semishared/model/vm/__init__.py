# SPDX-License-Identifier: Apache-2.0
"""Steps of VM moves, live migrations and hypervisor actions."""
