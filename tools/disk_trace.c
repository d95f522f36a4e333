/* Record every change of files below one directory, in order, with what was written: for tools/disk_trace.py.

   Preloaded (LD_PRELOAD) into a process that calls trace_to(), or that finds DISK_TRACE and DISK_TRACE_ROOT in its
   environment. Each call is made and recorded under one lock of all processes, so the order of records is the order of
   events. Files written through a mapping or through FILE are recorded when they are flushed, with all of their content.
   A record: struct head, path, second path, data. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

struct head {
    uint32_t magic;
    uint16_t kind, path, second, unused;
    uint64_t inode, offset, size;
} __attribute__((packed));

static char trace_path[PATH_MAX], root[PATH_MAX];
static size_t root_length;
static int trace = -1;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static void lock_file(int kind) {
    struct flock lock = {.l_type = kind, .l_whence = SEEK_SET};
    while (fcntl(trace, F_OFD_SETLKW, &lock) && errno == EINTR) {}
}
static void begin(void) { pthread_mutex_lock(&mutex); lock_file(F_WRLCK); }
static void end(void) { int kept = errno; lock_file(F_UNLCK); pthread_mutex_unlock(&mutex); errno = kept; }

static ssize_t raw_write(int fd, const void *data, size_t size) { REAL(write); return real(fd, data, size); }
static int raw_open(const char *path, int flags) { REAL(open64); return real(path, flags, 0600); }
static int raw_close(int fd) { REAL(close); return real(fd); }

static void reopen(void) {
    if (trace >= 0) raw_close(trace);
    int fd = raw_open(trace_path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC);
    trace = fcntl(fd, F_DUPFD_CLOEXEC, 900);  /* out of the way of programs that close low numbers */
    raw_close(fd);
}
static void before_fork(void) { pthread_mutex_lock(&mutex); }
static void after_fork(void) { pthread_mutex_unlock(&mutex); }
static void in_child(void) { pthread_mutex_init(&mutex, NULL); if (trace >= 0) reopen(); }

void trace_to(const char *path, const char *below) {
    snprintf(trace_path, sizeof trace_path, "%s", path);
    snprintf(root, sizeof root, "%s", below);
    root_length = strlen(root);
    reopen();
}
__attribute__((constructor)) static void start(void) {
    pthread_atfork(before_fork, after_fork, in_child);
    if (getenv("DISK_TRACE") && getenv("DISK_TRACE_ROOT")) trace_to(getenv("DISK_TRACE"), getenv("DISK_TRACE_ROOT"));
}

