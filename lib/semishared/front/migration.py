# SPDX-License-Identifier: Apache-2.0
"""The transfer actions around a live migration (vmm/semishared/migrate moves the guest): see
plan/vm/migration.py.
"""

from __future__ import annotations

import os
import sys

from ..config import NONE
from ..errors import NotSupported
from ..model.exchange import Plan
from ..opennebula import args
from ..opennebula.values import decode
from ..opennebula.xml import Vm
from ..plan.vm import migration
from .action import Action


def _migrating(action: Action, asked: args.Migrate) -> tuple[args.Migrate, Vm]:
    if asked.caller:
        raise NotSupported(f"disks of ours in a system datastore of driver {asked.caller}")
    vm = Vm.parse(decode(sys.stdin.buffer.read()))
    action.seq = vm.seq
    return asked, vm


def premigrate(action: Action, asked: args.Migrate) -> Plan:
    """Make everything ready at the target, or refuse."""
    action.rate, action.bulk = action.config.migration_rate, True
    _, vm = _migrating(action, asked)
    action.expects(asked.source_host)
    given, bulk, target = action.acquired(vm), action.config.network_bulk, asked.target.host
    address = action.bulk_address(target)
    if bulk != NONE and not address and target != asked.source_host:
        action.report.warn(f"{target} is known to have no address in {bulk} ([network] bulk): by its name")
    return migration.premigrate(asked, vm, os.urandom(8).hex(), given, address)


def postmigrate(action: Action, asked: args.Migrate) -> Plan:
    """Remove what is left at the source."""
    return migration.postmigrate(*_migrating(action, asked))


def failmigrate(action: Action, asked: args.Migrate) -> Plan:
    """Remove what was made at the target."""
    return migration.failmigrate(*_migrating(action, asked))
