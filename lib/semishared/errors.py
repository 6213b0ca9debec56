# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, one class each: the docstring says what it is, `remedy` what to do about it.

`make docs` writes docs/reference/errors.md from this file; a test holds the two together. Ids are stable:
they end in users' VM logs. An error crosses ssh as its id and its detail (see `from_id`).
"""

from __future__ import annotations

import os

LONGEST_DETAIL = 1500
"""Characters of a detail in the user's line: the remedy and the id behind it must not be cut off
(report.LONGEST).
"""


def here(path: str) -> str:
    """Return a path on this machine as errors name it."""
    return f"{path} on {os.uname().nodename}"


class SemisharedError(Exception):
    """Unexpected failure inside semishared."""

    id = "SS000"
    remedy = "look at the ERROR lines in the VM log or oned.log, and report them"

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = " ".join(detail.split()) or "no detail"

    @property
    def reason(self) -> str:
        """Return the detail, the middle of a long one left out."""
        # The reason is at the beginning, or at the end: what a traceback, or ssh behind a banner, says last.
        half = LONGEST_DETAIL // 2
        return (
            self.detail
            if len(self.detail) <= LONGEST_DETAIL
            else f"{self.detail[:half]} ... {self.detail[-half:]}"
        )

    def line(self) -> str:
        """Return the one line that an operator sees; what oned gets is opennebula/error_line.py's."""
        return f"{self.id} {self.reason}; {self.remedy}"


class BadArguments(SemisharedError):
    """Arguments or standard input that no OpenNebula would send."""

    id = "SS001"
    remedy = "check the OpenNebula version, and which program called the driver"


class BadAttribute(SemisharedError):
    """A SEMISHARED_* attribute of an image or datastore with an unknown or contradictory value."""

    id = "SS002"
    remedy = "correct the attribute of the image or of its datastore"


class BadSetting(BadAttribute):
    """A line of semishared.conf that is not understood, or says what cannot be."""

    id = "SS097"
    remedy = (
        "correct that line of etc/semishared.conf below remotes/ on the front-end, then run `onehost sync "
        "--force` as oneadmin"
    )


class TpmUnreadable(SemisharedError):
    """The state of the TPM of a running VM, which no backup can do without, and root alone reads."""

    id = "SS098"
    remedy = (
        "let oneadmin run /var/tmp/one/vtpm_setup by sudo there, as the package opennebula-node-kvm does; "
        "or shut the VM down, and back it up while it is off"
    )


class NotSupported(SemisharedError):
    """A combination that this version does not do yet."""

    id = "SS003"
    remedy = "choose another setting; docs/reference/attributes.md lists what works"


class OnedUnavailable(SemisharedError):
    """oned could not be asked about a VM, image or datastore."""

    id = "SS004"
    remedy = "check that oned answers and that ~/.one/one_auth is valid for the driver's user"


class HostUnreachable(SemisharedError):
    """A host that ssh does not reach, or that fell silent during an action."""

    id = "SS010"
    remedy = "check the host, its network and the ssh keys of oneadmin, then retry"


class HostOutdated(SemisharedError):
    """A host that holds another version of semishared than the front-end, or none."""

    id = "SS011"
    remedy = "run `onehost sync --force` as oneadmin on the front-end, then retry"


class HostFailed(SemisharedError):
    """The host side ended without an answer."""

    id = "SS012"
    remedy = "what that host has said last is in the line: mend it, then retry"


class MissingImage(SemisharedError):
    """An image or file that is not where it should be."""

    id = "SS020"
    remedy = "check the path or the name, and that the datastore is mounted (or its pool is) there"


class UnsafeImage(SemisharedError):
    """An image that names other files (backing file, data file, extents) or claims an absurd size."""

    id = "SS021"
    remedy = "flatten the image first (qemu-img convert) and upload the result"


class RestrictedPath(SemisharedError):
    """A path outside of what the datastore allows (SAFE_DIRS, RESTRICTED_DIRS)."""

    id = "SS022"
    remedy = (
        "copy the file to a directory of SAFE_DIRS, or change SAFE_DIRS of the datastore; a new share is "
        'PATH = "new:10G" in a template'
    )


class ChecksumMismatch(SemisharedError):
    """Data that is not what its checksum says."""

    id = "SS023"
    remedy = "get the file again, or correct the checksum given with the image"


