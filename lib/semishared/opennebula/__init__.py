# SPDX-License-Identifier: Apache-2.0
"""What we are told: arguments, XML, oned's answers; and the protocol we answer by."""
