# SPDX-License-Identifier: Apache-2.0
"""Actions to planners, and steps to functions, on every machine. There is no other dispatch.

A row is a module and a function, or "." and a verb of the store of the step's image or access (store.Store,
store.Bridged). A module is loaded when its first step comes.

A function's parameters name what it needs: `step`, fields of the step, parts of the work under way
(host/work.py on a host, front/datastore.py on the front-end, vmm/on_host.py in a hypervisor action). It
returns the answer. A planner's parameters name what the front-end asks for it, too (front/transfer.py).
tests/unit/test_table.py resolves every row.
"""

from __future__ import annotations

from typing import Any, Callable

ACTIONS = {
    "clone": ("FromImage.parse", "target", "plan.disk.disks:clone"),
    "context": ("Context.parse", "target", "front.transfer:context"),
    "cpds": ("ToImage.parse_copy", "", "front.transfer:cpds"),
    "delete": ("Delete.parse", "", "front.transfer:delete"),
    "failmigrate": ("Migrate.parse", "", "front.migration:failmigrate"),
    "ln": ("FromImage.parse", "target", "plan.disk.disks:ln"),
    "mkimage": ("NewDisk.parse", "target", "plan.disk.disks:mkimage"),
    "mkswap": ("NewDisk.parse_swap", "target", "plan.disk.disks:mkswap"),
    "mv": ("Move.parse", "", "front.transfer:mv"),
    "mvds": ("ToImage.parse", "", "front.transfer:mvds"),
    "postbackup": ("Backup.parse", "", "front.backup:postbackup"),
    "postbackup_live": ("Backup.parse", "", "front.backup:postbackup_live"),
    "postmigrate": ("Migrate.parse", "", "front.migration:postmigrate"),
    "prebackup": ("Backup.parse", "", "front.backup:prebackup"),
    "prebackup_live": ("Backup.parse", "", "front.backup:prebackup_live"),
    "premigrate": ("Migrate.parse", "", "front.migration:premigrate"),
    "resize": ("Resize.parse", "", "plan.disk.snapshots:resize"),
    "restore": ("Restore.parse", "", "front.backup:restore"),
    "snap_create": ("SnapshotPlace.parse", "disk", "plan.disk.snapshots:snap_create"),
    "snap_create_live": ("SnapshotPlace.parse", "disk", "plan.disk.snapshots:snap_create_live"),
    "snap_delete": ("SnapshotPlace.parse", "disk", "plan.disk.snapshots:snap_delete"),
    "snap_revert": ("SnapshotPlace.parse", "disk", "plan.disk.snapshots:snap_revert"),
}
"""Transfer action -> the shape of its words (opennebula/args.py), the one of them whose host the plan speaks
to first ('': none), and its planner, or the function that asks for more before it.
"""
STEPS = {
    "ActivateLayer": "disk.layering:activate_layer",
    "AddDeltas": "disk.premigrate:add_deltas",
    "AddLayer": "disk.layering:add_layer",
    "AdoptClone": "disk.create:adopt_clone",
    "AllocateDisk": "disk.create:allocate",
    "AllowGrowth": "disk.snapshots:allow_growth",
    "AllowMigration": "disk.premigrate:allow_migration",
    "AnswerProbe": "disk.premigrate:answer_probe",
    "BackUp": "disk.backup:back_up",
    "BecomeStock": "vmm.on_host:become_stock",
    "BeginChange": ".begin_change",
    "BeginSession": "store:begin_session",
    "CheckDiff": "disk.commits:check",
    "CheckDisk": "vmm.records:check_disk",
    "CheckEpoch": "vmm.on_host:check_epoch",
    "CheckMachine": "guest.machine:check",
    "CheckNotOpen": "disk.premigrate:check_not_open",
    "CheckNotRunning": "guest.virsh:check_not_running",
    "CheckProbe": "disk.premigrate:check_probe",
    "CheckShare": "vmm.on_host:check_share",
    "CheckStore": ".reach",
    "CheckWriters": ".writers",
    "ClearVm": "disk.transfer:clear",
    "CloneOnStore": "disk.create:clone_on_store",
    "CloneStored": ".clone_for",
    "CloseDevice": "pool.labels:close",
    "CommitDisk": "disk.commits:commit",
    "CompactMemory": "vmm.live_migration:compact_memory",
    "ConfirmDisk": "disk.vm_dir:confirm_disk",
    "CopyAcross": "store:copy_across",
    "CopyDeltas": "vmm.live_migration:copy_deltas",
    "CopyFile": "disk.create:copy_file",
    "CopyHeld": ".copy_held",
    "CopyImage": "disk.create:copy_image",
    "CopyOut": "disk.snapshots:copy_out",
    "CopyStored": ".copy",
    "CreateDiff": "disk.commits:make",
    "CreateImage": ".create",
    "CreateOverlay": "disk.create:create_overlay",
    "CreateRemote": "disk.create:create_remote",
    "CreateVolatile": "disk.create:create_volatile",
    "DescribeBase": "stage.manifests:describe",
    "DescribeDisk": "disk.snapshots:describe",
    "DescribeVm": "disk.vm_dir_inventory:records_of",
    "DetachVm": "disk.detach:detach",
    "DigestImage": ".digest",
    "Discard": "host.leftovers:discard",
    "DropLayer": "disk.layering:drop_layer",
    "DropSnapshot": ".drop_snapshot",
    "DropStrays": "disk.layering:drop_strays",
    "EndBackup": "disk.backup:end",
    "EndChange": ".end_change",
    "EndSession": "disk.vm_dir:end_session",
    "EvictBase": "base.room:evict",
    "FetchBases": "stage.fetch:receive",
    "FillImage": "disk.save_as:fill_image",
    "FindClone": ".clone_found",
    "FindDirectory": "share.registered:found",
    "FindKept": "disk.retained_diffs:find_kept",
    "FindPaused": "guest.domain:find_paused",
    "FindSnapshots": ".passing",
    "FinishDisk": "disk.commits:finish",
    "FlattenImage": ".flatten",
    "ForgetDisk": "disk.vm_dir:forget_disk",
    "ForgetSnapshot": ".forget",
    "FreezeImage": ".freeze",
    "GiveKey": "share.keys:give",
    "GrowDisk": "disk.snapshots:grow",
    "GrowImage": ".grow",
    "HoldHot": "disk.report:hold",
    "HoldMoment": ".hold",
    "KeepSnapshot": ".keep",
    "KeepStale": "disk.transfer:keep_stale",
    "LendContent": ".lend",
    "LinkInPlace": "disk.create:link_in_place",
    "ListBases": "base.room:list_bases",
    "ListDevices": "pool.labels:describe",
    "ListHeld": "disk.device_move:list_held",
    "ListJobs": "host.jobs:listed",
    "ListKeys": "share.keys:listed",
    "ListPool": ".names",
    "ListRoots": "front.stores:roots",
    "ListShares": "share.life:listed",
    "ListSnapshots": "share.life:list_snapshots",
    "ListTargets": "guest.domain:targets",
    "LookAround": "host.leftovers:look_around",
    "LookAtBase": "stage.manifests:look_at",
    "LookAtDisk": "disk.snapshots:look_at",
    "LookAtGuest": "guest.domain:disk_types",
    "LookAtImages": ".describe",
    "LookAtProof": "vmm.live_migration:look_at_proof",
    "LookAtRoot": "share.inspection:of_root",
    "LookAtShareHost": "share.inspection:of_host",
    "LookAtVm": "disk.vm_dir_inventory:seen",
    "LookForDiff": "disk.create:look",
    "LookForVm": "disk.vm_dir_inventory:look",
    "LoseMarks": "vmm.on_host:lose_marks",
    "MakeRoom": "disk.transfer:make_room",
    "MakeShare": "share.life:make",
    "MakeSnapshot": "share.life:make_snapshot",
    "MakeStore": "store.dir.marker:make_directory",
    "MarkRoot": "share.life:mark",
    "MarkStore": "store.dir.marker:mark",
    "MarkVm": "disk.vm_dir_inventory:mark",
    "MeasureRoot": "share.life:capacity",
    "MeasureSource": "front.upload:measure",
    "MeasureStore": ".capacity",
    "MendBase": "stage.scrub:mend",
    "MergeDeltas": "disk.premigrate:merge_deltas",
    "MergeLayer": "disk.layering:merge_layer",
    "MigrateDomain": "vmm.live_migration:migrate_domain",
    "MoveBase": "pool.moving:move_base",
    "MoveLayers": "disk.device_move:move",
    "NameGeneration": ".name",
    "NameLayer": "disk.layering:name_layer",
    "NoteClasses": "disk.vm_dir:note_classes",
    "NoteClients": "disk.vm_dir:note_clients",
    "NoteEpoch": ".note_epoch",
    "NoteHot": "disk.vm_dir:note_hot",
    "NoteIoClasses": "disk.vm_dir:note_io_classes",
    "PlaceLayers": "disk.vm_dir:place_layers",
    "PrepareVm": "disk.vm_dir:prepare",
    "PublishImage": ".show",
    "PullLayer": "disk.layering:pull_layer",
    "ReachDisk": "disk.premigrate:reach_disk",
    "ReadBase": "stage.scrub:read",
    "ReadChain": "vmm.records:read_chain",
    "ReadCheckpoint": "vmm.on_host:read_checkpoint",
    "ReadClients": "vmm.records:clients",
    "ReadIoLimits": "vmm.on_host:io_limits",
    "ReadRecords": "vmm.records:as_data",
    "ReadSite": "vmm.live_migration:read_site",
    "ReadVm": "vmm.on_host:read_vm",
    "ReceiveFile": "disk.transfer:receive_file",
    "ReceiveImage": "store:receive",
    "ReceiveVm": "disk.transfer:receive",
    "RecordNetwork": "disk.create:record_network",
    "Recover": "vmm.on_host:recover",
    "RefuseMountPoint": "front.datastore:refuse_mount_point",
    "RehearseHypervisor": "vmm.on_host:rehearse",
    "ReleaseVm": "disk.transfer:release",
    "RemoveArrival": "vmm.live_migration:remove_arrival",
    "RemoveDisk": "disk.vm_dir:remove_disk",
    "RemoveImage": ".remove",
    "RemoveShare": "share.life:remove",
    "RemoveSnapshot": "share.life:remove_snapshot",
    "RemoveVm": "disk.vm_dir:remove_vm",
    "RenameVm": "disk.transfer:rename",
    "RenewVm": "disk.diff_rebase:renew",
    "ReplaceLostBases": "disk.report:before_boot",
    "ReportDisks": "disk.report:report",
    "ReportVms": "disk.report:report_some",
    "ResizeShare": "share.life:resize",
    "RestGuest": "disk.snapshots:rest_for",
    "RestoreDisk": "disk.restore:restore",
    "RestoreImage": "disk.restore:restore_bridged",
    "RestoreTpm": "disk.firmware:restore_tpm",
    "RevertImage": ".revert",
    "SaveDisk": "disk.save_as:save_disk",
    "SeeDomain": "vmm.live_migration:see_domain",
    "SeeHot": "disk.report:see",
    "SeeImage": ".look",
    "SeeMachine": "guest.machine:seen",
    "SeeNotes": "vmm.records:notes",
    "SeeSession": ".session",
    "SeeState": "vmm.live_migration:see_state",
    "SeeVersions": "guest.virsh:versions",
    "SendManifest": "stage.manifests:send_manifest",
    "SendVm": "disk.transfer:send_vm",
    "ServeBase": "stage.peers:serve",
    "ServeExtents": "stage.peers:serve_extents",
    "SetDevices": "pool.labels:declare",
    "SettleImage": ".settle",
    "ShowKey": "share.keys:shown",
    "StageBase": "stage.ensure:stage",
    "StageImage": ".stage",
    "StoreUpload": "front.upload:publish",
    "StreamBases": "stage.multicast:send",
    "SwitchLayer": "disk.layering:switch_layer",
    "SyncTime": "vmm.live_migration:sync_time",
    "TakeBackClone": ".take_back",
    "TakeKeys": "share.keys:take",
    "TakeProof": "vmm.live_migration:take_proof",
    "TakeTurn": "disk.commits:take_turn",
    "TidyMarks": "vmm.on_host:tidy_marks",
    "UnmarkVm": "disk.vm_dir_inventory:unmark",
    "VerifyBase": "stage.scrub:verify",
    "Wait": "vmm.live_migration:wait",
    "WriteCheckpoint": "vmm.on_host:write_checkpoint",
    "WriteProbe": "disk.premigrate:write_probe",
}


def loaded(row: str) -> Callable[..., Any]:
    """Return the function that a row names with its module."""
    module, _, name = row.partition(":")
    found: Callable[..., Any] = getattr(__import__(f"{__package__}.{module}", fromlist=(name,)), name)
    return found


def carry_out(step: Any, work: object) -> Any:
    """Carry out a step; return its answer, of the type that the step declares.

    A parameter that neither the step nor the work has keeps its default.
    """
    row = STEPS[type(step).__name__]
    if row.startswith("."):
        from . import store

        access = step.image.access if "image" in step._fields else step.access
        do = getattr(store.of(access), row[1:])
    else:
        do = loaded(row)
    given = {}
    for name in do.__code__.co_varnames[: do.__code__.co_argcount]:
        if name == "step":
            given[name] = step
        elif name in step._fields:
            given[name] = getattr(step, name)
        elif hasattr(work, name):
            given[name] = getattr(work, name)
    return do(**given)