class StoreUnavailable(SemisharedError):
    """A shared store that is not mounted, or not writable, where it is needed."""

    id = "SS024"
    remedy = "mount the image datastore at the same path on the front-end and on every host"


class ImageChanged(SemisharedError):
    """An image whose content is not that of its generation."""

    id = "SS025"
    remedy = "find what wrote to the image; a new upload or a persistent session makes a new generation"


class SourceUnavailable(SemisharedError):
    """A URL that answers with an error or not at all, or does not say what is asked of it."""

    id = "SS026"
    remedy = "check the URL, and that the front-end reaches it"


class CephUnavailable(SemisharedError):
    """A Ceph cluster that cannot be reached or does not answer in time."""

    id = "SS027"
    remedy = "check that the cluster is healthy and not full, and reachable from that machine, then retry"


class CephRefused(SemisharedError):
    """A Ceph user without a key on the machine, or whose key does not allow what is needed."""

    id = "SS028"
    remedy = "see docs/how-to/ceph.md for the keyring and the capabilities that this user needs there"


class ImageInUse(SemisharedError):
    """An image on the network that a client still has open, or that clones depend on."""

    id = "SS029"
    remedy = "end what uses it (a client that died lets go after 30 s), then retry"


class BaseBusy(SemisharedError):
    """A base that a clone or another staging session is making at this moment."""

    id = "SS052"
    remedy = "let it finish, or say --wait"


class ReadOnly(SemisharedError):
    """A file system that takes no writes: it was mounted read-only, or has become so since its disk fails."""

    id = "SS193"
    remedy = "dmesg on that machine says why: mend it, mount it writable, then retry"


class NoSpace(SemisharedError):
    """No space left where data was to be written."""

    id = "SS030"
    remedy = "free space there, then retry"


class ToolFailed(SemisharedError):
    """A program (qemu-img, tar, mkfs ...) that reported failure."""

    id = "SS031"
    remedy = "mend what the program says, then retry"


class ToolMissing(SemisharedError):
    """A program that is not installed."""

    id = "SS032"
    remedy = "install it on that machine"


class ToolTimeout(SemisharedError):
    """A program that did not end in its time."""

    id = "SS033"
    remedy = "check for hung storage on that machine, then retry"


class VmGone(SemisharedError):
    """A VM or disk that was deleted while it was being made."""

    id = "SS040"
    remedy = "nothing: the deletion won"


class MigrationRefused(SemisharedError):
    """A migration that would leave data behind."""

    id = "SS041"
    remedy = "power the VM off and migrate it cold, or undeploy it"


class MachineMissing(SemisharedError):
    """A host whose QEMU or processor lacks the machine type or the CPU of a guest that is to go there."""

    id = "SS093"
    remedy = (
        "place the VM on another host (semishared doctor says whose QEMU is older); or update QEMU there and "
        "`onevm recover --retry`; or start the VM anew with an OS/MACHINE that all hosts have"
    )


class CpuMissing(SemisharedError):
    """A host whose libvirt starts no VM with the CPU that CPU_MODEL, or EVC_MODE of the cluster, names."""

    id = "SS094"
    remedy = (
        "`onevm recover --recreate VM`, and deploy it on another host; or name a CPU_MODEL (of the cluster: "
        "EVC_MODE) that this one has, which `virsh domcapabilities` there calls usable"
    )


class MigrationTimeout(SemisharedError):
    """A live migration that had not come to its end within `timeout_s`; the guest stays where it is."""

    id = "SS045"
    remedy = (
        "move the VM when it writes less, or let it take more: timeout_s, rate, downtime_ms, "
        "auto_converge, at_timeout of [migration] "
        "in semishared.conf"
    )


class Overtaken(SemisharedError):
    """An action that began when oned had already ended it."""

    id = "SS044"
    remedy = "nothing: the later action won"


class BadRecord(SemisharedError):
    """A record of a disk or share that is missing, unreadable or of a newer version; a directory for a guest
    that vm.xml does not have.
    """

    id = "SS042"
    remedy = "update semishared on that host (`onehost sync --force`), or redeploy the VM"


class DataInTheWay(SemisharedError):
    """Something to be removed, or in the place of what is to be made, that might be the only copy of saved
    data.
    """

    id = "SS043"
    remedy = "look at the named file, save what is needed, and remove it by hand"


