# SPDX-License-Identifier: Apache-2.0
"""Commits of diffs to images, in any kind of store: claims and changes."""
