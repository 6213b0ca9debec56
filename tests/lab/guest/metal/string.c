// SPDX-License-Identifier: Apache-2.0
// What the compiler itself calls.
#include "machine.h"

void *memset(void *to, int c, size_t n)
{
    void *at = to;
    __asm__ volatile("rep stosb" : "+D"(at), "+c"(n) : "a"(c) : "memory");
    return to;
}

void *memcpy(void *restrict to, const void *restrict from, size_t n)
{
    void *at = to;
    __asm__ volatile("rep movsb" : "+D"(at), "+S"(from), "+c"(n)::"memory");
    return to;
}
