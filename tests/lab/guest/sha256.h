// SPDX-License-Identifier: Apache-2.0
// SHA-256 (FIPS 180-4) of whole blocks of 64 bytes, and without floating point: a guest without an operating system has none.
#ifndef SHA256_H
#define SHA256_H
#include <stdint.h>

static uint32_t sha_round[64], sha_begin[8];

// The first 32 bits of the fraction of a prime's square (power 2) or cube (3) root, by bisection.
static inline uint32_t root_bits(uint64_t prime, int power)
{
    uint64_t low = 0, high = 1ull << 37; // fixed point, 32 bits behind it; no root of the first 64 primes is above 18
    while (high - low > 1) {
        uint64_t mid = (low + high) / 2;
        unsigned __int128 product = (unsigned __int128)mid * mid;
        if (power == 3)
            product *= mid;
        if (product > (unsigned __int128)prime << (32 * power))
            high = mid;
        else
            low = mid;
    }
    return (uint32_t)low;
}

static inline void sha_start(void)
{
    for (int found = 0, n = 2; found < 64; n++) {
        int prime = 1;
        for (int d = 2; d * d <= n; d++)
            prime &= n % d != 0;
        if (!prime)
            continue;
        if (found < 8)
            sha_begin[found] = root_bits(n, 2);
        sha_round[found++] = root_bits(n, 3);
    }
}

static inline uint32_t sha_turn(uint32_t x, int n) { return x >> n | x << (32 - n); }

static inline void sha_block(uint32_t *h, const unsigned char *p)
{
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)p[4 * i] << 24 | p[4 * i + 1] << 16 | p[4 * i + 2] << 8 | p[4 * i + 3];
    for (int i = 16; i < 64; i++)
        w[i] = w[i - 16] + w[i - 7] + (sha_turn(w[i - 15], 7) ^ sha_turn(w[i - 15], 18) ^ w[i - 15] >> 3) +
               (sha_turn(w[i - 2], 17) ^ sha_turn(w[i - 2], 19) ^ w[i - 2] >> 10);
    for (int i = 0; i < 8; i++)
        s[i] = h[i];
    for (int i = 0; i < 64; i++) {
        uint32_t a = s[0], e = s[4];
        uint32_t t1 = s[7] + (sha_turn(e, 6) ^ sha_turn(e, 11) ^ sha_turn(e, 25)) + ((e & s[5]) ^ (~e & s[6])) + sha_round[i] + w[i];
        uint32_t t2 = (sha_turn(a, 2) ^ sha_turn(a, 13) ^ sha_turn(a, 22)) + ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
        for (int j = 7; j; j--)
            s[j] = s[j - 1];
        s[4] += t1;
        s[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++)
        h[i] += s[i];
}

// The last block of a message that is `bytes` long, a multiple of 64.
static inline void sha_end(uint32_t *h, uint64_t bytes)
{
    unsigned char last[64] = {0x80};
    for (int i = 0; i < 8; i++)
        last[56 + i] = (bytes * 8) >> (56 - 8 * i);
    sha_block(h, last);
}

#endif
