# SPDX-License-Identifier: Apache-2.0
"""Decisions about images: where their disks lie, attributes, formats, encryption."""
