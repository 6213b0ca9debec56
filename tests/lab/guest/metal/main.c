// SPDX-License-Identifier: Apache-2.0
// A lab guest without an operating system, for tests whose guest writes and reads blocks: it boots in a thirtieth of the time that
// Linux takes an emulated processor. It obeys those commands of ../agent.c that need no kernel, and answers them as that does:
// ping, disks, write, check, sum, discard, loop, loop-stat, loop-stop, context (on IDE), sync, uptime, poweroff.
// One processor, one thread; disks are virtio-blk on PCI of an i440fx or q35, by name as in Linux; below 3 GiB of memory.
#include "../content.h"
#include "../sha256.h"
#include "atapi.h"
#include "loops.h"

enum { WORDS = 8, LINE = 4096, TOO_FAR = 28 };

static _Alignas(4096) u8 buffer[CHUNK];

static const char *why(int ended)
{
    switch (ended) {
    case GONE:
        return "No such device";
    case UNSUPPORTED:
        return "Operation not supported";
    case TOO_FAR:
        return "No space left on device";
    default:
        return "Input/output error";
    }
}

static int wait(struct disk *d, int type, u64 sector, void *data, u32 bytes)
{
    int i = submit(d, type, sector, data, bytes);
    if (i < 0)
        return d->there ? IO_ERROR : GONE;
    while (d->r[i].busy)
        pump();
    return d->r[i].status;
}

void flush_all(void)
{
    for (int i = 0; i < DISKS; i++)
        if (disks[i].there && !disks[i].readonly)
            wait(disks + i, FLUSH, 0, NULL, 0);
}

// ---- disks and discs -------------------------------------------------------------------------------------------------

struct medium {
    struct disk *disk; // NULL:
    int unit;          // that CD-ROM
    u64 bytes;
};

// sr0 is the first CD-ROM there is.
static int find(const char *name, struct medium *m)
{
    m->disk = NULL;
    m->bytes = 0;
    if (name[0] == 's' && name[1] == 'r') {
        int number = name[2] - '0';
        for (m->unit = 0; m->unit < UNITS; m->unit++)
            if ((m->bytes = cdrom_bytes(m->unit)) && !number--)
                return 1;
        return 0;
    }
    for (int i = 0; i < DISKS && !m->disk; i++)
        if (disks[i].there && equal(disks[i].name, name))
            m->disk = disks + i, m->bytes = size_of(disks + i);
    return m->disk != NULL;
}

static int transfer(struct medium *m, int type, u64 kib, u64 count)
{
    if ((kib + count) * KIB > m->bytes)
        return TOO_FAR;
    if (m->disk)
        return wait(m->disk, type, kib * 2, buffer, count * KIB);
    // whole sectors only, as a CD-ROM has them
    return kib % 2 || count % 2 || !cdrom_read(m->unit, kib / 2, count / 2, buffer) ? IO_ERROR : 0;
}

static void list(void)
{
    u64 bytes, discs = 0;
    say("OK");
    for (int unit = 0; unit < UNITS; unit++)
        if ((bytes = cdrom_bytes(unit)))
            say(" sr%u:%u", discs++, bytes);
    for (char letter = 'a'; letter <= 'z'; letter++)
        for (int i = 0; i < DISKS; i++)
            if (disks[i].there && disks[i].name[2] == letter)
                say(" %s:%u", disks[i].name, size_of(disks + i));
    put('\n');
}

static void show_context(void)
{
    u32 bytes = context(buffer, CHUNK);
    if (!bytes) {
        answer("ERR no context ISO (label CONTEXT, file context.sh)");
        return;
    }
    say("OK ");
    for (u32 i = 0; i < bytes; i++)
        if (buffer[i] == '\n')
            say("\\n");
        else if (buffer[i] == '\\')
            say("\\\\");
        else
            put(buffer[i]);
    put('\n');
}

// ---- commands --------------------------------------------------------------------------------------------------------

static u64 part(u64 left) { return left < CHUNK / KIB ? left : CHUNK / KIB; }

static void write_range(struct medium *m, const char *seed, u64 kib, u64 count)
{
    int ended;
    for (u64 done = 0; done < count; done += CHUNK / KIB) {
        fill(buffer, equal(seed, "zero"), seed_of(seed), kib + done, part(count - done));
        if ((ended = transfer(m, WRITE, kib + done, part(count - done)))) {
            answer("ERR write at KiB %u: %s", kib + done, why(ended));
            return;
        }
    }
    if ((ended = wait(m->disk, FLUSH, 0, NULL, 0)))
        answer("ERR flush: %s", why(ended));
    else
        answer("OK %u KiB written", count);
}

static int same_kib(const u64 *a, const u64 *b)
{
    for (int i = 0; i < KIB / 8; i++)
        if (a[i] != b[i])
            return 0;
    return 1;
}

static void check_range(struct medium *m, const char *seed, u64 kib, u64 count)
{
    static u64 expected[KIB / 8];
    u64 bad = 0, first = 0;
    for (u64 done = 0; done < count; done += CHUNK / KIB) {
        u64 n = part(count - done);
        memset(buffer, 0x5A, n * KIB); // what a read that does nothing would leave
        int ended = transfer(m, READ, kib + done, n);
        if (ended) {
            answer("ERR read at KiB %u: %s", kib + done, why(ended));
            return;
        }
        for (u64 k = 0; k < n; k++) {
            fill(expected, equal(seed, "zero"), seed_of(seed), kib + done + k, 1);
            if (!same_kib(expected, (u64 *)(buffer + k * KIB)) && !bad++)
                first = kib + done + k;
        }
    }
    if (bad)
        answer("ERR %u of %u KiB differ, the first at KiB %u", bad, count, first);
    else
        answer("OK %u KiB as written", count);
}

