// SPDX-License-Identifier: Apache-2.0
// Loads in the background, each a state machine with at most one request under way: whoever waits for anything, pumps them.
#include "loops.h"
#include "../content.h"

enum state { FREE, NEXT, WRITING, READING, FLUSHING, VERIFYING, ENDED };
enum kind { WRITES, READS, MEMORY };

static struct loop {
    char name[16];
    struct disk *d;
    enum state state;
    enum kind kind;
    int request, stop;
    u64 seed, base, blocks, rate, random, block, due, begun, slice;
    u64 writes, reads, errors, mismatches, gap_ms, last_ms, verified;
    u32 generation[BLOCKS];
    _Alignas(4096) u8 data[CHUNK];
} loops[LOOPS];

static u8 *const memory = (u8 *)0x1000000; // from 16 MiB on, above all that is ours
static u64 memory_end(void)                // the firmware's word, for less than 3 GiB
{
    outb(0x70, 0x34);
    u64 low = inb(0x71);
    outb(0x70, 0x35);
    return (low | inb(0x71) << 8) * 65536 + 0x1000000;
}

struct loop *loop_of(const char *name)
{
    for (int i = 0; i < LOOPS; i++)
        if (loops[i].state && equal(loops[i].name, name))
            return loops + i;
    return NULL;
}

static struct loop *begin(const char *name, struct disk *d, enum kind kind, u64 base, u64 blocks, u64 rate)
{
    struct loop *l = loops;
    while (l < loops + LOOPS && l->state)
        l++;
    if (l == loops + LOOPS || loop_of(name)) {
        answer("ERR %s", loop_of(name) ? "already running on this disk" : "too many loops");
        return NULL;
    }
    memset(l, 0, offsetof(struct loop, data));
    for (int i = 0; name[i] && i < 15; i++)
        l->name[i] = name[i];
    l->d = d, l->kind = kind, l->base = base, l->blocks = blocks, l->rate = rate ? rate : 50;
    l->random = 88172645463325252ull;
    l->begun = l->last_ms = now_ms();
    l->state = NEXT;
    answer("OK loop on %s", name);
    return l;
}

void loop_write(struct disk *d, const char *seed, u64 base, u64 blocks, u64 rate)
{
    if (blocks > BLOCKS) {
        answer("ERR %s: a loop writes at most %u blocks", d->name, (u64)BLOCKS);
        return;
    }
    struct loop *l = begin(d->name, d, WRITES, base, blocks, rate);
    if (l)
        l->seed = seed_of(seed);
}

void loop_read(struct disk *d, u64 base, u64 chunks) { begin(d->name, d, READS, base, chunks, 1); }

void loop_memory(u64 mib, u64 rate)
{
    if ((u64)memory + (mib << 20) > memory_end()) {
        answer("ERR memory: there is less");
        return;
    }
    if (begin("memory", NULL, MEMORY, 0, mib, rate))
        memset(memory, 0, mib << 20);
}

// ---- a step of one ---------------------------------------------------------------------------------------------------

static void request(struct loop *l, int type, enum state then)
{
    u32 kib = type == FLUSH ? 0 : l->kind == READS ? CHUNK / KIB : BLOCK_KIB;
    l->request = submit(l->d, type, kib ? (l->base + l->block * kib) * 2 : 0, l->data, kib * KIB);
    l->state = then;
}

static void compare(struct loop *l)
{
    static u64 expected[BLOCK_KIB * KIB / 8];
    const u64 *found = (const u64 *)l->data;
    size_t i = 0, words = sizeof expected / 8;
    fill(expected, 0, l->seed ^ mix(l->generation[l->block]), l->base + l->block * BLOCK_KIB, BLOCK_KIB);
    while (i < words && expected[i] == found[i])
        i++;
    l->reads++;
    l->mismatches += i < words;
}

