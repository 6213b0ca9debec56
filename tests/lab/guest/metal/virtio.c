// SPDX-License-Identifier: Apache-2.0
// Find disks on PCI, give an address to those that came after the firmware had looked, and hand requests to them.
#include "virtio.h"

enum { NEXT = 1, DEVICE_WRITES = 2 };              // flags of descriptors
enum { READONLY = 1 << 5, FLUSHES = 1 << 9, DISCARDS = 1 << 13 };

struct disk disks[DISKS];

// ---- PCI -------------------------------------------------------------------------------------------------------------

static void point_at(int bdf, int reg) { outl(0xCF8, 0x80000000u | bdf << 8 | (reg & 0xFC)); }

static u32 pci(int bdf, int reg)
{
    point_at(bdf, reg);
    return inl(0xCFC);
}

static void pci_set(int bdf, int reg, u32 value)
{
    point_at(bdf, reg);
    outl(0xCFC, value);
}

static u8 pci8(int bdf, int reg) { return pci(bdf, reg) >> 8 * (reg & 3); }
static u64 bar(int bdf, int number) { return pci(bdf, 0x10 + 4 * number) & ~15u; }

// QEMU's virtio-blk has its MSI-X table in BAR 1 and its registers in BAR 4, of 16 KiB.
static void give_address(int bdf, u64 window)
{
    if (!bar(bdf, 1))
        pci_set(bdf, 0x14, window);
    if (!bar(bdf, 4)) {
        pci_set(bdf, 0x20, window + 0x4000);
        pci_set(bdf, 0x24, 0);
    }
    pci_set(bdf, 4, (pci(bdf, 4) & 0xFFFF) | 6); // memory, and access to ours
}

// ---- one disk --------------------------------------------------------------------------------------------------------

u64 size_of(struct disk *d) { return (R32(d->config) | (u64)R32(d->config + 4) << 32) * 512; }

// As Linux: the first letter that no disk has.
static void name_it(struct disk *d)
{
    char letter = 'a';
    for (int i = 0; i < DISKS; i++)
        if (disks[i].there && disks[i].name[2] == letter)
            letter++, i = -1;
    memcpy(d->name, "vda", 4);
    d->name[2] = letter;
}

// virtio 1.1, 3.1 and 4.1: capabilities tell where the registers are; reset, agree on features, set up one queue, go.
static void start(struct disk *d, int bdf, u64 window)
{
    enum { COMMON = 1, NOTIFY, ISR, CONFIG };
    u64 at[CONFIG + 1] = {0}, msix = 0;
    u32 multiplier = 0;
    memset(d, 0, sizeof *d);
    d->bdf = bdf;
    give_address(bdf, window);
    for (int cap = pci8(bdf, 0x34); cap; cap = pci8(bdf, cap + 1)) {
        int id = pci8(bdf, cap), kind = pci8(bdf, cap + 3);
        if (id == 0x11) { // MSI-X
            u32 table = pci(bdf, cap + 4);
            msix = bar(bdf, table & 7) + (table & ~7u);
            pci_set(bdf, cap, (pci(bdf, cap) & 0x3FFFFFFF) | 0x80000000u);
        }
        if (id != 9 || kind < COMMON || kind > CONFIG)
            continue;
        at[kind] = bar(bdf, pci8(bdf, cap + 4)) + pci(bdf, cap + 8);
        if (kind == NOTIFY)
            multiplier = pci(bdf, cap + 16);
    }
    R32(msix) = 0xFEE00000; // to the one processor, as vector 0x43
    R32(msix + 4) = 0;
    R32(msix + 8) = 0x43;
    R32(msix + 12) = 0;

    u64 common = at[COMMON];
    enum { DRIVER_KNOWS = 3, FEATURES_AGREED = 11, GO = 15 };
    R8(common + 20) = 0;
    while (R8(common + 20))
        ;
    R8(common + 20) = DRIVER_KNOWS;
    R32(common) = 0;
    u32 features = R32(common + 4) & (READONLY | FLUSHES | DISCARDS);
    R32(common + 8) = 0;
    R32(common + 12) = features;
    R32(common + 8) = 1;
    R32(common + 12) = 1; // version 1
    R8(common + 20) = FEATURES_AGREED;
    R16(common + 22) = 0;
    R16(common + 24) = QUEUE;
    R16(common + 26) = 0;
    R64(common + 32) = (uintptr_t)d->q.d;
    R64(common + 40) = (uintptr_t)&d->q.available;
    R64(common + 48) = (uintptr_t)&d->q.used;
    R16(common + 28) = 1;
    R8(common + 20) = GO;

    d->notify = at[NOTIFY] + R16(common + 30) * multiplier;
    d->config = at[CONFIG];
    d->readonly = !!(features & READONLY);
    d->discards = !!(features & DISCARDS);
    name_it(d);
    d->there = 1;
}