/* Whether a path is below the root; its absolute form in `out`. */
static int inside(int dir, const char *path, char *out) {
    if (trace < 0 || !path) return 0;
    if (path[0] == '/') {
        if (snprintf(out, PATH_MAX, "%s", path) >= PATH_MAX) return 0;
    } else {
        char base[PATH_MAX], link[64];
        ssize_t n;
        if (dir == AT_FDCWD) {
            if (!getcwd(base, sizeof base)) return 0;
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
            if ((n = readlink(link, base, sizeof base - 1)) < 0) return 0;
            base[n] = 0;
        }
        if (snprintf(out, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) return 0;
    }
    return !strncmp(out, root, root_length) && (out[root_length] == '/' || !out[root_length]);
}
static int traced(int fd) {
    char path[PATH_MAX], link[64];
    if (trace < 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}
static uint64_t inode_of(int fd) { struct stat st; return fstat(fd, &st) ? 0 : st.st_ino; }
static uint64_t inode_at(const char *path) { struct stat st; return lstat(path, &st) ? 0 : st.st_ino; }

static void put_all(const char *data, size_t size) {
    while (size) {
        ssize_t n = raw_write(trace, data, size);
        if (n < 0) { if (errno == EINTR) continue; _exit(97); }
        data += n, size -= n;
    }
}
static void put(int kind, const char *path, const char *second, uint64_t inode, uint64_t offset, const void *data, size_t size) {
    struct head head = {0x45434152, kind, path ? strlen(path) : 0, second ? strlen(second) : 0, 0, inode, offset, size};
    size_t length = sizeof head + head.path + head.second + size;
    char *whole = malloc(length);
    if (!whole) _exit(98);
    memcpy(whole, &head, sizeof head);
    if (path) memcpy(whole + sizeof head, path, head.path);
    if (second) memcpy(whole + sizeof head + head.path, second, head.second);
    if (size) memcpy(whole + sizeof head + head.path + head.second, data, size);
    put_all(whole, length);
    free(whole);
}
/* A piece of a file as it is now. */
static void put_content(int kind, int fd, uint64_t offset, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int in = raw_open(link, O_RDONLY | O_CLOEXEC);
    char *data = malloc(size + 1);
    size_t got = 0;
    ssize_t n = 1;
    while (in >= 0 && got < size && (n = pread(in, data + got, size - got, offset + got)) > 0) got += n;
    if (in < 0 || n < 0) _exit(99);
    put(kind, NULL, NULL, inode_of(fd), offset, data, got);
    free(data);
    raw_close(in);
}

#define SUCCEEDED(call, record) \
    begin(); __typeof__(call) result = call; if (result >= 0) { int kept = errno; record; errno = kept; } end(); return result

static int opened(int dir, const char *path, int flags, mode_t mode) {
    REAL(openat64);
    char whole[PATH_MAX];
    if (!(flags & (O_CREAT | O_TRUNC)) || !inside(dir, path, whole)) return real(dir, path, flags, mode);
    begin();
    int fresh = !inode_at(whole), fd = real(dir, path, flags, mode), kept = errno;
    if (fd >= 0 && fresh) put('c', whole, NULL, inode_of(fd), 0, NULL, 0);
    else if (fd >= 0 && flags & O_TRUNC) put('t', NULL, NULL, inode_of(fd), 0, NULL, 0);
    errno = kept;
    end();
    return fd;
}
#define MODE mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list list; va_start(list, flags); mode = va_arg(list, mode_t); va_end(list); }
int open(const char *path, int flags, ...) { MODE return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE return opened(AT_FDCWD, path, flags | O_LARGEFILE, mode); }
int openat(int dir, const char *path, int flags, ...) { MODE return opened(dir, path, flags, mode); }
int openat64(int dir, const char *path, int flags, ...) { MODE return opened(dir, path, flags | O_LARGEFILE, mode); }
int creat(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    if (!traced(fd)) return real(fd, data, size);
    SUCCEEDED(real(fd, data, size), put('w', NULL, NULL, inode_of(fd), lseek(fd, 0, SEEK_CUR) - result, data, result));
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(writev);
    if (!traced(fd)) return real(fd, parts, count);
    SUCCEEDED(real(fd, parts, count), put_content('w', fd, lseek(fd, 0, SEEK_CUR) - result, result));
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    REAL(pwrite);
    if (!traced(fd)) return real(fd, data, size, offset);
    SUCCEEDED(real(fd, data, size, offset), put('w', NULL, NULL, inode_of(fd), offset, data, result));
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    REAL(pwrite64);
    if (!traced(fd)) return real(fd, data, size, offset);
    SUCCEEDED(real(fd, data, size, offset), put('w', NULL, NULL, inode_of(fd), offset, data, result));
}
ssize_t sendfile(int out, int in, off_t *offset, size_t size) {
    REAL(sendfile);
    if (!traced(out)) return real(out, in, offset, size);
    SUCCEEDED(real(out, in, offset, size), put_content('w', out, lseek(out, 0, SEEK_CUR) - result, result));
}
ssize_t sendfile64(int out, int in, off64_t *offset, size_t size) {
    REAL(sendfile64);
    if (!traced(out)) return real(out, in, offset, size);
    SUCCEEDED(real(out, in, offset, size), put_content('w', out, lseek(out, 0, SEEK_CUR) - result, result));
}
ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags) {
    REAL(copy_file_range);
    if (!traced(out)) return real(in, from, out, to, size, flags);
    SUCCEEDED(real(in, from, out, to, size, flags),
              put_content('w', out, (to ? *to : lseek(out, 0, SEEK_CUR)) - result, result));
}
static void flushed(int fd) {
    struct stat st;
    if (fstat(fd, &st)) return;
    if (S_ISDIR(st.st_mode)) put('d', NULL, NULL, st.st_ino, 0, NULL, 0);
    else put_content('s', fd, 0, st.st_size);
}
int fsync(int fd) {
    REAL(fsync);
    if (!traced(fd)) return real(fd);
    SUCCEEDED(real(fd), flushed(fd));
}
int fdatasync(int fd) {
    REAL(fdatasync);
    if (!traced(fd)) return real(fd);
    SUCCEEDED(real(fd), flushed(fd));
}
int ftruncate(int fd, off_t size) {
    REAL(ftruncate);
    if (!traced(fd)) return real(fd, size);
    SUCCEEDED(real(fd, size), put('t', NULL, NULL, inode_of(fd), size, NULL, 0));
}
int ftruncate64(int fd, off64_t size) {
    REAL(ftruncate64);
    if (!traced(fd)) return real(fd, size);
    SUCCEEDED(real(fd, size), put('t', NULL, NULL, inode_of(fd), size, NULL, 0));
}
int truncate(const char *path, off_t size) {
    REAL(truncate);
    char whole[PATH_MAX];
    if (!inside(AT_FDCWD, path, whole)) return real(path, size);
    SUCCEEDED(real(path, size), put('t', NULL, NULL, inode_at(whole), size, NULL, 0));
}
int truncate64(const char *path, off64_t size) { return truncate(path, size); }
int fallocate(int fd, int mode, off_t offset, off_t size) {
    REAL(fallocate);
    if (mode || !traced(fd)) return real(fd, mode, offset, size);  /* with a mode: the size stays */
    struct stat st;
    SUCCEEDED(real(fd, mode, offset, size), if (!fstat(fd, &st)) put('t', NULL, NULL, st.st_ino, st.st_size, NULL, 0));
}
int fallocate64(int fd, int mode, off64_t offset, off64_t size) { return fallocate(fd, mode, offset, size); }

static int renamed(int from, const char *old, int to, const char *new, unsigned flags) {
    REAL(renameat2);
    char first[PATH_MAX], second[PATH_MAX];
    int a = inside(from, old, first), b = inside(to, new, second);
    if (!a && !b) return real(from, old, to, new, flags);
    SUCCEEDED(real(from, old, to, new, flags), put('r', first, second, inode_at(second), 0, NULL, 0));
}
int rename(const char *old, const char *new) { return renamed(AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int from, const char *old, int to, const char *new) { return renamed(from, old, to, new, 0); }
int renameat2(int from, const char *old, int to, const char *new, unsigned flags) { return renamed(from, old, to, new, flags); }

int linkat(int from, const char *old, int to, const char *new, int flags) {
    REAL(linkat);
    char first[PATH_MAX] = "", second[PATH_MAX];
    inside(from, old, first);
    if (!inside(to, new, second)) return real(from, old, to, new, flags);
    SUCCEEDED(real(from, old, to, new, flags), put('l', first, second, inode_at(second), 0, NULL, 0));
}
int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }

int unlinkat(int dir, const char *path, int flags) {
    REAL(unlinkat);
    char whole[PATH_MAX];
    if (!inside(dir, path, whole)) return real(dir, path, flags);
    SUCCEEDED(real(dir, path, flags), put('u', whole, NULL, 0, 0, NULL, 0));
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char *path) { int failed = unlinkat(AT_FDCWD, path, 0); return failed && errno == EISDIR ? rmdir(path) : failed; }

int mkdirat(int dir, const char *path, mode_t mode) {
    REAL(mkdirat);
    char whole[PATH_MAX];
    if (!inside(dir, path, whole)) return real(dir, path, mode);
    SUCCEEDED(real(dir, path, mode), put('m', whole, NULL, inode_at(whole), 0, NULL, 0));
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }
