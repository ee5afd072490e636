/* In place of the driver's library: a device whose memory is the host's, which does everything at once and in order. Compiled with
 * BATCH and PTX: what the driver returns for a batch and for a kernel's text; without BATCH it knows no batches. LAYOUT: what it
 * returns for a parameter behind a kernel's last; without LAYOUT it says nothing of parameters. OLD: a call is missing that all need. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define WAIT 1u
#define WRITE 2u
#define FUNCTION ((void *)0x7F00F00DF00D)

typedef struct operation {
    uint32_t kind, pad0;
    uint64_t address, value;
    uint32_t flags, pad1;
    uint64_t alias, pad2;
} operation;

static int say(const char *call) {
    printf("%s\n", call);
    fflush(stdout);
    return 0;
}

int cuCtxGetCurrent(void **context_p) {
    *context_p = FUNCTION;
    return 0;
}

int cuMemHostRegister_v2(void *at, size_t bytes, unsigned flags) { return (void)at, (void)bytes, flags == 3 ? 0 : 1; }

int cuMemHostGetDevicePointer_v2(uint64_t *pointer_p, void *at, unsigned flags) {
    *pointer_p = (uintptr_t)at;
    return (int)flags;
}

int cuMemHostUnregister(void *at) { return (void)at, say("unregister"); }

int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream) {
    (void)stream;
    memcpy(to, (void *)(uintptr_t)from, bytes);
    return say("copy to host");
}

int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) {
    (void)stream;
    memcpy((void *)(uintptr_t)to, from, bytes);
    return say("copy to device");
}

static int write_value(uint64_t address, uint32_t value) {
    __atomic_store_n((uint32_t *)(uintptr_t)address, value, __ATOMIC_RELEASE);
    return 0;
}

static int wait_value(uint64_t address, uint32_t value) {
    while ((int32_t)(__atomic_load_n((uint32_t *)(uintptr_t)address, __ATOMIC_ACQUIRE) - value) < 0) {
    }
    return 0;
}

int cuStreamWriteValue32_v2(void *stream, uint64_t address, uint32_t value, unsigned flags) {
    (void)stream;
    say("write");
    return flags == 0 ? write_value(address, value) : 1;
}

int cuStreamWaitValue32_v2(void *stream, uint64_t address, uint32_t value, unsigned flags) {
    (void)stream;
    say("wait");
    return flags == 0 ? wait_value(address, value) : 1;
}

#ifdef BATCH
int cuStreamBatchMemOp_v2(void *stream, unsigned count, const operation *operations, unsigned flags) {
    (void)stream;
    printf("batch of %u\n", count);
    fflush(stdout);
    if (BATCH != 0 || flags != 0)
        return 801;
    for (unsigned at = 0; at < count; at++) {
        if (operations[at].flags != 0 || (operations[at].kind != WAIT && operations[at].kind != WRITE))
            return 1;
        (operations[at].kind == WAIT ? wait_value : write_value)(operations[at].address, (uint32_t)operations[at].value);
    }
    return 0;
}
#endif

int cuModuleLoadData(void **module_p, const char *text) {
    *module_p = FUNCTION;
    return strstr(text, ".visible .entry farspark_take_reply(") == NULL ? 1 : PTX;
}

int cuModuleGetFunction(void **function_p, void *module, const char *name) {
    *function_p = FUNCTION;
    return module == FUNCTION && strcmp(name, "farspark_take_reply") == 0 ? 0 : 500;
}

int cuModuleUnload(void *module) { return (void)module, say("unload"); }

/* The kernel, in C. */
int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared_bytes, void *stream, void **parameters, void **extra) {
    const uint64_t reply = *(uint64_t *)parameters[0], result = *(uint64_t *)parameters[1];
    const uint32_t words = *(uint32_t *)parameters[2], round = *(uint32_t *)parameters[4];

    (void)stream;
    if (function != FUNCTION || grid_x * grid_y * grid_z * block_y * block_z != 1 || block_x % 32 != 0 || shared_bytes != 0 ||
        extra != NULL)
        return 1;
    printf("kernel on %u words\n", words);
    fflush(stdout);
    memcpy((void *)(uintptr_t)result, (const void *)(uintptr_t)reply, 4u * words);
    return write_value(*(uint64_t *)parameters[3], round);
}

#ifdef LAYOUT
int cuFuncGetParamInfo(void *function, size_t at, size_t *offset_p, size_t *size_p) {
    static const size_t layout[3][2] = {{0, 8}, {8, 4}, {16, 8}};

    if (function != FUNCTION || at >= 3)
        return LAYOUT;
    *offset_p = layout[at][0];
    *size_p = layout[at][1];
    return 0;
}
#endif

#ifndef OLD
int cuStreamQuery(void *stream) { return (void)stream, 0; }
#endif

int cuGetErrorString(int error, const char **text_p) {
    *text_p = error == 801 ? "operation not supported" : "planted";
    return 0;
}