static void round_ends(struct loop *l)
{
    u64 t = now_ms(), want = l->kind == READS ? 0 : l->begun + l->writes * 1000 / l->rate;
    if (t - l->last_ms > l->gap_ms)
        l->gap_ms = t - l->last_ms;
    l->due = want > t ? want : l->errors ? t + 20 : t;
    l->state = NEXT;
}

static void verify_next(struct loop *l)
{
    while (l->block < l->blocks && !l->generation[l->block])
        l->block++;
    if (l->block < l->blocks)
        request(l, READ, VERIFYING);
    else
        l->state = ENDED;
}

static void touch_memory(struct loop *l)
{
    enum { PAGE = 4096 / sizeof(u64), SLICE = 256 };
    u64 round = l->slice / l->blocks, first = l->slice % l->blocks * SLICE;
    for (u64 page = first; page < first + SLICE; page++) {
        u64 *word = (u64 *)memory + page * PAGE + page % PAGE;
        l->mismatches += *word != (round ? mix(mix(round) ^ page) : 0);
        *word = mix(mix(round + 1) ^ page);
    }
    l->writes++, l->reads++, l->slice++;
    round_ends(l);
}

static u64 begin_round(struct loop *l) // for how many ms it has nothing to do
{
    u64 t = now_ms();
    if (l->stop) {
        if (l->kind == WRITES)
            request(l, FLUSH, FLUSHING);
        else
            l->state = ENDED;
        return 0;
    }
    if (t < l->due)
        return l->due - t;
    l->last_ms = t;
    if (l->kind == MEMORY) {
        touch_memory(l);
        return 0;
    }
    u64 s = l->random;
    s ^= s << 13, s ^= s >> 7, s ^= s << 17;
    l->random = s;
    l->block = s % l->blocks;
    if (l->kind == READS) {
        request(l, READ, READING);
    } else {
        fill(l->data, 0, l->seed ^ mix(l->generation[l->block] + 1), l->base + l->block * BLOCK_KIB, BLOCK_KIB);
        request(l, WRITE, WRITING);
    }
    return 0;
}

enum { LONG_MS = 3000 };

static u64 step(struct loop *l)
{
    if (l->state == NEXT)
        return begin_round(l);
    if (l->state == FREE || l->state == ENDED)
        return LONG_MS;
    struct request *r = l->request < 0 ? NULL : l->d->r + l->request;
    if (r && r->busy)
        return LONG_MS;
    int bad = !r || r->status;
    l->errors += bad;
    switch (l->state) {
    case WRITING:
        if (!bad)
            l->generation[l->block]++, l->writes++;
        l->block = (l->random >> 32) % l->blocks;
        if (l->generation[l->block])
            request(l, READ, READING);
        else
            round_ends(l);
        break;
    case READING:
        if (!bad && l->kind == WRITES)
            compare(l);
        else if (!bad)
            l->reads++;
        round_ends(l);
        break;
    case FLUSHING:
        l->block = 0;
        verify_next(l);
        break;
    default: // VERIFYING
        if (!bad)
            compare(l);
        l->verified++, l->block++;
        verify_next(l);
    }
    return 0;
}

void pump(void)
{
    u64 rest = LONG_MS;
    if (acpi_asks())
        acpi(), rest = 0;
    for (int i = 0; i < DISKS; i++)
        if (reap(disks + i))
            rest = 0; // whoever waits for it looks first
    for (struct loop *l = loops; l < loops + LOOPS; l++) {
        u64 t = step(l);
        rest = t < rest ? t : rest;
    }
    if (rest)
        idle(rest);
}

void loop_report(struct loop *l, int stop)
{
    if (stop) {
        for (l->stop = 1; l->state != ENDED;)
            pump();
        l->state = FREE;
    }
    u64 wait = stop ? 0 : now_ms() - l->last_ms;
    answer("OK writes=%u reads=%u errors=%u mismatches=%u maxgap_ms=%u verified=%u", l->writes, l->reads, l->errors, l->mismatches,
           wait > l->gap_ms ? wait : l->gap_ms, l->verified);
}
