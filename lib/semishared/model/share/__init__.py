# SPDX-License-Identifier: Apache-2.0
"""Names, records and steps of shares, the directories for guests."""
