// SPDX-License-Identifier: Apache-2.0
// CD-ROMs on IDE, by port I/O.
#ifndef ATAPI_H
#define ATAPI_H
#include "machine.h"

enum { UNITS = 4, SECTOR = 2048 };

u64 cdrom_bytes(int unit);                                  // 0 for none
int cdrom_read(int unit, u32 sector, u32 count, void *to);  // whether it worked
u32 context(void *to, u32 most);                            // bytes of context.sh of the disc CONTEXT; 0 for none
#endif
