# SPDX-License-Identifier: Apache-2.0
"""semishared: OpenNebula storage drivers that choose shared or local per disk."""

VERSION = "0.1.0"
"""Front-end and hosts must agree on it; a host that does not is told to be synced (`onehost sync -f`)."""

NAME = "semishared"
"""TM_MAD, DS_MAD, directory below remotes/ and content of `.monitor` (docs/explanation/contract.md)."""
