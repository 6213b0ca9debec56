// SPDX-License-Identifier: Apache-2.0
// The machine below: ports, registers, console, clock, sleep, and what ACPI has to tell.
#ifndef MACHINE_H
#define MACHINE_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

static inline void outb(u16 port, u8 value) { __asm__ volatile("outb %0, %1" ::"a"(value), "Nd"(port)); }
static inline void outw(u16 port, u16 value) { __asm__ volatile("outw %0, %1" ::"a"(value), "Nd"(port)); }
static inline void outl(u16 port, u32 value) { __asm__ volatile("outl %0, %1" ::"a"(value), "Nd"(port)); }
static inline u8 inb(u16 port)
{
    u8 value;
    __asm__ volatile("inb %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}
static inline u16 inw(u16 port)
{
    u16 value;
    __asm__ volatile("inw %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}
static inline u32 inl(u16 port)
{
    u32 value;
    __asm__ volatile("inl %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}

#define R8(address) (*(volatile u8 *)(uintptr_t)(address))
#define R16(address) (*(volatile u16 *)(uintptr_t)(address))
#define R32(address) (*(volatile u32 *)(uintptr_t)(address))
#define R64(address) (*(volatile u64 *)(uintptr_t)(address))
#define FENCE() __asm__ volatile("mfence" ::: "memory")

static inline int equal(const char *a, const char *b)
{
    while (*a && *a == *b)
        a++, b++;
    return *a == *b;
}

void put(char c);
void say(const char *format, ...); // %s; %u: a u64; %x: a u32 as eight digits
#define answer(format, ...) say(format "\n", ##__VA_ARGS__)
int heard(char *c);                // whether there was something to read
void drain(void);                  // until all that was said has left

void machine_start(void);
u64 now_ms(void);                  // of virtual time: it stands still while the VM does
void idle(u64 ms);                 // until an interrupt, so long at most

extern int q35;                    // this machine, and not an i440fx
void acpi_on(void);
int acpi_asks(void);               // whether it has interrupted since the last `acpi`
void acpi(void);                   // do what it asks: end with the power button, let devices go
void power_off(void);
#endif