int submit(struct disk *d, int type, u64 sector, void *data, u32 bytes)
{
    int i = 0;
    while (i < REQUESTS && d->r[i].busy)
        i++;
    if (i == REQUESTS || !d->there)
        return -1;
    struct request *r = d->r + i;
    u16 first = 3 * i;
    r->type = type, r->zero = 0, r->sector = sector, r->status = BUSY, r->busy = 1;
    volatile struct queue *q = &d->q;
    q->d[first].at = (uintptr_t)r, q->d[first].bytes = 16, q->d[first].flags = NEXT, q->d[first].next = first + (bytes ? 1 : 2);
    q->d[first + 1].at = (uintptr_t)data, q->d[first + 1].bytes = bytes, q->d[first + 1].next = first + 2;
    q->d[first + 1].flags = NEXT | (type == READ ? DEVICE_WRITES : 0);
    q->d[first + 2].at = (uintptr_t)&r->status, q->d[first + 2].bytes = 1, q->d[first + 2].flags = DEVICE_WRITES;
    q->available.ring[q->available.index % QUEUE] = first;
    FENCE();
    q->available.index++;
    FENCE();
    R16(d->notify) = 0;
    return i;
}

int reap(struct disk *d)
{
    u16 before = d->seen;
    for (; d->there && d->seen != d->q.used.index; d->seen++)
        d->r[d->q.used.ring[d->seen % QUEUE].id / 3].busy = 0;
    return d->seen != before;
}

// ---- all of them -----------------------------------------------------------------------------------------------------

static int number_of(int bdf) // that of the disk there, DISKS for none
{
    int i = 0;
    while (i < DISKS && !(disks[i].there && disks[i].bdf == bdf))
        i++;
    return i;
}

static void scan_bus(int bus, u64 window, u8 *seen)
{
    for (int bdf = bus << 8; bdf < (bus + 1) << 8; bdf++) {
        u32 id = pci(bdf, 0);
        u8 type = id == ~0u ? 0 : pci8(bdf, 0x0E);
        if ((type & 0x7F) == 1 && pci8(bdf, 0x19)) // a bridge, and the bus behind it
            scan_bus(pci8(bdf, 0x19), (u64)(pci(bdf, 0x20) & 0xFFF0) << 16, seen);
        if (id == 0x10011AF4 || id == 0x10421AF4) {
            int i = number_of(bdf);
            for (int free = 0; i == DISKS && free < DISKS; free++)
                if (!disks[free].there)
                    start(disks + (i = free), bdf, bus ? window : 0xE0000000u + (bdf << 12));
            if (i < DISKS)
                seen[i] = 1;
        }
        if (!(bdf & 7) && !(type & 0x80))
            bdf += 7; // it has no other functions
    }
}

void rescan(void)
{
    u8 seen[DISKS] = {0};
    q35 = pci(0, 0) == 0x29C08086;
    scan_bus(0, 0, seen);
    for (int i = 0; i < DISKS; i++) {
        if (!disks[i].there || seen[i])
            continue;
        disks[i].there = 0;
        for (struct request *r = disks[i].r; r < disks[i].r + REQUESTS; r++)
            if (r->busy)
                r->status = GONE, r->busy = 0;
    }
}
