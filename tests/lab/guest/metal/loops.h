// SPDX-License-Identifier: Apache-2.0
// What goes on in the background while commands are obeyed.
#ifndef LOOPS_H
#define LOOPS_H
#include "virtio.h"

enum { LOOPS = 12, BLOCKS = 32768 };

struct loop;
struct loop *loop_of(const char *name);
// Each answers the command. `blocks` are of 64 KiB from KiB `base` on; `rate`: per second.
void loop_write(struct disk *d, const char *seed, u64 base, u64 blocks, u64 rate);
void loop_read(struct disk *d, u64 base, u64 chunks); // of 256 KiB
void loop_memory(u64 mib, u64 rate);
void loop_report(struct loop *l, int stop);
void pump(void); // all that goes on by itself, then sleep until there is more
#endif
