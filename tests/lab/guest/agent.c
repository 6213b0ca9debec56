// SPDX-License-Identifier: Apache-2.0
// The program inside a lab guest: obeys one command per line on the serial console and answers each with exactly one
// line, "OK ..." or "ERR ...". All disk access is direct I/O, so what it reads is what the disk holds.
//
//   ping WORD                          WORD back
//   disks                              name:bytes of every disk
//   write DEV SEED OFF_KIB COUNT_KIB   write reproducible content, then flush
//   check DEV SEED OFF_KIB COUNT_KIB   read it again and compare; SEED may be "zero" in both
//   sum DEV [OFF_KIB COUNT_KIB]        sha256
//   discard DEV OFF_KIB COUNT_KIB      trim
//   loop DEV SEED [OFF_KIB [COUNT_KIB [PER_SECOND]]]    write and verify 64 KiB blocks in the background
//   loop DEV read [OFF_KIB [COUNT_KIB]]  read 256 KiB anywhere in there, as often as it can
//   loop memory MIB PER_SECOND         the same with so much memory, a word in each page of a MiB at a time
//   loop-stat DEV | loop-stop DEV      counts; stop also reads everything written once more
//   context                            the context ISO's context.sh, newlines and backslashes escaped
//   file PATH [HEX]                    write that to a file, at once; read it
//   device PATH HEX                    write that to a device and read its answer
//   run HEX                            that as busybox's shell: exit code and output
//   lock PATH posix|flock [wait]       lock a file, until unlock; more than one at a time
//   unlock
//   xattr PATH NAME [HEX]              give a file that attribute, or see whether it can be read
//   sync | poweroff | uptime
#define _GNU_SOURCE
#include "content.h"
#include "context.h"
#include "sha256.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/input.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

enum { LOOPS = 12, WORDS = 8 };

struct loop {
    char dev[16];
    pid_t pid;
    volatile int stop;
    volatile u64 writes, reads, errors, mismatches, gap_ms, last_ms, verified;
};

static struct loop *loops; // shared with the children that run them
static u64 begun;
static char *buffer;       // aligned, CHUNK bytes
static int locked[64], held;

static void answer(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vprintf(format, list);
    va_end(list);
    putchar('\n');
    fflush(stdout);
}

static u64 now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (u64)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static int open_disk(const char *name, int flags)
{
    char path[64];
    snprintf(path, sizeof path, "/dev/%s", name);
    if (strchr(name, '/')) {
        errno = EINVAL;
        return -1;
    }
    return open(path, flags | O_DIRECT | O_CLOEXEC);
}

static u64 size_of(int fd)
{
    u64 bytes = 0;
    ioctl(fd, BLKGETSIZE64, &bytes);
    return bytes;
}

// Move exactly n bytes, or say how it ended in errno.
static int transfer(int fd, int writing, char *data, size_t n, off_t at)
{
    while (n) {
        ssize_t done = writing ? pwrite(fd, data, n, at) : pread(fd, data, n, at);
        if (done <= 0) {
            if (!done)
                errno = ENOSPC;
            return -1;
        }
        data += done, at += done, n -= done;
    }
    return 0;
}

// ---- sum, write and check ---------------------------------------------------------------------------------------------

static void sum(int fd, u64 kib, u64 count)
{
    uint32_t h[8];
    char hex[65];
    memcpy(h, sha_begin, sizeof h);
    for (u64 done = 0; done < count; done += CHUNK / KIB) {
        u64 n = count - done < CHUNK / KIB ? count - done : CHUNK / KIB;
        if (transfer(fd, 0, buffer, n * KIB, (kib + done) * KIB)) {
            answer("ERR read at KiB %llu: %s", (unsigned long long)(kib + done), strerror(errno));
            return;
        }
        for (u64 i = 0; i < n * KIB; i += 64)
            sha_block(h, (unsigned char *)buffer + i);
    }
    sha_end(h, count * KIB);
    for (int i = 0; i < 8; i++)
        sprintf(hex + 8 * i, "%08x", h[i]);
    answer("OK %s", hex);
}

