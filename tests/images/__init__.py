# SPDX-License-Identifier: Apache-2.0
"""Images as people have them: what is taken arrives whole, what is no disk is refused by name."""
