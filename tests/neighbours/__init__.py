# SPDX-License-Identifier: Apache-2.0
"""At home in an OpenNebula with other drivers, under Sunstone: where VMs are sent, what it takes away."""
