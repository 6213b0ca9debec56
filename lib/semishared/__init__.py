# SPDX-License-Identifier: Apache-2.0
"""semishared: OpenNebula storage drivers that choose shared or local per disk."""

import sys

if sys.version_info < (3, 9):  # noqa: UP036 # every program imports this first
    from .newer_python import go_on

    go_on()

VERSION = "0.2.0"
"""The version for people. Front-end and hosts must agree on more than that: wire/messages.RELEASE."""

NAME = "semishared"
"""TM_MAD, DS_MAD, directory below remotes/ and content of `.monitor` (docs/explanation/contract.md)."""
