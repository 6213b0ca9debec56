# SPDX-License-Identifier: Apache-2.0
"""States and types of oned's objects, by the names of its C++ headers.

The headers are include/VirtualMachine.h, Image.h, Host.h, Datastore.h. Numbers that they skip are in no
supported release. Plain numbers: a hundred members of an Enum would cost an action a millisecond at its
start.
"""

from __future__ import annotations


class VmState:
    """STATE of a VM."""

    INIT, PENDING, HOLD, ACTIVE, STOPPED, SUSPENDED, DONE = range(7)
    POWEROFF, UNDEPLOYED, CLONING, CLONING_FAILURE = range(8, 12)


class LcmState:
    """LCM_STATE of an ACTIVE VM."""

    LCM_INIT, PROLOG, BOOT, RUNNING, MIGRATE, SAVE_STOP, SAVE_SUSPEND, SAVE_MIGRATE = range(8)
    PROLOG_MIGRATE, PROLOG_RESUME, EPILOG_STOP, EPILOG, SHUTDOWN = range(8, 13)
    CLEANUP_RESUBMIT, UNKNOWN, HOTPLUG, SHUTDOWN_POWEROFF = range(15, 19)
    BOOT_UNKNOWN, BOOT_POWEROFF, BOOT_SUSPENDED, BOOT_STOPPED, CLEANUP_DELETE = range(19, 24)
    HOTPLUG_SNAPSHOT, HOTPLUG_NIC, HOTPLUG_SAVEAS = range(24, 27)
    HOTPLUG_SAVEAS_POWEROFF, HOTPLUG_SAVEAS_SUSPENDED, SHUTDOWN_UNDEPLOY = range(27, 30)
    EPILOG_UNDEPLOY, PROLOG_UNDEPLOY, BOOT_UNDEPLOY = range(30, 33)
    HOTPLUG_PROLOG_POWEROFF, HOTPLUG_EPILOG_POWEROFF, BOOT_MIGRATE = range(33, 36)
    BOOT_FAILURE, BOOT_MIGRATE_FAILURE, PROLOG_MIGRATE_FAILURE, PROLOG_FAILURE = range(36, 40)
    EPILOG_FAILURE, EPILOG_STOP_FAILURE, EPILOG_UNDEPLOY_FAILURE = range(40, 43)
    PROLOG_MIGRATE_POWEROFF, PROLOG_MIGRATE_POWEROFF_FAILURE = range(43, 45)
    PROLOG_MIGRATE_SUSPEND, PROLOG_MIGRATE_SUSPEND_FAILURE = range(45, 47)
    BOOT_UNDEPLOY_FAILURE, BOOT_STOPPED_FAILURE = range(47, 49)
    PROLOG_RESUME_FAILURE, PROLOG_UNDEPLOY_FAILURE = range(49, 51)
    DISK_SNAPSHOT_POWEROFF, DISK_SNAPSHOT_REVERT_POWEROFF, DISK_SNAPSHOT_DELETE_POWEROFF = range(51, 54)
    DISK_SNAPSHOT_SUSPENDED, DISK_SNAPSHOT_DELETE_SUSPENDED = 54, 56
    DISK_SNAPSHOT, DISK_SNAPSHOT_DELETE = 57, 59
    PROLOG_MIGRATE_UNKNOWN, PROLOG_MIGRATE_UNKNOWN_FAILURE = range(60, 62)
    DISK_RESIZE, DISK_RESIZE_POWEROFF, DISK_RESIZE_UNDEPLOYED, HOTPLUG_NIC_POWEROFF = range(62, 66)
    HOTPLUG_RESIZE, HOTPLUG_SAVEAS_UNDEPLOYED, HOTPLUG_SAVEAS_STOPPED = range(66, 69)
    BACKUP, BACKUP_POWEROFF, RESTORE = range(69, 72)
    FAILURES = frozenset((*range(36, 43), 44, *range(46, 51), 61))
    """All states named _FAILURE: oned waits for `onevm recover`."""


class ImageState:
    """STATE of an image."""

    INIT, READY, USED, DISABLED, LOCKED, ERROR, CLONE, DELETE = range(8)
    USED_PERS, LOCKED_USED, LOCKED_USED_PERS = range(8, 11)


class ImageType:
    """TYPE of an image."""

    OS, CDROM, DATABLOCK, KERNEL, RAMDISK, CONTEXT, BACKUP, FILESYSTEM = range(8)


class HostState:
    """STATE of a host."""

    INIT, MONITORING_MONITORED, MONITORED, ERROR, DISABLED = range(5)
    MONITORING_ERROR, MONITORING_INIT, MONITORING_DISABLED, OFFLINE = range(5, 9)


class DatastoreState:
    """STATE of a datastore."""

    READY, DISABLED = range(2)


class DatastoreType:
    """TYPE of a datastore."""

    IMAGE_DS, SYSTEM_DS, FILE_DS, BACKUP_DS = range(4)


def name_of(state: int, states: type = VmState) -> str:
    """Return oned's name of a VM's STATE (or of another kind of state), its number if it has none."""
    return next((name for name, number in vars(states).items() if number == state), str(state))