class StreamFailed(SemisharedError):
    """A multicast stream that did not come, or not to its end."""

    id = "SS051"
    remedy = (
        "nothing: what is missing comes from peers or the store; if it never works, see "
        "docs/explanation/staging.md"
    )


class TransferCorrupt(SemisharedError):
    """A copy between machines that did not arrive as it was sent."""

    id = "SS050"
    remedy = "retry; the source was left as it was"


class UploadTooLarge(SemisharedError):
    """An upload that is larger than what OpenNebula has approved for it: a server or file that changed, or
    that lied.
    """

    id = "SS072"
    remedy = "find out what the source really holds, then register the image anew: its size is asked again"


class SourceTooSlow(SemisharedError):
    """A source that takes longer than an upload, or the question for its size, may take."""

    id = "SS073"
    remedy = (
        "get the file by other means, not compressed or as qcow2, and upload it from a directory of "
        "the front-end"
    )


class NotADisk(SemisharedError):
    """An upload that is no disk: an archive, a page of a server, or a format that nothing here takes."""

    id = "SS076"
    remedy = "upload the disk in it: raw, qcow2, VMDK, VDI, VHD or VHDX, also packed as gz, bz2, xz or zst"


class DamagedImage(SemisharedError):
    """An upload that ends before its own header says, or that its header marks as damaged: VMs would read
    zeros there.
    """

    id = "SS077"
    remedy = "copy or download it again, whole, and give its SHA256 with it"


class EncryptedDisk(SemisharedError):
    """An encrypted disk (LUKS_SECRET) that would be copied decrypted, or made into one that cannot be
    opened; or a qcow2 that is encrypted inside, which no VM could open.
    """

    id = "SS074"
    remedy = "power the VM off first, or see docs/how-to/luks.md for what encrypted images can do"


class WrongFormat(SemisharedError):
    """An image whose header is not that of the format which OpenNebula has for it."""

    id = "SS075"
    remedy = (
        "find what wrote to the image; if only OpenNebula's word is wrong, correct its FORMAT or "
        "register the image anew"
    )


class BadConfiguration(SemisharedError):
    """A configuration file of OpenNebula (oned.conf, vmm_execrc) that cannot be read or edited."""

    id = "SS060"
    remedy = "correct the named line, then run this again; nothing was changed"


class ConfigurationConflict(SemisharedError):
    """A setting of OpenNebula or of another add-on that semishared cannot work beside."""

    id = "SS061"
    remedy = (
        "decide which of the two it shall be, change the named setting, then run this again; nothing "
        "was changed"
    )


class MissingVm(SemisharedError):
    """A VM whose directory is not where OpenNebula has it: it was lost, or a move that was done was called
    failed.
    """

    id = "SS090"
    remedy = "docs/how-to/failed-moves.md says how it is brought back from where it is; nothing was changed"


class OnAnotherFrontEnd(SemisharedError):
    """A stopped or undeployed VM that is not on the front-end that leads, and another front-end, which may
    have it, does not answer.
    """

    id = "SS091"
    remedy = (
        "start that front-end, or bring its disk back, and do the action again (`onevm recover --retry VM`); "
        "docs/how-to/high-availability.md says how it is found and what to do if it is lost for good"
    )


class OldPython(SemisharedError):
    """A machine's /usr/bin/python3 is older than 3.9, and it has no newer one beside it."""

    id = "SS092"
    remedy = (
        "install a newer Python there (docs/reference/platforms.md says how): /usr/bin/python3 may stay, as "
        "semishared takes the newest /usr/bin/python3.N"
    )


class WholeDirectoryThere(SemisharedError):
    """A move of a VM directory that has less than the one in its place at the target: what is left of one,
    perhaps.
    """

    id = "SS063"
    remedy = (
        "look at both directories: remove the one that is not the VM's by hand, then retry; nothing "
        "was removed"
    )


class LateAction(SemisharedError):
    """An action on a VM that was planned before a later one, by oned's own count of the VM's history, has
    been done.
    """

    id = "SS064"
    remedy = (
        "nothing: the later action won. If oned's database was restored from a backup: remove the "
        "named file on that host"
    )


class SameDirectory(SemisharedError):
    """A move of a VM between two paths, or two machines, that are one directory under two names."""

    id = "SS065"
    remedy = "give each system datastore and each host a directory of its own; nothing was moved or removed"


