// SPDX-License-Identifier: Apache-2.0
// LD_PRELOAD for the lab's libvirtd. The shared stores of the lab are bind mounts, which libvirt takes for local disks and
// so calls a live migration unsafe. This makes statfs() report what it would on a real cloud, NFS, below the directories
// named in /etc/lab-shared (one per line). On x86-64 both structures are the kernel's; it asks the kernel itself, since dlsym of
// this machine's C library is none that an older one has (roots.py).
#define _GNU_SOURCE
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

static int shared(const char *path)
{
    char real[PATH_MAX], line[PATH_MAX];
    int found = 0;
    FILE *list;

    if (!realpath(path, real) || !(list = fopen("/etc/lab-shared", "re")))
        return 0;
    while (!found && fgets(line, sizeof line, list)) {
        size_t n = strcspn(line, "\n");
        found = n && !strncmp(real, line, n) && (real[n] == '/' || !real[n]);
    }
    fclose(list);
    return found;
}

int statfs(const char *path, struct statfs *out)
{
    int rc = syscall(SYS_statfs, path, out);
    if (!rc && shared(path))
        out->f_type = 0x6969;
    return rc;
}

int statfs64(const char *path, struct statfs64 *out)
{
    int rc = syscall(SYS_statfs, path, out);
    if (!rc && shared(path))
        out->f_type = 0x6969;
    return rc;
}
