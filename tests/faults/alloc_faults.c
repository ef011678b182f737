/* Preloaded by test_tiers_faults.py: the n-th allocation of the engine fails, or 2 MiB pages, or registering host memory.
 * Counts buffers (host and device alike), the mapping for host cells, and registrations. ALLOC_FAULT_AT=N does it without a call. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static int fault_at, seen, small_pages, no_register, registered;

__attribute__((constructor)) static void from_environment(void) {
    const char * at = getenv("ALLOC_FAULT_AT");
    fault_at = at ? atoi(at) : 0;
}

void faults_set(int at, int pages, int refuse) {
    fault_at = at;
    small_pages = pages;
    no_register = refuse;
    seen = registered = 0;
}

int faults_seen(void) { return seen; }
int faults_registered(void) { return registered; }

static bool due(void) { return ++seen == fault_at; }

static int is_engine(struct dl_phdr_info * object, size_t size, void * name) {
    (void) size;
    if (!strstr(object->dlpi_name, "/libggml-base.so")) {
        return 0;
    }
    *(const char **) name = object->dlpi_name;
    return 1;
}

/* the engine is loaded by ctypes, outside the scope that RTLD_NEXT looks through */
static void * engine(const char * function) {
    const char * library = NULL;
    dl_iterate_phdr(is_engine, &library);
    return dlsym(dlopen(library, RTLD_LAZY | RTLD_NOLOAD), function);
}

void * ggml_backend_buft_alloc_buffer(void * type, size_t size) {
    static void * (*next)(void *, size_t);
    if (!next) {
        next = engine("ggml_backend_buft_alloc_buffer");
    }
    return size > 0 && due() ? NULL : next(type, size);
}

void * mmap(void * address, size_t size, int protection, int flags, int file, off_t offset) {
    static void * (*next)(void *, size_t, int, int, int, off_t);
    if (!next) {
        next = dlsym(RTLD_NEXT, "mmap");
    }
    if ((flags & MAP_NORESERVE) && (flags & MAP_ANONYMOUS) && (protection & PROT_WRITE) && due()) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    return next(address, size, protection, flags, file, offset);
}

int madvise(void * address, size_t size, int advice) {
    static int (*next)(void *, size_t, int);
    if (!next) {
        next = dlsym(RTLD_NEXT, "madvise");
    }
    if (small_pages && advice == MADV_HUGEPAGE) {
        errno = EINVAL;
        return -1;
    }
    return next(address, size, advice);
}

static bool register_host(void * address, size_t size) {
    (void) address, (void) size;
    if (no_register || due()) {
        return false;
    }
    registered++;
    return true;
}

static void unregister_host(void * address) {
    (void) address;
    registered--;
}

/* an RPC device has nothing to register with: here it does */
void * ggml_backend_reg_get_proc_address(void * registry, const char * name) {
    static void * (*next)(void *, const char *);
    if (!next) {
        next = engine("ggml_backend_reg_get_proc_address");
    }
    if (strcmp(name, "hg_register_host_buffer") == 0) {
        return (void *) register_host;
    }
    if (strcmp(name, "hg_unregister_host_buffer") == 0) {
        return (void *) unregister_host;
    }
    return next(registry, name);
}
