#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Stand-in: one of the probes whose output becomes the template of a host.
printf 'HOSTNAME=%s\n' "$(uname -n)"
