# SPDX-License-Identifier: Apache-2.0
"""Hypervisor actions on a VM's host: what plan/vm/hypervisor.py decides, then the stock script."""
