# SPDX-License-Identifier: Apache-2.0
"""Who is believed, and what comes too late."""
