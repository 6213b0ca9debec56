# SPDX-License-Identifier: Apache-2.0
"""Hypervisor actions carried out on a VM's host: what plan/hypervisor.py decides, and the stock script after
it.
"""
