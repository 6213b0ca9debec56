// SPDX-License-Identifier: Apache-2.0
// characters PATH FROM_MIB MIB: write each character of so many MiB by itself, as Bonnie's first test does, until all have arrived.
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    FILE *file = argc == 4 ? fopen(argv[1], "r+") : NULL;
    if (!file || fseeko(file, (off_t)atoi(argv[2]) << 20, SEEK_SET))
        return 1;
    for (long left = (long)atoi(argv[3]) << 20; left; left--)
        if (putc((int)(left & 127), file) == EOF)
            return 1;
    return fflush(file) || fsync(fileno(file));
}
