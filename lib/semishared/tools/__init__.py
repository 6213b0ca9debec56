# SPDX-License-Identifier: Apache-2.0
"""One program or family of system calls each. Knows nothing of disks, stores or VMs."""
