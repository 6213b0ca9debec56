# SPDX-License-Identifier: Apache-2.0
"""Two front-ends, of which one leads: what it leaves on its own disk, and what the other one makes of it."""
