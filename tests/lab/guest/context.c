// SPDX-License-Identifier: Apache-2.0
// Find the ISO with the label CONTEXT and read its context.sh. On IDE, SCSI and virtio the kernel has a block device for
// it; the SATA CD-ROM of a q35 machine it has not, because Debian's cloud kernel comes without an AHCI driver. As that is
// where OpenNebula puts the context by default, the AHCI controller is driven from here, one sector at a time, polling.
#define _GNU_SOURCE
#include "context.h"
#include <dirent.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SECTOR = 2048, PAGE = 4096, MOST = 1 << 20 };

struct drive {
    int fd;                            // a block device, or -1:
    volatile uint32_t *port;           // a port of an AHCI controller
    unsigned char *command, *data;     // one page each
    uint64_t command_address, data_address; // where the controller finds them
};

// ---- AHCI: offsets in 32 bit words, see the AHCI specification 1.3.1, chapters 3 and 4 -----------------------------------

enum { CLB = 0, CLBU, FB, FBU, IS, IE, CMD, TFD = 8, SIG, SERR = 12, CI = 14 };
enum { ST = 1, FRE = 1 << 4, FR = 1 << 14, CR = 1 << 15, BUSY = 0x88, ATAPI = (int)0xEB140101 };

static uint64_t physical(void *page)
{
    uint64_t entry = 0;
    int fd = open("/proc/self/pagemap", O_RDONLY);
    if (fd < 0 || pread(fd, &entry, 8, (uintptr_t)page / PAGE * 8) != 8)
        entry = 0;
    if (fd >= 0)
        close(fd);
    return (entry & ((1ull << 55) - 1)) * PAGE;
}

static int until_clear(volatile uint32_t *word, uint32_t bits)
{
    for (int i = 0; i < 20000; i++) {
        if (!(*word & bits))
            return 0;
        usleep(50);
    }
    return -1;
}

static int ahci_read(struct drive *d, uint32_t lba, void *to)
{
    uint32_t *header = (uint32_t *)d->command, *prd = (uint32_t *)(d->command + 2048 + 0x80);
    unsigned char *table = d->command + 2048;
    uint64_t at = d->command_address + 2048;

    memset(d->command, 0, PAGE);
    header[0] = 5 | 1 << 5 | 1 << 16; // five words of command, for a packet device, one memory range
    header[2] = (uint32_t)at;
    header[3] = at >> 32;
    memcpy(table, (unsigned char[]){0x27, 0x80, 0xA0, 1, 0, 0, 8, 0xA0}, 8);                   // PACKET, by DMA
    memcpy(table + 0x40, (unsigned char[]){0x28, 0, lba >> 24, lba >> 16, lba >> 8, lba, 0, 0, 1}, 9); // READ(10)
    prd[0] = (uint32_t)d->data_address;
    prd[1] = d->data_address >> 32;
    prd[3] = SECTOR - 1;
    __sync_synchronize();
    d->port[SERR] = ~0u;
    d->port[IS] = ~0u;
    if (until_clear(d->port + TFD, BUSY))
        return -1;
    d->port[CI] = 1;
    // After an error the controller leaves CI set; a fresh medium may answer its first command so.
    for (int i = 0; i < 20000 && d->port[CI] & 1; i++) {
        if (d->port[TFD] & 1)
            return -1;
        usleep(50);
    }
    if (d->port[CI] & 1 || d->port[TFD] & 1)
        return -1;
    __sync_synchronize();
    memcpy(to, d->data, SECTOR);
    return 0;
}

static int ahci_start(struct drive *d)
{
    d->port[CMD] &= ~ST;
    if (until_clear(d->port + CMD, CR))
        return -1;
    d->port[CMD] &= ~FRE;
    if (until_clear(d->port + CMD, FR))
        return -1;
    d->port[IE] = 0;
    d->port[CLB] = (uint32_t)d->command_address;
    d->port[CLBU] = d->command_address >> 32;
    d->port[FB] = (uint32_t)(d->command_address + 1024);
    d->port[FBU] = (d->command_address + 1024) >> 32;
    d->port[CMD] |= FRE;
    d->port[CMD] |= ST;
    return 0;
}

// ---- ISO 9660 --------------------------------------------------------------------------------------------------------

static int read_sector(struct drive *d, uint32_t lba, void *to)
{
    if (d->fd >= 0)
        return pread(d->fd, to, SECTOR, (off_t)lba * SECTOR) == SECTOR ? 0 : -1;
    for (int tries = 0; tries < 3; tries++) // the first ones may only report "medium changed"
        if (!ahci_start(d) && !ahci_read(d, lba, to))
            return 0;
    return -1;
}