static void write_range(int fd, const char *seed, u64 kib, u64 count)
{
    int zero = !strcmp(seed, "zero");
    for (u64 done = 0; done < count; done += CHUNK / KIB) {
        u64 n = count - done < CHUNK / KIB ? count - done : CHUNK / KIB;
        fill(buffer, zero, seed_of(seed), kib + done, n);
        if (transfer(fd, 1, buffer, n * KIB, (kib + done) * KIB)) {
            answer("ERR write at KiB %llu: %s", (unsigned long long)(kib + done), strerror(errno));
            return;
        }
    }
    if (fsync(fd))
        answer("ERR flush: %s", strerror(errno));
    else
        answer("OK %llu KiB written", (unsigned long long)count);
}

static void check_range(int fd, const char *seed, u64 kib, u64 count)
{
    static u64 expected[KIB / 8];
    int zero = !strcmp(seed, "zero");
    u64 bad = 0, first = 0;
    for (u64 done = 0; done < count; done += CHUNK / KIB) {
        u64 n = count - done < CHUNK / KIB ? count - done : CHUNK / KIB;
        memset(buffer, 0x5A, n * KIB); // what a read that does nothing would leave
        if (transfer(fd, 0, buffer, n * KIB, (kib + done) * KIB)) {
            answer("ERR read at KiB %llu: %s", (unsigned long long)(kib + done), strerror(errno));
            return;
        }
        for (u64 k = 0; k < n; k++) {
            fill(expected, zero, seed_of(seed), kib + done + k, 1);
            if (memcmp(expected, buffer + k * KIB, KIB) && !bad++)
                first = kib + done + k;
        }
    }
    if (bad)
        answer("ERR %llu of %llu KiB differ, the first at KiB %llu", (unsigned long long)bad, (unsigned long long)count,
               (unsigned long long)first);
    else
        answer("OK %llu KiB as written", (unsigned long long)count);
}

// ---- background load -------------------------------------------------------------------------------------------------

static void loop_compare(struct loop *l, int fd, u64 seed, u64 base, u64 block, uint32_t generation)
{
    static u64 expected[BLOCK_KIB * KIB / 8];
    u64 at = base + block * BLOCK_KIB;
    if (transfer(fd, 0, buffer, BLOCK_KIB * KIB, at * KIB)) {
        l->errors++;
        return;
    }
    l->reads++;
    fill(expected, 0, seed ^ mix(generation), at, BLOCK_KIB);
    if (memcmp(expected, buffer, BLOCK_KIB * KIB))
        l->mismatches++;
}

static void loop_run(struct loop *l, int fd, u64 seed, u64 base, u64 blocks, int rate)
{
    uint32_t *generation = calloc(blocks, sizeof *generation);
    u64 s = 88172645463325252ull, start = now_ms();
    l->last_ms = start;
    while (!l->stop) {
        s ^= s << 13, s ^= s >> 7, s ^= s << 17;
        u64 block = s % blocks, at = base + block * BLOCK_KIB;
        fill(buffer, 0, seed ^ mix(generation[block] + 1), at, BLOCK_KIB);
        if (transfer(fd, 1, buffer, BLOCK_KIB * KIB, at * KIB)) {
            l->errors++;
        } else {
            generation[block]++;
            l->writes++;
        }
        block = (s >> 32) % blocks;
        if (generation[block])
            loop_compare(l, fd, seed, base, block, generation[block]);
        u64 t = now_ms(), want = start + l->writes * 1000 / rate;
        if (t - l->last_ms > l->gap_ms)
            l->gap_ms = t - l->last_ms;
        if (want > t)
            usleep((want - t) * 1000);
        else if (l->errors)
            usleep(20000);
        l->last_ms = now_ms();
    }
    fsync(fd);
    for (u64 block = 0; block < blocks; block++)
        if (generation[block]) {
            loop_compare(l, fd, seed, base, block, generation[block]);
            l->verified++;
        }
    _exit(0);
}

static void read_run(struct loop *l, int fd, u64 base, u64 pieces)
{
    u64 s = 88172645463325252ull;
    while (!l->stop) {
        s ^= s << 13, s ^= s >> 7, s ^= s << 17;
        l->last_ms = now_ms();
        if (transfer(fd, 0, buffer, CHUNK, base * KIB + s % pieces * CHUNK))
            l->errors++, usleep(20000);
        else
            l->reads++;
        u64 wait = now_ms() - l->last_ms;
        if (wait > l->gap_ms)
            l->gap_ms = wait;
    }
    _exit(0);
}

