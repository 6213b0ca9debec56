// SPDX-License-Identifier: Apache-2.0
// Packets to CD-ROMs on IDE (ATA/ATAPI-6, 9.8; SCSI MMC), and the one file of a disc that is looked for (ECMA-119).
#include "atapi.h"

enum { ERROR = 1, DATA = 8, BUSY_BIT = 0x80 };
enum { DATA_PORT = 0, FEATURES = 1, LENGTH_LOW = 4, LENGTH_HIGH = 5, DEVICE = 6, COMMAND = 7, STATUS = 7, CONTROL = 0x206 };

static u16 port_of(int unit) { return unit & 2 ? 0x170 : 0x1F0; }

static u8 status(u16 port)
{
    u8 found;
    while ((found = inb(port + STATUS)) & BUSY_BIT)
        ;
    return found;
}

static int packet(int unit, const u8 *command, void *to, u32 bytes)
{
    u16 port = port_of(unit), *out = to;
    outb(port + DEVICE, 0xA0 | (unit & 1) << 4);
    outb(port + FEATURES, 0);
    outb(port + LENGTH_LOW, 0);
    outb(port + LENGTH_HIGH, SECTOR >> 8);
    outb(port + COMMAND, 0xA0);
    if (!(status(port) & DATA))
        return 0;
    for (int i = 0; i < 6; i++)
        outw(port + DATA_PORT, command[2 * i] | command[2 * i + 1] << 8);
    while (bytes) {
        u8 now = status(port);
        if (now & ERROR || !(now & DATA))
            return 0;
        for (u32 part = inb(port + LENGTH_LOW) | inb(port + LENGTH_HIGH) << 8; part && bytes; part -= 2, bytes -= 2)
            *out++ = inw(port + DATA_PORT);
    }
    status(port);
    return 1;
}

u64 cdrom_bytes(int unit)
{
    u16 port = port_of(unit);
    u8 capacity[12] = {0x25}, said[8];
    if (q35) // it has no IDE
        return 0;
    outb(port + CONTROL, 2); // no interrupts
    outb(port + DEVICE, 0xA0 | (unit & 1) << 4);
    if (inb(port + STATUS) == 0xFF)
        return 0;
    outb(port + COMMAND, 0xA1); // IDENTIFY PACKET DEVICE
    if (!inb(port + STATUS) || inb(port + STATUS) & ERROR || !(status(port) & DATA))
        return 0;
    for (int i = 0; i < 256; i++)
        inw(port + DATA_PORT);
    for (int try = 0; try < 3; try++) // the first says that the medium is new
        if (packet(unit, capacity, said, sizeof said))
            return (((u64)said[0] << 24 | said[1] << 16 | said[2] << 8 | said[3]) + 1) * SECTOR;
    return 0;
}

int cdrom_read(int unit, u32 sector, u32 count, void *to)
{
    for (u8 *out = to; count; count--, sector++, out += SECTOR) {
        u8 read[12] = {0x28, 0, sector >> 24, sector >> 16, sector >> 8, sector, 0, 0, 1};
        if (!packet(unit, read, out, SECTOR))
            return 0;
    }
    return 1;
}

static int sectors(u32 bytes) { return (bytes + SECTOR - 1) / SECTOR; }

static u32 word(const u8 *at) { return at[0] | at[1] << 8 | at[2] << 16 | (u32)at[3] << 24; }

static int begins(const u8 *text, const char *with)
{
    while (*with && *text == (u8)*with)
        text++, with++;
    return !*with;
}

u32 context(void *to, u32 most)
{
    u8 *buffer = to;
    for (int unit = 0; unit < UNITS; unit++) {
        // The primary descriptor: its label, where the root directory is, and how long.
        if (!cdrom_bytes(unit) || !cdrom_read(unit, 16, 1, buffer) || !begins(buffer + 40, "CONTEXT "))
            continue;
        u32 at = word(buffer + 158), bytes = word(buffer + 166);
        if (bytes > most - SECTOR || !cdrom_read(unit, at, sectors(bytes), buffer))
            continue;
        for (u8 *entry = buffer; entry < buffer + bytes; entry += *entry ? *entry : 1) {
            if (*entry < 34 || !begins(entry + 33, "CONTEXT.SH"))
                continue;
            at = word(entry + 2), bytes = word(entry + 10);
            return bytes <= most - SECTOR && cdrom_read(unit, at, sectors(bytes), buffer) ? bytes : 0;
        }
    }
    return 0;
}
