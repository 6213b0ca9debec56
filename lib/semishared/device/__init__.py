# SPDX-License-Identifier: Apache-2.0
"""One device of a host's pool: its link and label, its state, the bytes promised on it."""