static void memory_run(struct loop *l, u64 mib, int rate)
{
    enum { PAGE = 4096 / sizeof(u64), SLICE = 256 };
    u64 *memory = calloc(mib * SLICE * PAGE, sizeof *memory), start = now_ms();
    for (u64 slice = 0; memory && !l->stop; slice++) {
        u64 round = slice / mib, first = slice % mib * SLICE;
        for (u64 page = first; page < first + SLICE; page++) {
            u64 *word = memory + page * PAGE + page % PAGE;
            l->mismatches += *word != (round ? mix(mix(round) ^ page) : 0);
            *word = mix(mix(round + 1) ^ page);
        }
        l->writes++, l->reads++;
        u64 t = now_ms(), want = start + l->writes * 1000 / rate;
        if (t - l->last_ms > l->gap_ms)
            l->gap_ms = t - l->last_ms;
        if (want > t)
            usleep((want - t) * 1000);
        l->last_ms = now_ms();
    }
    l->errors += !memory;
    _exit(0);
}

static struct loop *loop_of(const char *dev)
{
    for (int i = 0; i < LOOPS; i++)
        if (loops[i].pid && !strcmp(loops[i].dev, dev))
            return loops + i;
    return NULL;
}

static void loop_start(const char *dev, const char *seed, u64 base, u64 count, int rate)
{
    struct loop *l = loops;
    while (l < loops + LOOPS && l->pid)
        l++;
    if (l == loops + LOOPS || loop_of(dev)) {
        answer("ERR %s", loop_of(dev) ? "already running on this disk" : "too many loops");
        return;
    }
    int is_memory = !strcmp(dev, "memory"), fd = is_memory ? -1 : open_disk(dev, O_RDWR);
    if (!is_memory && (fd < 0 || size_of(fd) < (base + BLOCK_KIB) * KIB)) {
        answer("ERR open %s: %s", dev, fd < 0 ? strerror(errno) : "too small");
        return;
    }
    if (!count)
        count = 16 * 1024;
    if (!is_memory && (base + count) * KIB > size_of(fd))
        count = size_of(fd) / KIB - base;
    if (!strcmp(seed, "read") && count < CHUNK / KIB) {
        answer("ERR %s: less than is read at once", dev);
        close(fd);
        return;
    }
    memset((void *)l, 0, sizeof *l);
    snprintf(l->dev, sizeof l->dev, "%s", dev);
    l->last_ms = now_ms();
    pid_t child = fork(); // not straight into l->pid: the child would set it to 0 for all
    if (!child && is_memory)
        memory_run(l, strtoull(seed, NULL, 10), base ? (int)base : 50);
    if (!child && !strcmp(seed, "read"))
        read_run(l, fd, base, count / (CHUNK / KIB));
    if (!child)
        loop_run(l, fd, seed_of(seed), base, count / BLOCK_KIB, rate > 0 ? rate : 50);
    l->pid = child;
    close(fd);
    answer("OK loop on %s", dev);
}

static void loop_report(struct loop *l, int stop)
{
    u64 wait = now_ms() - l->last_ms;
    if (stop) {
        l->stop = 1;
        waitpid(l->pid, NULL, 0);
        wait = 0;
    } else if (waitpid(l->pid, NULL, WNOHANG) == l->pid) {
        l->errors++; // it must not end by itself
    }
    answer("OK writes=%llu reads=%llu errors=%llu mismatches=%llu maxgap_ms=%llu verified=%llu",
           (unsigned long long)l->writes, (unsigned long long)l->reads, (unsigned long long)l->errors,
           (unsigned long long)l->mismatches, (unsigned long long)(wait > l->gap_ms ? wait : l->gap_ms),
           (unsigned long long)l->verified);
    if (stop)
        l->pid = 0;
}

// ---- the rest --------------------------------------------------------------------------------------------------------

static int is_disk(const char *name)
{
    return !strncmp(name, "vd", 2) || !strncmp(name, "sd", 2) || !strncmp(name, "sr", 2) || !strncmp(name, "hd", 2);
}

static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static int disk_names(char **names, int most)
{
    int n = 0;
    DIR *dir = opendir("/sys/block");
    for (struct dirent *e; dir && (e = readdir(dir));)
        if (is_disk(e->d_name) && n < most)
            names[n++] = strdup(e->d_name);
    if (dir)
        closedir(dir);
    qsort(names, n, sizeof *names, by_name);
    return n;
}