static void sum(struct medium *m, u64 kib, u64 count)
{
    u32 h[8];
    memcpy(h, sha_begin, sizeof h);
    for (u64 done = 0; done < count; done += CHUNK / KIB) {
        u64 n = part(count - done);
        int ended = transfer(m, READ, kib + done, n);
        if (ended) {
            answer("ERR read at KiB %u: %s", kib + done, why(ended));
            return;
        }
        for (u64 i = 0; i < n * KIB; i += 64)
            sha_block(h, buffer + i);
    }
    sha_end(h, count * KIB);
    say("OK ");
    for (int i = 0; i < 8; i++)
        say("%x", h[i]);
    put('\n');
}

static void discard(struct disk *d, u64 kib, u64 count)
{
    static struct {
        u64 sector;
        u32 sectors, flags;
    } range;
    range.sector = kib * 2, range.sectors = count * 2, range.flags = 0;
    int ended = d->discards ? wait(d, DISCARD, 0, &range, sizeof range) : UNSUPPORTED;
    if (ended)
        answer("ERR discard: %s", why(ended));
    else
        answer("OK discarded");
}

static u64 number(char **w, int n, int i, u64 otherwise)
{
    u64 value = 0;
    if (i >= n)
        return otherwise;
    for (const char *c = w[i]; *c >= '0' && *c <= '9'; c++)
        value = 10 * value + *c - '0';
    return value;
}

static void loop_start(char **w, int n)
{
    u64 base = number(w, n, 3, 0), count = number(w, n, 4, 0);
    int reads = equal(w[2], "read");
    struct medium m;
    if (equal(w[1], "memory")) {
        loop_memory(number(w, n, 2, 1), base);
        return;
    }
    if (!find(w[1], &m) || !m.disk || (m.disk->readonly && !reads) || m.bytes < (base + BLOCK_KIB) * KIB) {
        answer("ERR open %s: %s", w[1], !m.disk ? "No such file or directory" : m.disk->readonly ? "Operation not permitted" : "too small");
        return;
    }
    count = count ? count : 16 * 1024;
    if ((base + count) * KIB > m.bytes)
        count = m.bytes / KIB - base;
    if (reads && count < CHUNK / KIB)
        answer("ERR %s: less than is read at once", w[1]);
    else if (reads)
        loop_read(m.disk, base, count / (CHUNK / KIB));
    else
        loop_write(m.disk, w[2], base, count / BLOCK_KIB, number(w, n, 5, 50));
}

static void on_disk(char **w, int n)
{
    if (n >= 3 && equal(w[0], "loop")) {
        loop_start(w, n);
        return;
    }
    if (equal(w[0], "loop-stat") || equal(w[0], "loop-stop")) {
        struct loop *l = loop_of(w[1]);
        if (l)
            loop_report(l, equal(w[0], "loop-stop"));
        else // then it has begun anew
            answer("ERR no loop on %s: this guest is up for %u ms", w[1], now_ms());
        return;
    }
    struct medium m;
    int writes = equal(w[0], "write") || equal(w[0], "discard");
    if (!find(w[1], &m) || (writes && (!m.disk || m.disk->readonly)))
        answer("ERR open %s: %s", w[1], m.bytes ? "Operation not permitted" : "No such file or directory");
    else if (equal(w[0], "write") && n == 5)
        write_range(&m, w[2], number(w, n, 3, 0), number(w, n, 4, 0));
    else if (equal(w[0], "check") && n == 5)
        check_range(&m, w[2], number(w, n, 3, 0), number(w, n, 4, 0));
    else if (equal(w[0], "sum") && (n == 2 || n == 4))
        sum(&m, number(w, n, 2, 0), number(w, n, 3, m.bytes / KIB));
    else if (equal(w[0], "discard") && n == 4)
        discard(m.disk, number(w, n, 2, 0), number(w, n, 3, 0));
    else
        answer("ERR what? %s (this guest has no operating system)", w[0]);
}

static void obey(char *line)
{
    char *w[WORDS] = {0};
    int n = 0;
    for (char *c = line; *c && n < WORDS;) {
        while (*c == ' ' || *c == '\r')
            *c++ = 0;
        if (*c)
            w[n++] = c;
        while (*c && *c != ' ' && *c != '\r')
            c++;
    }
    if (!n)
        return;
    if (equal(w[0], "ping")) {
        answer("OK %s", n > 1 ? w[1] : "pong");
        return;
    }
    acpi(); // disks that have come, or are to go
    if (equal(w[0], "disks")) {
        list();
    } else if (equal(w[0], "context")) {
        show_context();
    } else if (equal(w[0], "uptime")) {
        answer("OK %u", now_ms());
    } else if (equal(w[0], "sync")) {
        flush_all();
        answer("OK");
    } else if (equal(w[0], "poweroff")) {
        answer("OK");
        drain();
        power_off();
    } else if (n > 1) {
        on_disk(w, n);
    } else {
        answer("ERR what? %s (this guest has no operating system)", w[0]);
    }
}

void kernel(void)
{
    static char line[LINE];
    unsigned n = 0;
    machine_start();
    rescan();
    acpi_on();
    sha_start();
    answer("GUEST-UP");
    for (;; pump()) {
        for (char c; heard(&c);) {
            if (c != '\n') {
                line[n] = c;
                n += n < LINE - 1;
                continue;
            }
            line[n] = 0;
            n = 0;
            obey(line);
        }
    }
}
