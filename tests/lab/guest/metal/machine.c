// SPDX-License-Identifier: Apache-2.0
// COM1 (16550), the ACPI timer as clock, interrupts by local and I/O APIC, and ACPI events: the power button, and devices that
// are to be let go (QEMU: docs/specs/acpi_pci_hotplug). QEMU's firmware puts ACPI's registers at 0x600, on i440fx and q35.
#include "machine.h"
#include "virtio.h"
#include <stdarg.h>

enum { COM = 0x3F8, PM = 0x600, TICKS = 3579545, WRAP = 1 << 24 };
enum { LOCAL = 0xFEE00000, IO = 0xFEC00000, GONE_BY = 0x40, COM_VECTOR, ACPI_VECTOR, DISK_VECTOR };
enum { POWER_BUTTON = 0x100, HOT_PLUG = 2, PRESSED_MS = 250 };

int q35;

// ---- console ---------------------------------------------------------------------------------------------------------

void put(char c)
{
    while (!(inb(COM + 5) & 0x20))
        ;
    outb(COM, c);
}

void drain(void)
{
    while (!(inb(COM + 5) & 0x40))
        ;
}

int heard(char *c)
{
    if (!(inb(COM + 5) & 1))
        return 0;
    *c = inb(COM);
    return 1;
}

static void say_number(u64 value)
{
    char digits[24], *first = digits + sizeof digits - 1;
    *first = 0;
    do
        *--first = '0' + value % 10;
    while (value /= 10);
    while (*first)
        put(*first++);
}

void say(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    for (; *format; format++) {
        if (*format != '%') {
            put(*format);
        } else if (*++format == 's') {
            for (const char *s = va_arg(list, const char *); *s; s++)
                put(*s);
        } else if (*format == 'x') {
            u32 value = va_arg(list, u32);
            for (int shift = 28; shift >= 0; shift -= 4)
                put("0123456789abcdef"[value >> shift & 15]);
        } else {
            say_number(va_arg(list, u64));
        }
    }
    va_end(list);
}

// ---- clock -----------------------------------------------------------------------------------------------------------

static u64 ticks, last_stamp, stamps_per_wrap;
static u32 last_tick;

static u32 tick(void) { return inl(PM + 8) & (WRAP - 1); }

static u64 stamp(void)
{
    u32 low, high;
    __asm__ volatile("rdtsc" : "=a"(low), "=d"(high));
    return low | (u64)high << 32;
}

// The timer has 24 bits, 4.7 s. How often it has gone round while nobody looked (a processor that a busy machine lets wait, a
// device that holds QEMU up) the time stamp counter says, roughly: it may run at another rate after a migration.
u64 now_ms(void)
{
    u32 t = tick();
    u64 s = stamp(), passed = (t - last_tick) & (WRAP - 1);
    u64 rounds = (s - last_stamp) / (stamps_per_wrap / 256), known = passed / (WRAP / 256);
    if (rounds > known)
        passed += (rounds - known + 128) / 256 * WRAP;
    ticks += passed;
    last_tick = t;
    last_stamp = s;
    return ticks * 1000 / TICKS;
}

static void clock_start(void)
{
    enum { PART = 2048, TRIES = 5 };
    u64 least = ~0ull;
    for (int i = 0; i < TRIES; i++) {
        // In this order a processor that has to wait within it makes it longer, never shorter.
        u64 begin = stamp();
        u32 from = tick(), passed;
        while ((passed = (tick() - from) & (WRAP - 1)) < PART)
            ;
        u64 found = (stamp() - begin) * (WRAP / PART) * PART / passed;
        least = found < least ? found : least;
    }
    stamps_per_wrap = least < 256 ? 256 : least;
    last_tick = tick();
    last_stamp = stamp();
}

// ---- interrupts ------------------------------------------------------------------------------------------------------

struct frame;
static volatile int woken, acpi_event;

static void end_of_interrupt(void) { R32(LOCAL + 0xB0) = 0; }

__attribute__((interrupt)) static void on_interrupt(struct frame *f)
{
    (void)f;
    woken = 1;
    end_of_interrupt();
}

__attribute__((interrupt)) static void on_acpi(struct frame *f)
{
    (void)f;
    woken = acpi_event = 1;
    end_of_interrupt();
}

