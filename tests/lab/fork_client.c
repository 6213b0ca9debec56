// SPDX-License-Identifier: Apache-2.0
// In place of python3: has the fork server (fork_server.py) run a program of ours, and ends as that does. Any other program, and one
// that the server does not take, is run by the interpreter itself. The server is the one beside it, by the path that it is called by,
// else the node's.
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

enum { MOST = 180 * 1024 };
static char message[MOST];
static size_t length;

static int add(const char *text)
{
    size_t size = strlen(text) + 1;
    if (length + size > MOST)
        return 0;
    memcpy(message + length, text, size);
    length += size;
    return 1;
}

static int add_number(long number)
{
    char text[32];
    snprintf(text, sizeof text, "%ld", number);
    return add(text);
}

// mask of files, niceness, how many arguments, arguments, environment
static int describe(int argc, char **argv, char **environment)
{
    mode_t mask = umask(0);
    umask(mask);
    int fits = add_number(mask) && add_number(getpriority(PRIO_PROCESS, 0)) && add_number(argc - 2);
    for (char **a = argv + 2; fits && *a; a++)
        fits = add(*a);
    for (char **e = environment; fits && *e; e++)
        fits = add(*e);
    return fits;
}

static int reach(const char *name)
{
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    const char *slash = strrchr(name, '/');
    snprintf(to.sun_path, sizeof to.sun_path, "%.*s/server", slash ? (int)(slash - name) : 0, name);
    if (!slash || access(to.sun_path, F_OK))
        snprintf(to.sun_path, sizeof to.sun_path, "/run/fork-server/%d", (int)geteuid());
    int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (s < 0 || connect(s, (struct sockaddr *)&to, sizeof to))
        return -1;
    return s;
}

// Send all of it with stdin, stdout, stderr and the working directory.
static int ask(int s)
{
    int fds[4] = {0, 1, 2, open(".", O_PATH | O_DIRECTORY | O_CLOEXEC)};
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof fds)];
    } control = {0};
    struct iovec part = {message, length};
    struct msghdr all = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.room, .msg_controllen = sizeof control.room};
    struct cmsghdr *c = CMSG_FIRSTHDR(&all);
    c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS, c->cmsg_len = CMSG_LEN(sizeof fds);
    memcpy(CMSG_DATA(c), fds, sizeof fds);
    int sent = fds[3] >= 0 && sendmsg(s, &all, MSG_NOSIGNAL) == (ssize_t)length;
    char taken = 0;
    if (fds[3] >= 0)
        close(fds[3]);
    return sent && recv(s, &taken, 1, 0) == 1 && taken == 'T';
}

static void end_as(int status)
{
    if (!WIFSIGNALED(status))
        exit(WEXITSTATUS(status));
    signal(WTERMSIG(status), SIG_DFL);
    raise(WTERMSIG(status));
    exit(128 + WTERMSIG(status));
}

int main(int argc, char **argv, char **environment)
{
    sigset_t passed_on, before;
    int s = -1;
    if (argc > 2 && (!strcmp(argv[1], "-IS") || !strcmp(argv[1], "-I")) && argv[2][0] == '/' && describe(argc, argv, environment))
        s = reach(argv[0]);
    if (s >= 0) {
        sigemptyset(&passed_on);
        for (size_t i = 0; i < 4; i++)
            sigaddset(&passed_on, (int[]){SIGTERM, SIGINT, SIGHUP, SIGQUIT}[i]);
        sigprocmask(SIG_BLOCK, &passed_on, &before);
    }
    if (s < 0 || !ask(s)) {
        if (s >= 0) {
            close(s);
            sigprocmask(SIG_SETMASK, &before, NULL);
        }
        argv[0] = (char *)"/usr/bin/python3"; // by which it finds its library
        execv(REAL, argv);
        perror(REAL);
        return 127;
    }
    for (int fd = 0; fd < 3; fd++)
        close(fd); // whoever reads what it writes waits for its end, not for ours
    struct pollfd what[2] = {{.fd = s, .events = POLLIN}, {.fd = signalfd(-1, &passed_on, SFD_CLOEXEC), .events = POLLIN}};
    for (;;) {
        struct signalfd_siginfo told;
        int status;
        if (poll(what, 2, -1) < 0)
            return 255;
        if (what[1].revents && read(what[1].fd, &told, sizeof told) == sizeof told)
            send(s, &(int){(int)told.ssi_signo}, sizeof(int), MSG_NOSIGNAL);
        if (what[0].revents) {
            if (recv(s, &status, sizeof status, 0) != sizeof status)
                return 255;
            end_as(status);
        }
    }
}
