# SPDX-License-Identifier: Apache-2.0
"""All checks of `semishared doctor`: a row for each, with its message and what mends it.

Functions of the other modules (diagnosis*.py) judge, by the names of the rows; tests/unit/plan/test_checks.py
has a failing and a passing case for each. They do no I/O and read no clock.
"""

from __future__ import annotations

import re
from typing import Any, Callable, Mapping

from ...named import NamedTuple

OK, WARNING, BROKEN = 0, 1, 2
WORDS = ("ok", "warning", "broken")

CATALOGUE = """
[site]  What the front-end knows of itself (diagnosis.Site).
installed: Do oned.conf and vmm_execrc say what install.sh writes?
    broken: configuration: {it}: missing -> as root: ./install.sh
readable: Can the configuration be judged?
    warning: {it} -> run this as oneadmin, or as root
restarted: Has oned read its oned.conf?
    warning: oned.conf is newer than the running oned -> as root: systemctl restart opennebula
forwarders: Has each hypervisor action of OpenNebula a forwarder?
    broken: vmm/semishared: {it} -> as root: ./install.sh; as oneadmin: onehost sync --force
conf: Can semishared.conf be read, and does it fit oned.conf?
    broken: {it} -> edit etc/semishared.conf; as oneadmin: onehost sync --force
hostname: Does HOSTNAME of oned.conf lead here?
    broken: HOSTNAME of oned.conf is {it}, which does not lead here: no VM can be stopped or undeployed
    -> as root: let {it} lead here (/etc/hosts), or mend HOSTNAME
oned: Does oned answer?
    broken: {it} -> as root: systemctl start opennebula
[cloud]  What oned knows of ours (diagnosis.Cloud).
datastores: Is there an image and a system datastore?
    warning: there is no {it} datastore of semishared -> semishared setup --apply
[datastore]  A datastore as oned has it, its `name`, and how to `update` it.
datastore-attributes: Are its attributes right?
    broken: {name}: {it} -> {update}
drivers: Are both drivers of an image datastore ours?
    broken: {name}: TM_MAD is {tm}, DS_MAD {ds}, not both semishared -> {update}: both are semishared, or none
tm-conf: Has oned copied to it what oned.conf says of our driver?
    warning: {name}: {key} is {there}, oned.conf says {wanted}
    -> {update}: save it unchanged, and oned copies what oned.conf says
[moves]  A system datastore, and what oned.conf says of moves to ours (diagnosis.Moves).
ds-moves: Does it say of moves to it what oned.conf says?
    warning: {name}: {key} is {there}, oned.conf says {wanted}: oned goes by the first for {what}
    -> {update}: save it unchanged, and oned copies what oned.conf says
[lost!]  What the template of a datastore has lost (model/store/lost.py).
lost-store: Does it say which store is its own?
    broken: {name} has lost {it}, as by Update in Sunstone: actions on it are refused
    -> semishared doctor --fix (docs/how-to/beside-stock.md)
lost-words: Has it all that it said?
    warning: {name} has lost {it}, as by Update in Sunstone
    -> semishared doctor --fix (docs/how-to/beside-stock.md)
[image]  An image as oned has it.
image-attributes: Are its attributes right?
    broken: {name}: {it} -> oneimage update {id}
[host]  A host as oned has it.
host-attributes: Are its attributes right?
    broken: {it} -> onehost update {machine}
[hooks]  What oned does when a host is lost.
host-error: Does OpenNebula's hook for lost hosts leave our VMs alone, if ours does not care for them?
    warning: OpenNebula's hook for lost hosts {it} -> docs/how-to/dead-host.md
[started]  The hooks that are registered, and whether OpenNebula's hook manager runs on the front-end.
hook-manager: Does what starts hooks of ours run?
    broken: OpenNebula's hook manager (opennebula-hem) does not run: it would start {it}
    -> as root: systemctl enable --now opennebula-hem (without systemd, as oneadmin: onehem-server start)
[published!]  The timer that publishes what Sunstone shows, and what waits for it (diagnosis.Published).
timer-started: Does systemd run the timer?
    warning: the timer of publish --due and detach --due is there, and systemd has not started it
    -> as root: systemctl enable --now {timer}.timer
timer-runs: Is published what has changed?
    warning: Sunstone shows the disks of {count} VMs as they were, for up to {minutes} minutes: {it}
    -> {mend}; or as oneadmin: semishared publish (docs/how-to/sunstone.md)
[scheduled]  An image as the scheduler sees it.
shareable: Does the scheduler place its VMs?
    warning: {name} is SHAREABLE: the scheduler gives its VMs no system datastore of semishared
    -> deploy and migrate them by hand: onevm deploy VM HOST {system}; onevm migrate VM HOST
[sent]  An image datastore of any driver, and all datastores (diagnosis_scheduler.Sent).
sent-astray: Are its VMs sent only to where oned deploys them?
    broken: {name}: the scheduler may send its VMs to system datastore {systems}, where oned does not deploy
    them
    -> {mend} (docs/how-to/beside-stock.md)
sent-nowhere: Are its VMs sent to a system datastore of ours?
    broken: {name}: its VMs are sent to no system datastore of semishared: COMPATIBLE_SYS_DS or the clusters
    exclude all
    -> onedatastore show {id}; then onecluster adddatastore, or {mend}
sent-later: Would they be, once it has images?
    warning: {name}: once it has images, the scheduler may send its VMs to system datastore {systems}, where
    oned does not deploy them
    -> {mend} (docs/how-to/beside-stock.md)
[unreached]  A system datastore to which no VM with an image is sent.
unreached: Does an image datastore name it?
    warning: {name}: no image datastore names it in COMPATIBLE_SYS_DS: no VM with an image is sent there
    -> {mend}
[stock]  The images whose content is in layers of a stock driver.
stock-images: Can all images be used?
    broken: image {id} ({name}) has snapshots of OpenNebula's own drivers, and cannot be used
    -> docs/how-to/stock-images.md
[stock-conf]  What the site's files for stock drivers say (front/stock_conf.Doubts).
stock-conf-refused: Can our actions follow them?
    broken: {it} -> edit the file: actions that would read it refuse it (docs/reference/attributes.md)
stock-conf-vain: Has all of it an effect?
    warning: {it} -> remove it: no driver with a datastore here reads it
[leftovers]  How many things gc would remove, and their size.
leftovers: Has no killed action left anything?
    warning: {count} leftovers of killed actions ({size}) -> semishared gc --dry-run; then semishared gc
[damaged]  What cannot be read of disks, by machine.
damaged: Can all records of disks be read?
    broken: {it}
    -> nothing that it is of is removed, or it is kept: copy what there is, and see `semishared status`
[unseen]  What gc could not look at on machines where nothing else is broken.
unseen: Could gc look everywhere?
    warning: cannot be searched for leftovers: {it} -> mend that; then semishared gc --dry-run
[mark]  The mark of a fence on a host, and the host's boot id if it answers.
mark: Is the mark understood?
    broken: {it} -> docs/how-to/dead-host.md
[fenced!]  The same of a mark that stands.
fence-unproved: Did the fence end, of a host that does not answer?
    broken: its fencing was begun and did not end: it may still write -> semishared fence {machine}
fence-void: Has a fence that did not end shut the host out of anything?
    broken: its fencing was begun and did not end: it may still write
    -> semishared fence {machine}; if it lives, semishared fence --lift {machine}
fenced-runs: Was the host restarted before it answers again?
    broken: it was fenced, and runs on with the guests of then: none of them can write
    -> restart {machine}; then semishared fence --lift {machine}
fenced-back: Is the host in again, now that it is back?
    warning: it was fenced, and is back: until it is let in, it has no images on Ceph
    -> semishared fence --lift {machine}
[means]  Why the fencing command cannot be run.
fence-command: Can hosts be switched off?
    broken: [fence] command: {it} -> edit etc/semishared.conf: hosts cannot be switched off
[shutting-out]  Why a key of Ceph is not good.
fence-key: Can a host be shut out of the cluster of a datastore?
    broken: datastore {name}: a dead host cannot be shut out: {it}
    -> semishared caps --role fence {name}: for the cluster's admin, and its keyring on each front-end
[key!]  What a front-end says of its key for marks of fences, and the key of the one that asks.
key-said: Does the front-end say which key it has?
    warning: {path}: nobody knows whether this front-end has the same as {front_end}: {it}
    -> as oneadmin on {front_end}: ssh {machine} true
key-there: Has it one?
    broken: {path} {it}: hosts cannot be fenced from here -> {mend}
key-same: Is it the same everywhere?
    broken: {path} is another than that of {front_end}: neither believes the other's marks of fences -> {mend}
[key-place]  The same.
key-place: Is it on a disk of the front-end's own?
    warning: {path} lies on a file system that other machines may have too ({it})
    -> have it on a disk of the front-end's own: hosts must not read it
[bulk]  Why a host has no address for bulk data (model/bulk_network.py).
bulk: Has the host an address in [network] bulk?
    warning: bulk data comes by its name, not over {bulk}: {it}
    -> give {machine} one (it tells them with its monitoring), or edit [network] in etc/semishared.conf
[front-end]  Another front-end of the HA group (diagnosis_front_ends.FrontEnd).
front-end-says: Does it answer?
    warning: it does not answer {front_end}: what it has of stopped and undeployed VMs is not to be had: {it}
    -> as oneadmin on {front_end}: ssh {machine} true
front-end-package: Has it the same package?
    broken: {it} is not as on {front_end}: when it leads, hosts may refuse it
    -> as root on {machine}: install.sh of the same release
front-end-conf: Has it the same settings?
    broken: {it} is another than on {front_end} -> have one in the remotes directory of each; then
    as oneadmin: onehost sync --force
front-end-apart: Does it see VMs at rest that came there while this one led?
    warning: {it} is on a disk of its own: a VM that is stopped or undeployed waits for the front-end that led
    then -> mount one file system there on all front-ends (docs/how-to/high-availability.md)
[pool]  Something of a host's pool that is not as it is to be (plan/device/choose.py).
pool-absent: Is every device of it there?
    broken: pool: {it} -> as oneadmin: semishared pool check {machine}
pool-changed: Is it as it is declared?
    warning: pool: {it} -> as oneadmin: semishared pool check {machine}
pool-lost: Has memory still what it held?
    warning: pool: {it} -> onevm recover --recreate VM
pool-unreserved: Does oned leave the memory of devices alone?
    warning: pool: {it} -> onehost update {machine}
pool-unwatched: Does something watch memory that is promised more than once?
    warning: pool: {it}
    -> as root on {machine}: semishared-ram.sh enable SIZE KIND TIMES, once more (docs/how-to/pool.md)
pool-limited: Is memory full before it is lost?
    warning: pool: {it} -> as root on {machine}: echo 0 >/sys/block/zram0/mem_limit, or whichever it is
pool-old: Does each label say whether its device answers?
    warning: pool: {it} -> as oneadmin: semishared pool add {machine}
pool-unsafe: Does memory keep what guests write?
    broken: pool: {it}
    -> as root on {machine}: semishared-ram.sh enable SIZE KIND TIMES, once more (docs/how-to/pool.md); then,
    when no disk is there, stop and start it
[answer]  What a machine answers (install/preflight.py), or why it does not.
answers: Does it answer?
    broken: {it} -> as oneadmin: ssh {machine} true; or onehost offline {machine}
[python!]  The same of one that answers.
python: Has it Python 3.9?
    broken: python3 is {it} -> as root on {machine}: {python}
[machine]  The same of one that can answer all.
needed: Has it the programs that are needed?
    broken: {program} is not installed -> as root on {machine}: {install}
wanted: Has it those that some features want?
    warning: {program} is not installed -> as root on {machine}: {install}
qemu: Has its QEMU extended_l2?
    broken: QEMU {it} is older than 5.2: no extended_l2 -> as root on {machine}: {update}
user: Does ssh enter as the user of the front-end?
    warning: ssh enters as {user}, not as {own}
    -> as {own} on {front_end}: mend User for {machine} in ~/.ssh/config
[synced!]  The package there and on the front-end.
package: Is the package there?
    broken: semishared is not there -> as oneadmin: onehost sync --force
version: Is it of the same version?
    broken: semishared {there} is there, the front-end has {own} -> as oneadmin: onehost sync --force
synced: Is it the same?
    broken: not synced: {it} is not the front-end's -> as oneadmin: onehost sync --force
[libvirt!]  What libvirt says there.
libvirt: Does it answer?
    broken: libvirt does not answer: {it} -> as root on {machine}: systemctl restart {daemon}
[libvirt-set-up]  The same of one that answers, and the keys of datastores on Ceph.
libvirt-old: Is it one that guests were tried under?
    broken: libvirt {it} is older than 7.0 -> as root on {machine}: update libvirt
emulator-old: Is its QEMU one that guests were tried under?
    broken: guests run in QEMU {it}, which is older than 5.2 -> as root on {machine}: {update}
emulator-user: Does QEMU run as the user whose the disks are?
    broken: libvirt runs QEMU as {user}, not as {own}: it cannot open disks
    -> in /etc/libvirt/qemu.conf on {machine}, as OpenNebula's package for hosts has it: user = "{own}",
    group = "{own}", dynamic_ownership = 0; then as root: systemctl restart {daemon}
secrets: Does it know the keys of Ceph?
    broken: libvirt does not know the secret {it} -> docs/how-to/ceph.md, 4. libvirt
selinux: Is QEMU confined as it was tried?
    warning: libvirt confines QEMU by SELinux: nobody has tried that with semishared
    -> docs/how-to/apparmor.md, SELinux
[store!]  A mounted store as a machine sees it.
store-answers: Does it answer?
    broken: store {path}: {it} -> as root on {machine}: mount {path} (docs/how-to/nfs.md)
store-same: Is it the one that the front-end has?
    broken: store {path} {it} -> as root on {machine}: mount {path}
store-marker: Has it its marker?
    broken: store {path} is not there, or has lost its marker
    -> as root on {machine}: mount {path}; or {setup}
store-own: Is it this datastore's?
    broken: store {path} is another datastore's: its marker says {it} -> {remount}
store-writable: Can it be written?
    broken: store {path} cannot be written by {user}: {reason}
    -> as root where it is exported: chown oneadmin: {path}, and export it read-write
[marking]  The same.
marked: Would be noticed that it is not mounted?
    warning: store {path} is not marked: that it is not mounted would not be noticed -> {setup}
apparmor: May QEMU open what is in it, where the export squashes root?
    warning: store {path} is closed to others: where the export squashes root, libvirt cannot tell AppArmor
    what QEMU may open
    -> as oneadmin: chmod o+x {path} (docs/how-to/apparmor.md)
[mount]  The options of its mount by NFS that are in force (docs/how-to/nfs.md says why).
nfs-version: Do QEMU's image locks hold between clients?
    broken: store {path}: NFS version {it}: between its clients QEMU's image locks do not hold; vers=4.2 is
    wanted
    -> {remount}
nfs-locks: Do others see its locks?
    broken: store {path}: mounted with {it}: no other host sees this one's locks -> {remount}
nfs-hard: Do guests wait while the server is away?
    warning: store {path}: mounted {it}: guests get I/O errors while the server is away; hard is wanted
    -> {remount}
nfs-answers: Are old answers told from true ones?
    warning: store {path}: mounted with softreval: while the server is away, old answers are taken for true
    -> {remount}
nfs-lookups: Are files of others seen at once?
    warning: store {path}: mounted without lookupcache=positive: a file that others have just made may seem
    absent for 30 s
    -> {remount}
[ceph]  A pool of Ceph as a machine sees it.
ceph-pool: Can it be listed?
    broken: pool {pool} cannot be listed: {it} -> docs/how-to/ceph.md, 3. Keys
[local!]  The machine's own disk.
local-answers: Can it be read?
    broken: local store: {it}
    -> as root on {machine}: dmesg; mend or mount its disk (docs/how-to/dead-host.md if it is lost)
local-read-only: Is it mounted to be written?
    broken: {where} is mounted read-only -> as root on {machine}: dmesg; mount -o remount,rw {where}
[local-room]  The same, of one that can be read, and what is to stay free on a host.
local-writable: Can oneadmin write it?
    broken: {where} cannot be written -> as root on {machine}: chown oneadmin: {where}
local-full: Is anything free?
    broken: {where} has {free} MiB free, {floor} MiB are to stay free
    -> semishared base prune --hosts {machine}; or migrate VMs away
local-floor: Is free what is to stay free?
    warning: {where} has {free} MiB free, {floor} MiB are to stay free
    -> semishared base prune --hosts {machine}; or migrate VMs away
local-inodes: Are there inodes?
    broken: {where} has no inodes left -> semishared gc; semishared base prune --hosts {machine}
[machines]  What all machines have signed that is to be each one's own.
one-machine: Is each machine one host?
    broken: {names} are one machine, whose memory and devices OpenNebula counts for each
    -> onehost delete all of its names but one, when they have no VMs
[cluster]  The QEMUs of the hosts of a cluster, by version.
qemu-mixed: Does a guest move live from each host to each other?
    warning: QEMU is {old} on {older}, {new} on {newer}: a VM that was started on the newer may have a machine
    type that the older lacks, and does not move there
    -> update QEMU on {older}; or name in the VM's template a machine type that both have (OS/MACHINE)
[processors]  The processors of the hosts of a cluster, and the guests that have one of these as theirs.
cpu-passthrough: May a guest with its host's CPU move live to each other host?
    warning: {guests} on {running} have their host's CPU (host-passthrough), and the hosts of its cluster have
    not the same: {kinds}. libvirt lets such a guest move live, and on another processor it may fail or crash
    -> power these VMs off to move them; or name a CPU_MODEL that all hosts have, or EVC_MODE of the cluster
    (docs/reference/support.md)
[shared]  What all machines have signed.
own-disk: Is each machine's own place on its own disk?
    broken: {place} is one directory on {names}: what is in {directories} has to be each machine's own
    -> as root on each: mount a disk of its own there (docs/how-to/nfs.md)
[root!]  A datastore of shares, and what the machine that makes them answers (diagnosis_shares.Made).
root-marked: Is its directory a root of shares?
    warning: {name}: {root} is no root of shares yet, so none can be made -> semishared share init {store}
root-answers: Can its shares be made?
    broken: {name}: {it} -> {mend}
root-cloud: Does the root say whose it is?
    warning: {name}: {root} does not say of which OpenNebula it is: another one may take it, and gc removes
    nothing there
    -> semishared share init {store}
[root-holds]  The same.
root-quotas: Are all shares held to their sizes?
    broken: {name}: {root}: {it} -> as root on {machine}: {mend}
root-promised: Is there room for all shares?
    warning: {name}: its shares may hold {promised}, and {root} {total}: who fills theirs takes others' room
    -> give it more room; docs/how-to/shares.md, Set it up
root-sudo: Does sudo permit what a root needs?
    broken: {name}: sudo does not permit: {it} -> docs/how-to/shares.md, its lines for sudoers
root-sudo-old: Does its sudo understand these lines?
    broken: {name}: sudo {it} knows no regular expressions in sudoers, which 1.9.10 has
    -> have shares made by a machine with a newer one: BRIDGE_LIST (docs/reference/platforms.md)
root-manager: Does Ceph's manager permit it?
    broken: {name}: Ceph's manager does not let client.{user} ask for: {it}
    -> docs/how-to/shares.md, A guest that is a client itself
root-bounds: Is bounded what a guest with a key of its own may write, and its harm?
    warning: {name}: guests write to pool {pool} themselves, and {it}
    -> docs/how-to/shares.md, What bounds a client that means harm
[root-seen!]  A root of shares as a host sees it.
share-answers: Does it answer?
    broken: shares of datastore {store}: {root}: {it}
    -> as root on {machine}: mount {root} (docs/how-to/shares.md)
share-mounted: Is it mounted?
    broken: shares of datastore {store}: {root} is not mounted
    -> as root on {machine}: mount {root} (docs/how-to/shares.md)
share-own: Is it this datastore's?
    broken: shares of datastore {store}: {root} is the root of another datastore
    -> as root on {machine}: mount {root} (docs/how-to/shares.md)
share-options: Is it mounted so that guests may have it?
    broken: shares of datastore {store}: {root} is mounted without {it}: no guest gets a share
    -> as root on {machine}: mount -o remount,nosuid,nodev {root}; and in /etc/fstab
share-chown: May root of guests chown?
    warning: shares of datastore {store}: {root} is mounted without fuse_default_permissions: root of guests
    cannot chown
    -> as root on {machine}: mount {root} anew (docs/how-to/shares.md, CephFS)
[share-host]  A host that may have shares, and its libvirt.
virtiofsd: Is there a virtiofsd?
    broken: shares: there is no virtiofsd
    -> as root on {machine}: {install}
namespaces: May guests' users be kept in user namespaces?
    broken: shares: the kernel allows no user namespaces, which guests' users are kept in
    -> as root on {machine}: sysctl user.max_user_namespaces=15000; and in /etc/sysctl.d
ids-free: Are the ids of guests' users nobody else's?
    warning: shares: {path} gives {first} to {last} to {user}, and they are users of guests, of user {owner}
    of OpenNebula on
    -> as root on {machine}: usermod --del-sub{kind} {first}-{last} {user}
qemu-virtiofs: Has QEMU virtiofs?
    broken: shares: libvirt says that QEMU there has no virtiofs
    -> as root on {machine}: update qemu and libvirt
wrapper: May libvirt start our virtiofsd?
    broken: shares: AppArmor does not let libvirt start {wrapper}
    -> docs/how-to/shares.md, the line for /etc/apparmor.d/local/usr.sbin.{daemon}
"""
"""`[facts]`, with `!` if the first row that finds something ends the section; then rows `name: question`,
`severity: message -> what mends it`.

In braces: `machine`, what else the caller gives, and what the judging function has returned.
"""


