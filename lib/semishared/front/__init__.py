# SPDX-License-Identifier: Apache-2.0
"""What the front-end leads: one action or session, over all machines that take part."""
