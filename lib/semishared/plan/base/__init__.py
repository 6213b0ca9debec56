# SPDX-License-Identifier: Apache-2.0
"""Plans for bases: which host gets one, from which sources, and which one is evicted."""