class CannotInstall(SemisharedError):
    """A front-end where semishared cannot be installed or removed: place, rights, version, missing
    programs.
    """

    id = "SS062"
    remedy = "correct this, then run install.sh again; nothing was changed"


class UnexpectedLink(SemisharedError):
    """A symbolic link below one of our directories where there is none in our layout, or one that leads
    elsewhere than there.
    """

    id = "SS070"
    remedy = "nothing was followed; find what can write there (a host that was broken into?), then remove it"


class UnexpectedFile(SemisharedError):
    """Something below one of our directories, or in what a host sent, that is neither a plain file nor a
    directory of ours.
    """

    id = "SS071"
    remedy = "nothing of it was used; find what made it (a host that was broken into?), then remove it"


class AnotherWriter(SemisharedError):
    """An image with a writer, where an action would give it to a guest or replace its content."""

    id = "SS079"
    remedy = "end that writer, then retry: docs/how-to/two-writers.md"


class WouldChange(SemisharedError):
    """A dry run, or a plan, was about to send a machine a step that changes something; it was not sent."""

    id = "SS067"
    remedy = "nothing was changed; what comes after that step cannot be foreseen"


class BackupCancelled(SemisharedError):
    """A backup that was cancelled while the disks were copied."""

    id = "SS068"
    remedy = "nothing is left of it, back up again when you like"


class StoreAbsent(SemisharedError):
    """The directory of a datastore without the marker of its store: the store is not mounted there."""

    id = "SS084"
    remedy = (
        "mount the store there; if it is mounted, it has lost its marker: `semishared setup --apply` "
        "writes it again"
    )


class OtherStore(SemisharedError):
    """A directory that holds the store of another datastore, or of another cloud."""

    id = "SS085"
    remedy = "mount the right store there, or correct SEMISHARED_STORE of the datastore"


class LostAttributes(SemisharedError):
    """A datastore whose template was replaced, and lacks attributes that say which store is its own."""

    id = "SS089"
    remedy = "`semishared doctor --fix` shows it, and puts it back (docs/how-to/beside-stock.md)"


class NoQuota(SemisharedError):
    """A file system that would not hold a share to its size."""

    id = "SS170"
    remedy = "do what the line says, or turn its quotas on, as docs/how-to/shares.md says; then retry"


class NotPermitted(SemisharedError):
    """A command for root on the machine that makes shares, which sudo there does not allow oneadmin, or which
    the NFS server does not take from that root.
    """

    id = "SS171"
    remedy = "docs/how-to/shares.md has the rule for sudoers, and what NFS has to allow; then retry"


class ShareRefused(SemisharedError):
    """A directory that its host gives to no guest: it is no share of semishared, or its mount is unsafe."""

    id = "SS175"
    remedy = "docs/how-to/shares-in-vms.md says what a host needs for it; then retry"


class BrokenChain(SemisharedError):
    """A disk whose header does not plainly name the file that the disk lies over, and its format."""

    id = "SS082"
    remedy = (
        "look at the named file with qemu-img info: it is damaged, or a file below it was changed by hand"
    )


class UnknownHistory(BadRecord):
    """A VM directory whose note (vm.json) does not say any more of which action it is: what is late could not
    be told from what is not.
    """

    id = "SS192"
    remedy = (
        "nothing was changed: if no guest of that VM runs there, remove the file that is named and "
        "do it again"
    )


class DamagedLayer(BrokenChain):
    """A layer of a disk that is named and not there, has no header any more, or is shorter than its own
    header says.
    """

    id = "SS191"
    remedy = (
        "nothing was removed: copy what is named; `onevm recover --delete VM` keeps such a disk "
        "beside, `semishared status` says where"
    )


class StockImage(SemisharedError):
    """An image with snapshots in the layout of OpenNebula's own drivers: what it holds is not in the file
    that SOURCE names.
    """

    id = "SS086"
    remedy = "make one file of its layers first: docs/how-to/stock-images.md"


class GuestNotFrozen(SemisharedError):
    """A running guest that could not rest as asked for while its disks were copied."""

    id = "SS080"
    remedy = (
        "install or start the agent in the guest, or ask for less ([snapshots] freeze in "
        "semishared.conf, FS_FREEZE of a backup)"
    )


