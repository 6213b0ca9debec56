# SPDX-License-Identifier: Apache-2.0
"""What a machine does when the front-end asks: steps to functions, and what its monitoring tells."""
