# SPDX-License-Identifier: Apache-2.0
"""Frozen words, on the wire and on disk: read and written here alone."""