class GuestStillFrozen(SemisharedError):
    """A guest whose agent has frozen its file systems, or may have, and does not answer."""

    id = "SS081"
    remedy = (
        "it is tried again for 15 minutes and by every next action; by hand: `virsh domfsthaw` on "
        "that host, or restart the guest"
    )


class NotFenced(SemisharedError):
    """A host of which it is not proved that it can write to no disk in any store any more."""

    id = "SS087"
    remedy = (
        "mend what is named and run `semishared fence` again; once the host is surely off: "
        "`semishared fence HOST --confirmed-off`"
    )


class StillFenced(SemisharedError):
    """A host that was shut out, and may not be let in yet."""

    id = "SS088"
    remedy = (
        "restart the host, so that no guest of before is left on it, then `semishared fence --lift "
        "HOST` again"
    )


class DiskLost(SemisharedError):
    """A disk that is only on a lost host, and must not be made anew elsewhere without what it held."""

    id = "SS130"
    remedy = (
        "wait for that host, or set SEMISHARED_ON_HOST_FAILURE = recreate on its image and retry: "
        "docs/how-to/dead-host.md"
    )


class HostNotLost(SemisharedError):
    """A VM that oned has lost sight of, on a host that neither answers nor is shut out of the stores: its
    guest may still run.
    """

    id = "SS131"
    remedy = "make the host answer, or shut it out (`semishared fence HOST`), then `onevm recover --retry`"


class StaleDirectory(SemisharedError):
    """A VM's directory on a host, after another host has taken the VM over: it does not count any more."""

    id = "SS132"
    remedy = "`semishared gc` removes it; if the VM is to be here, migrate it here"


class NotOwner(SemisharedError):
    """A disk whose persistent image is reserved for another disk, or for none: it cannot commit."""

    id = "SS140"
    remedy = (
        "the image stays as it is; `semishared commit VM DISK --as-new-image NAME` makes another "
        "image of the disk"
    )


class CommitRefused(SemisharedError):
    """A diff that does not fit its persistent image any more; disk and image stay as they are."""

    id = "SS141"
    remedy = (
        "nothing is lost: `semishared commit VM DISK --as-new-image NAME` makes another image of the disk"
    )


class StaleDiff(SemisharedError):
    """A diff of a persistent image on a host whose VM another host has taken over since."""

    id = "SS142"
    remedy = (
        "nothing is lost: `semishared commit VM DISK --as-new-image NAME` makes another image of it, "
        "`semishared gc` lists it"
    )


class JournalDamaged(SemisharedError):
    """A decided and killed commit whose journal beside the image is incomplete: the image may have parts of
    both contents.
    """

    id = "SS143"
    remedy = "commit again on the host that has the disk, or revert the image to a snapshot or a backup"


class VmBusy(SemisharedError):
    """A VM with another action under way, which this one does not interrupt."""

    id = "SS144"
    remedy = "nothing was done: retry when that is over"


class UnknownClaim(SemisharedError):
    """An image whose claim this version does not understand; it stays as it is."""

    id = "SS145"
    remedy = (
        "update semishared there; if no newer version wrote that record, `rm` it: then no disk may "
        "commit to the image any more"
    )


class CannotDetach(SemisharedError):
    """A disk that cannot detach from its store as things are, and goes on reading from it."""

    id = "SS150"
    remedy = "its VM runs on as before; mend what the line names, then `semishared detach` again"


class BadPool(SemisharedError):
    """A pool of local devices that cannot be as declared, or a device that is unfit for it."""

    id = "SS160"
    remedy = (
        "set SEMISHARED_POOL of the host (or [pool] in semishared.conf) right, then `semishared "
        "pool add HOST`"
    )


class DeviceMissing(SemisharedError):
    """A disk whose layers lie on a device of its host's pool that is not there, read-only, broken or hung."""

    id = "SS161"
    remedy = (
        "mend the device and mount it again, then retry; `semishared pool check HOST` says what "
        "else is missing"
    )


class NoDevice(SemisharedError):
    """No device of a host's pool that could take a disk or a base."""

    id = "SS162"
    remedy = "mount the devices that are missing, or change the pool: `semishared pool check HOST`"


class PoolBusy(SemisharedError):
    """A pool between whose devices something is moved already."""

    id = "SS163"
    remedy = "nothing was done: retry when that `semishared pool drain` or `rebalance` is over"


