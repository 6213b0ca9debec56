# SPDX-License-Identifier: Apache-2.0
"""What install.sh starts: puts semishared into an OpenNebula front-end, and takes it out again."""
