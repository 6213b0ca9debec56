// SPDX-License-Identifier: Apache-2.0
// Disks: modern virtio-blk on PCI (of transitional devices too).
#ifndef VIRTIO_H
#define VIRTIO_H
#include "machine.h"

enum { DISKS = 26, REQUESTS = 4, QUEUE = 16 };
enum { READ = 0, WRITE = 1, FLUSH = 4, DISCARD = 11 };
enum { IO_ERROR = 1, UNSUPPORTED = 2, GONE = 0xFE, BUSY = 0xFF }; // how a request ends: the first two are the device's words

// virtio 1.1, 2.6: a queue of descriptors, three for each request.
struct queue {
    struct {
        u64 at;
        u32 bytes;
        u16 flags, next;
    } d[QUEUE];
    struct {
        u16 flags, index, ring[QUEUE];
    } available;
    _Alignas(4) struct {
        u16 flags, index;
        struct {
            u32 id, bytes;
        } ring[QUEUE];
    } used;
};

struct request {
    u32 type, zero;
    u64 sector;
    volatile u8 status, busy;
};

struct disk {
    int bdf, there, readonly, discards;
    char name[8];
    u64 notify, config;
    u16 seen;
    struct request r[REQUESTS];
    _Alignas(4096) volatile struct queue q;
};

extern struct disk disks[DISKS];

u64 size_of(struct disk *d);
int submit(struct disk *d, int type, u64 sector, void *data, u32 bytes); // the number of the request, -1 for none
int reap(struct disk *d);                                                // whether a request has ended
void rescan(void);                                                       // see which disks are there
void flush_all(void);
#endif
