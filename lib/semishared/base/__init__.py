# SPDX-License-Identifier: Apache-2.0
"""The base store of a host: verified copies of image generations, and every way to have one."""
