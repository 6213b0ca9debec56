// SPDX-License-Identifier: Apache-2.0
// What lab guests write. Each KiB of a disk has its own content, from a seed and its position: a block that landed
// elsewhere shows. client.py computes the same.
#ifndef CONTENT_H
#define CONTENT_H
#include <stdint.h>
#include <string.h>

enum { KIB = 1024, CHUNK = 256 * KIB, BLOCK_KIB = 64 };
typedef uint64_t u64;

static inline u64 mix(u64 x)
{
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

static inline u64 seed_of(const char *word)
{
    u64 h = 0xCBF29CE484222325ull;
    for (; *word; word++)
        h = (h ^ (unsigned char)*word) * 0x100000001B3ull;
    return h;
}

// `zero`: zeros, whatever the seed is.
static inline void fill(void *to, int zero, u64 seed, u64 kib, u64 count)
{
    u64 *out = to;
    if (zero) {
        memset(to, 0, count * KIB);
        return;
    }
    for (u64 k = kib; k < kib + count; k++) {
        u64 x = mix(seed ^ mix(k)) | 1;
        for (int i = 0; i < KIB / 8; i++) {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            *out++ = x;
        }
    }
}

#endif