static uint32_t word(const unsigned char *p) { return p[0] | p[1] << 8 | p[2] << 16 | (uint32_t)p[3] << 24; }

static char *read_extent(struct drive *d, uint32_t lba, uint32_t size)
{
    uint32_t sectors = (size + SECTOR - 1) / SECTOR;
    char *data = size <= MOST ? malloc((size_t)sectors * SECTOR + 1) : NULL;
    for (uint32_t i = 0; data && i < sectors; i++)
        if (read_sector(d, lba + i, data + (size_t)i * SECTOR)) {
            free(data);
            return NULL;
        }
    if (data)
        data[size] = 0;
    return data;
}

static char *context_of(struct drive *d)
{
    unsigned char volume[SECTOR];
    if (read_sector(d, 16, volume) || memcmp(volume + 40, "CONTEXT ", 8))
        return NULL;
    uint32_t size = word(volume + 156 + 10);
    unsigned char *root = (unsigned char *)read_extent(d, word(volume + 156 + 2), size);
    char *text = NULL;
    for (uint32_t at = 0; root && !text && at + 33 < size;) {
        unsigned char *entry = root + at;
        if (!entry[0]) { // entries do not cross sectors
            at = (at / SECTOR + 1) * SECTOR;
            continue;
        }
        if (!strncasecmp((char *)entry + 33, "CONTEXT.SH", 10))
            text = read_extent(d, word(entry + 2), word(entry + 10));
        at += entry[0];
    }
    free(root);
    return text;
}

// ---- where to look ---------------------------------------------------------------------------------------------------

static char *from_block_devices(void)
{
    char path[300], *text = NULL;
    DIR *dir = opendir("/sys/block");
    for (struct dirent *e; dir && !text && (e = readdir(dir));) {
        snprintf(path, sizeof path, "/dev/%s", e->d_name);
        struct drive d = {.fd = open(path, O_RDONLY | O_CLOEXEC)};
        if (d.fd < 0)
            continue;
        text = context_of(&d);
        close(d.fd);
    }
    if (dir)
        closedir(dir);
    return text;
}

static char *from_controller(const char *name)
{
    char path[400];
    unsigned char command = 0;
    int fd;

    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/enable", name);
    if ((fd = open(path, O_WRONLY)) < 0)
        return NULL;
    int enabled = write(fd, "1", 1) == 1;
    close(fd);
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/config", name);
    if (!enabled || (fd = open(path, O_RDWR)) < 0)
        return NULL;
    int master = pread(fd, &command, 1, 4) == 1 && (command |= 6, pwrite(fd, &command, 1, 4) == 1); // memory, bus master
    close(fd);
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/resource5", name);
    if (!master || (fd = open(path, O_RDWR | O_SYNC)) < 0)
        return NULL;
    volatile uint32_t *registers = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    unsigned char *pages =
        mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_LOCKED | MAP_POPULATE, -1, 0);
    if (registers == MAP_FAILED || pages == MAP_FAILED)
        return NULL;
    memset(pages, 0, 2 * PAGE);
    registers[1] |= 1u << 31; // AHCI mode
    char *text = NULL;
    for (int i = 0; i < 6 && !text; i++) {
        struct drive d = {-1, registers + 64 + 32 * i, pages, pages + PAGE, physical(pages), physical(pages + PAGE)};
        if (!(registers[3] & 1u << i) || !d.command_address || !d.data_address)
            continue;
        // A drive says what it is only once the port receives: start it before looking.
        if (!ahci_start(&d) && !until_clear(d.port + TFD, BUSY) && d.port[SIG] == (uint32_t)ATAPI)
            text = context_of(&d);
    }
    munmap((void *)registers, PAGE);
    munmap(pages, 2 * PAGE);
    return text;
}

char *read_context(void)
{
    char path[300], class[16] = "", *text = from_block_devices();
    DIR *dir = opendir("/sys/bus/pci/devices");
    for (struct dirent *e; dir && !text && (e = readdir(dir));) {
        snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/class", e->d_name);
        FILE *f = fopen(path, "r");
        if (f && fgets(class, sizeof class, f) && !strncmp(class, "0x010601", 8))
            text = from_controller(e->d_name);
        if (f)
            fclose(f);
    }
    if (dir)
        closedir(dir);
    return text;
}
