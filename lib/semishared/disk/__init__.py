# SPDX-License-Identifier: Apache-2.0
"""The disks of a VM on a host, and the directory they lie in."""