class CannotMove(SemisharedError):
    """A disk or base on a device of a pool that cannot move to another device as things are."""

    id = "SS164"
    remedy = (
        "it is whole where it was: mend what the line names, then `semishared pool drain` (or "
        "`rebalance`) again"
    )


class NoDeviceOfClass(SemisharedError):
    """A disk whose image wants a class of device (SEMISHARED_CLASS) that its host lacks, or that has no room
    there.
    """

    id = "SS166"
    remedy = (
        "add `any` to SEMISHARED_CLASS, so that it may lie elsewhere then; `semishared pool list "
        "HOST` says what there is"
    )


class MemoryPromised(SemisharedError):
    """A disk in memory that needs more layers, or more size, than the rest of that memory can hold in the
    worst case.
    """

    id = "SS167"
    remedy = (
        "delete snapshots of disks there, or end VMs of it: `semishared pool list HOST` says what is promised"
    )


class LostWithMemory(SemisharedError):
    """A disk that lay in its host's memory, which is empty since the host was started again."""

    id = "SS168"
    remedy = "its content is lost: `onevm recover --recreate VM` makes the VM's disks anew from their images"


class SystemAway(ToolTimeout):
    """A system datastore that was mounted on a host, or a link to elsewhere, and is not there any more, with
    whatever VMs it has.
    """

    id = "SS169"
    remedy = "mount it; if it is to be a plain directory from now on, remove the note that is named"


class ForeignImage(SemisharedError):
    """A host, or a record that came from one, which says that a disk is made from another image than
    OpenNebula has for it.
    """

    id = "SS180"
    remedy = (
        "nothing was touched: look at that host and its records (`semishared doctor`), it says what is not so"
    )


class TooLarge(SemisharedError):
    """A file or message that would be larger than its readers accept; it was not written, and nothing was
    begun.
    """

    id = "SS181"
    remedy = "nothing was changed: make what the line names smaller, or do it in pieces"


class NoKey(SemisharedError):
    """The key by which front-ends tell their own notes from others' is missing on this one, or others can
    read or change it.
    """

    id = "SS182"
    remedy = (
        "`semishared setup --key` makes it, or says from which front-end of the group to copy it; "
        "`semishared doctor` compares"
    )


class GoneFromOned(OnedUnavailable):
    """A VM, image or datastore that OpenNebula does not have, or no more: only a host names it."""

    id = "SS183"
    remedy = (
        "nothing was done: is it the right one? What a line calls kept stays where it is until you "
        "have removed, or used, it by hand"
    )


class FalseAnswer(SemisharedError):
    """A host that answers what no host side of this version could: of another kind, without end, or a path,
    name or size that is none.
    """

    id = "SS185"
    remedy = (
        "nothing was done by it: look at that host, which runs other software than this, or is in other hands"
    )


class ForeignCheckpoint(SemisharedError):
    """A checkpoint whose domain has other disks, or is another one, than OpenNebula and the records of the
    VM's disks say.
    """

    id = "SS186"
    remedy = (
        "its memory was not read: look at the host that wrote it; `onevm poweroff --hard VM`, then "
        "`onevm resume VM`, boots it anew"
    )


class PassedBy(SemisharedError):
    """A process that was stopped for minutes while others waited for its lock: one of them has taken that
    over.
    """

    id = "SS188"
    remedy = (
        "nothing of it was published: do the action again, and look what stops processes of that host "
        "(SIGSTOP, a frozen cgroup)"
    )


def of_system(error: OSError, said: str, other: type[SemisharedError] = HostFailed) -> SemisharedError:
    """Return what there is to do about an error of the system, of which `said` says what and where; `other`
    where that says all.
    """
    import errno

    return {errno.EROFS: ReadOnly, errno.ENOSPC: NoSpace, errno.EDQUOT: NoSpace}.get(error.errno or 0, other)(
        said
    )


def catalogue() -> list[type[SemisharedError]]:
    """Return all error classes by id."""
    found: list[type[SemisharedError]] = [SemisharedError]
    for cls in found:
        found.extend(cls.__subclasses__())
    return sorted(set(found), key=lambda cls: cls.id)


def from_id(error_id: str, detail: str) -> SemisharedError:
    """Return the error that the other side of an ssh raised."""
    for cls in catalogue():
        if cls.id == error_id:
            return cls(detail)
    return SemisharedError(detail)