static void disks(void)
{
    char *names[64], path[64];
    int n = disk_names(names, 64);
    printf("OK");
    for (int i = 0; i < n; i++) {
        unsigned long long sectors = 0;
        snprintf(path, sizeof path, "/sys/block/%s/size", names[i]);
        FILE *f = fopen(path, "r");
        if (f) {
            if (fscanf(f, "%llu", &sectors) == 1)
                printf(" %s:%llu", names[i], sectors * 512);
            fclose(f);
        }
        free(names[i]);
    }
    answer("");
}

static void context(void)
{
    char *text = read_context();
    if (!text) {
        answer("ERR no context ISO (label CONTEXT, file context.sh)");
        return;
    }
    printf("OK ");
    for (char *c = text; *c; c++)
        if (*c == '\n')
            printf("\\n");
        else if (*c == '\\')
            printf("\\\\");
        else
            putchar(*c);
    answer("");
    free(text);
}

static size_t unhex(const char *hex, unsigned char *to, size_t most)
{
    size_t n = 0;
    for (unsigned byte; n < most && sscanf(hex + 2 * n, "%2x", &byte) == 1; n++)
        to[n] = byte;
    return n;
}

// A file has what was written when it is opened again; a device answers the one who wrote.
static void talk(char **w, int n)
{
    unsigned char bytes[1024];
    int is_device = !strcmp(w[0], "device"), writes = n > 2, reads = is_device || !writes;
    ssize_t size = writes ? (ssize_t)unhex(w[2], bytes, sizeof bytes) : 0;
    int fd = open(w[1], is_device ? O_RDWR : writes ? O_WRONLY | O_CREAT : O_RDONLY, 0644);
    int failed = fd < 0 || (writes && write(fd, bytes, size) < 0); // a TPM tells the length of its answer here
    if (!failed && reads)
        failed = (size = read(fd, bytes, sizeof bytes)) < 0;
    if (failed) {
        answer("ERR %s: %s", w[1], strerror(errno));
    } else {
        printf("OK ");
        for (ssize_t i = 0; reads && i < size; i++)
            printf("%02x", bytes[i]);
        answer("");
    }
    if (fd >= 0)
        close(fd);
}

