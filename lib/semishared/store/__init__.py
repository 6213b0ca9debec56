# SPDX-License-Identifier: Apache-2.0
"""Where images live: mounted trees and Ceph."""