class Finding(NamedTuple):
    """One thing that is not as it should be."""

    severity: int
    machine: str
    what: str
    mend: str
    """The command that mends it, or what to do."""


class Check(NamedTuple):
    """One row."""

    name: str
    question: str
    severity: int
    what: str
    mend: str


def rows(text: str) -> dict[str, list[Check]]:
    """Return the rows of a catalogue, by the facts that they need."""
    found: dict[str, list[Check]] = {}
    for section in re.split(r"(?m)^\[", text)[1:]:
        facts, _, rest = section.partition("]")
        found[facts] = []
        for row in re.split(r"\n(?=\S)", rest.strip())[1:]:
            title, _, said = row.partition("\n")
            name, _, question = title.partition(": ")
            severity, _, said = " ".join(said.split()).partition(": ")
            what, _, mend = said.partition(" -> ")
            found[facts].append(Check(name, question, WORDS.index(severity), what, mend))
    return found


CHECKS = rows(CATALOGUE)
Judge = Callable[[Any], object]
"""What is wrong with facts, nothing if all is well: a text, which rows call `it`, fields, or a list of these,
one for each finding.
"""


def judged(
    of: str, judges: Mapping[str, Judge], facts: object, machine: str, **about: object
) -> list[Finding]:
    """Return what the rows of section `of` find wrong with these facts."""
    found: list[Finding] = []
    for check in CHECKS[of]:
        said = judges[check.name](facts)
        for one in said if isinstance(said, list) else [said] if said else []:
            fields = {"machine": machine, **about, **(one if isinstance(one, dict) else {"it": one})}
            what, mend = check.what.format(**fields), check.mend.format(**fields)
            found.append(Finding(check.severity, str(fields["machine"]), what, mend))
        if found and of.endswith("!"):
            break
    return found