// Whoever asks knows how much there is to say: more than OUTPUT is cut off.
static void run(const char *hex)
{
    enum { OUTPUT = 16384 };
    static unsigned char script[2048], output[OUTPUT];
    size_t size = 0, length = unhex(hex, script, sizeof script - 1);
    int ends[2], status = 0;
    script[length] = 0;
    pid_t child = pipe(ends) ? -1 : fork();
    if (!child) {
        dup2(ends[1], 1), dup2(ends[1], 2), close(0);
        setenv("PATH", "/bin", 1);
        execl("/bin/busybox", "sh", "-c", (char *)script, (char *)NULL);
        _exit(127);
    }
    if (child < 0) {
        answer("ERR run: %s", strerror(errno));
        return;
    }
    close(ends[1]);
    for (ssize_t n; (n = read(ends[0], output + size, sizeof output - size)) > 0; size += n)
        ;
    close(ends[0]);
    waitpid(child, &status, 0);
    printf("OK %d ", WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
    for (size_t i = 0; i < size; i++)
        printf("%02x", output[i]);
    answer("");
}

static void lock(const char *path, const char *how, int wait)
{
    struct flock whole = {.l_type = F_WRLCK};
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    int failed = fd < 0 || (strcmp(how, "posix") ? flock(fd, LOCK_EX | (wait ? 0 : LOCK_NB)) : fcntl(fd, wait ? F_SETLKW : F_SETLK, &whole));
    if (failed) {
        answer("ERR %s", strerror(errno));
        if (fd >= 0)
            close(fd);
        return;
    }
    locked[held++] = fd;
    answer("OK locked");
}

static void attribute(const char *path, const char *name, const char *hex)
{
    unsigned char value[256];
    if (hex ? setxattr(path, name, value, unhex(hex, value, sizeof value), 0) : getxattr(path, name, value, sizeof value) < 0)
        answer("ERR %s", strerror(errno));
    else
        answer("OK");
}

static void unlock(void)
{
    while (held)
        close(locked[--held]);
    answer("OK");
}

static void power_off(void)
{
    sync();
    reboot(RB_POWER_OFF);
}

// A clean ACPI shutdown: the power button is an input device.
static void watch_power_button(void)
{
    if (fork())
        return;
    char path[64];
    struct input_event e;
    for (int i = 0; i < 8; i++) {
        snprintf(path, sizeof path, "/dev/input/event%d", i);
        int fd = open(path, O_RDONLY);
        if (fd < 0 || fork())
            continue;
        while (read(fd, &e, sizeof e) == sizeof e)
            if (e.type == EV_KEY && e.code == KEY_POWER && e.value)
                power_off();
        _exit(0);
    }
    _exit(0);
}

static u64 number(char **word, int n, int i, u64 otherwise) { return i < n ? strtoull(word[i], NULL, 0) : otherwise; }

static void on_disk(char **w, int n)
{
    const char *what = w[0];
    if (!strcmp(what, "loop") && n >= 3) {
        loop_start(w[1], w[2], number(w, n, 3, 0), number(w, n, 4, 0), number(w, n, 5, 50));
        return;
    }
    if (!strcmp(what, "loop-stat") || !strcmp(what, "loop-stop")) {
        struct loop *l = loop_of(w[1]);
        if (l)
            loop_report(l, !strcmp(what, "loop-stop"));
        else
            // Then it has begun anew, or the whole guest has: which of them shows here.
            answer("ERR no loop on %s: this agent is up for %llu ms, the guest for %llu", w[1],
                   (unsigned long long)(now_ms() - begun), (unsigned long long)now_ms());
        return;
    }
    int writing = !strcmp(what, "write") || !strcmp(what, "discard");
    int fd = open_disk(w[1], writing ? O_RDWR : O_RDONLY);
    if (fd < 0) {
        answer("ERR open %s: %s", w[1], strerror(errno));
        return;
    }
    if (!strcmp(what, "write") && n == 5) {
        write_range(fd, w[2], number(w, n, 3, 0), number(w, n, 4, 0));
    } else if (!strcmp(what, "check") && n == 5) {
        check_range(fd, w[2], number(w, n, 3, 0), number(w, n, 4, 0));
    } else if (!strcmp(what, "sum") && (n == 2 || n == 4)) {
        sum(fd, number(w, n, 2, 0), number(w, n, 3, size_of(fd) / KIB));
    } else if (!strcmp(what, "discard") && n == 4) {
        u64 range[2] = {number(w, n, 2, 0) * KIB, number(w, n, 3, 0) * KIB};
        if (ioctl(fd, BLKDISCARD, range))
            answer("ERR discard: %s", strerror(errno));
        else
            answer("OK discarded");
    } else {
        answer("ERR what? %s", what);
    }
    close(fd);
}

static void obey(char *line)
{
    char *w[WORDS] = {0};
    int n = 0;
    for (char *t = strtok(line, " \r\n"); t && n < WORDS; t = strtok(NULL, " \r\n"))
        w[n++] = t;
    if (!n)
        return;
    if (!strcmp(w[0], "ping"))
        answer("OK %s", n > 1 ? w[1] : "pong");
    else if (!strcmp(w[0], "disks"))
        disks();
    else if (!strcmp(w[0], "context"))
        context();
    else if (!strcmp(w[0], "uptime"))
        answer("OK %llu", (unsigned long long)now_ms());
    else if (!strcmp(w[0], "sync"))
        sync(), answer("OK");
    else if (!strcmp(w[0], "poweroff"))
        answer("OK"), tcdrain(1), power_off();
    else if (!strcmp(w[0], "unlock"))
        unlock();
    else if (n > 2 && !strcmp(w[0], "lock"))
        lock(w[1], w[2], n > 3);
    else if (n > 1 && !strcmp(w[0], "run"))
        run(w[1]);
    else if (n > 2 && !strcmp(w[0], "xattr"))
        attribute(w[1], w[2], n > 3 ? w[3] : NULL);
    else if (n > 1 && (!strcmp(w[0], "file") || (n > 2 && !strcmp(w[0], "device"))))
        talk(w, n);
    else if (n > 1)
        on_disk(w, n);
    else
        answer("ERR what? %s", w[0]);
}

int main(void)
{
    static char line[4096];
    struct termios tty;

    if (!tcgetattr(0, &tty)) {
        tty.c_lflag &= ~(ECHO | ECHONL);
        tty.c_oflag &= ~OPOST;
        tcsetattr(0, TCSANOW, &tty);
    }
    begun = now_ms();
    loops = mmap(NULL, LOOPS * sizeof *loops, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (loops == MAP_FAILED || posix_memalign((void **)&buffer, 4096, CHUNK))
        return 1;
    sha_start();
    watch_power_button();
    answer("GUEST-UP");
    while (fgets(line, sizeof line, stdin))
        obey(line);
    return 0;
}
