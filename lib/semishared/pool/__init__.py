# SPDX-License-Identifier: Apache-2.0
"""What an administrator does to a host's pool: labels, moves of bases between devices, removal."""
