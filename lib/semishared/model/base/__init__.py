# SPDX-License-Identifier: Apache-2.0
"""Names, extent ranges and steps of bases."""