__attribute__((interrupt)) static void on_fault(struct frame *f)
{
    answer("PANIC %x %x", (u32)((u64 *)f)[0], (u32)((u64 *)f)[1]); // where: instruction or error code, by the kind of fault
    for (;;)
        __asm__ volatile("cli; hlt");
}

static void route(int pin, int vector) // by edge: whoever is told clears all that is told, and sleeps only then
{
    R32(IO) = 0x11 + 2 * pin;
    R32(IO + 0x10) = 0;
    R32(IO) = 0x10 + 2 * pin;
    R32(IO + 0x10) = vector;
}

static void interrupts_start(void)
{
    static struct {
        u16 low, selector, flags, middle;
        u32 high, zero;
    } gates[256];
    struct __attribute__((packed)) {
        u16 limit;
        u64 base;
    } table = {sizeof gates - 1, (uintptr_t)gates};
    for (int i = 0; i < 256; i++) {
        uintptr_t to = (uintptr_t)(i < 32 ? on_fault : i == ACPI_VECTOR ? on_acpi : on_interrupt);
        gates[i].low = to;
        gates[i].selector = 8;
        gates[i].flags = 0x8E00;
        gates[i].middle = to >> 16;
    }
    __asm__ volatile("lidt %0" ::"m"(table));
    outb(0x21, 0xFF); // no interrupts of the old controllers
    outb(0xA1, 0xFF);
    R32(LOCAL + 0xF0) = 0x1FF;    // on
    R32(LOCAL + 0x3E0) = 0xB;     // each count of its timer a nanosecond
    R32(LOCAL + 0x320) = GONE_BY; // once
    R32(LOCAL + 0x350) = 0x10000; // nothing by the pin of the old ones
    route(4, COM_VECTOR);
    route(9, ACPI_VECTOR);
    outb(COM + 1, 0);
    outb(COM + 2, 7); // empty queues
    outb(COM + 3, 3); // 8 bits
    outb(COM + 4, 0xB);
    outb(COM + 1, 1); // interrupt for what arrives
}

void idle(u64 ms)
{
    u64 most = ms > 3000 ? 3000 : ms ? ms : 1;
    __asm__ volatile("cli");
    if (!woken) {
        R32(LOCAL + 0x380) = most * 1000000;
        __asm__ volatile("sti; hlt; cli");
    }
    woken = 0;
    __asm__ volatile("sti");
}

void machine_start(void)
{
    clock_start();
    interrupts_start();
}

// ---- ACPI ------------------------------------------------------------------------------------------------------------

static u16 plug_status(void) { return q35 ? PM + 0x20 : 0xAFE0; }

void power_off(void)
{
    flush_all();
    outw(PM + 4, 0x2000);
    for (;;)
        __asm__ volatile("cli; hlt");
}

void acpi_on(void)
{
    outw(PM, POWER_BUTTON);
    outw(PM + 2, POWER_BUTTON);
    outb(plug_status(), 0xFF);
    outb(plug_status() + (q35 ? 8 : 2), HOT_PLUG);
}

int acpi_asks(void) { return acpi_event; }

void acpi(void)
{
    enum { REMOVED = 4, EJECT = 8, BUS = 16 };
    u16 plug = q35 ? 0xCC0 : 0xAE00;
    acpi_event = 0;
    do {
        outb(plug_status(), 0xFF);
        if (inw(PM) & POWER_BUTTON) {
            outw(PM, POWER_BUTTON);
            // Not before who pressed it knows: libvirt takes a QEMU that ends meanwhile for one that has failed.
            for (u64 since = now_ms(); now_ms() < since + PRESSED_MS;)
                idle(PRESSED_MS / 10);
            power_off();
        }
        for (int bus = 0; bus < (q35 ? 32 : 1); bus++) {
            outl(plug + BUS, bus);
            inl(plug); // what has come: told once, and found by looking
            u32 leaving = inl(plug + REMOVED);
            if (leaving && leaving != ~0u)
                outl(plug + EJECT, leaving);
        }
        rescan();
    } while (inb(plug_status()) & HOT_PLUG || inw(PM) & POWER_BUTTON);
}
