// SPDX-License-Identifier: Apache-2.0
// First process of a lab guest: load the drivers, then keep the agent on the serial console. No shell does it: that
// starts a program for each driver, which costs an emulated processor as much as the driver.
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

// The drivers in a folder, in the order that its file says. One that does not fit the machine fails, and is not missed.
static void load(const char *folder)
{
    char name[64], path[128];
    if (chdir(folder))
        return;
    FILE *order = fopen("order", "r");
    while (order && fscanf(order, "%63s", name) == 1) {
        snprintf(path, sizeof path, "%s.ko", name);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd >= 0) {
            syscall(SYS_finit_module, fd, "", 0);
            close(fd);
        }
    }
    if (order)
        fclose(order);
}

// Whether there is a PCI device, by vendor and device as lspci -n has them.
static int has_device(const char *wanted)
{
    char path[300], found[64];
    int there = 0;
    DIR *devices = opendir("/sys/bus/pci/devices");
    for (struct dirent *e; devices && !there && (e = readdir(devices));) {
        snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/uevent", e->d_name);
        FILE *about = fopen(path, "r");
        while (about && !there && fscanf(about, "%63s", found) == 1)
            there = !strncmp(found, "PCI_ID=", 7) && !strcmp(found + 7, wanted);
        if (about)
            fclose(about);
    }
    if (devices)
        closedir(devices);
    return there;
}

// `before`: how the one before it has ended, -1 for the first.
static void agent(int before)
{
    setsid();
    int fd = open("/dev/ttyS0", O_RDWR);
    ioctl(fd, TIOCSCTTY, 1);
    for (int i = 0; i < 3; i++)
        dup2(fd, i);
    if (fd > 2)
        close(fd);
    if (before != -1)
        dprintf(1, "agent: ended with %x\n", before);
    execl("/bin/agent", "agent", (char *)NULL);
    _exit(127);
}

int main(void)
{
    static const char *const folders[] = {"/proc", "/sys", "/dev", "/mnt"};
    for (int i = 0; i < 4; i++)
        mkdir(folders[i], 0755);
    mount("proc", "/proc", "proc", 0, "");
    mount("sysfs", "/sys", "sysfs", 0, "");
    mount("dev", "/dev", "devtmpfs", 0, "");
    load("/modules");
    if (!access("/sys/firmware/efi", F_OK)) {
        load("/modules/efi");
        mount("efivarfs", "/sys/firmware/efi/efivars", "efivarfs", 0, "");
    }
    if (has_device("1AF4:105A")) // a directory of the host
        load("/modules/share");
    if (chdir("/"))
        return 1;
    for (int status = -1;;) {
        pid_t child = fork();
        if (!child)
            agent(status);
        while (child > 0 && wait(&status) != child)
            ;
    }
}
