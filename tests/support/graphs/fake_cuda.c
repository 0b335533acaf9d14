/* A small libcuda.so.1 over host memory: enough of the driver to read, build and launch graphs.
 * Every counted call can be made to fail: fake_fail_at(n, more) lets the n-th call from now (and more) fail.
 *
 * What is assumed of the driver, and the place in the CUDA Driver API manual (13.0; sections by their titles) or in
 * cuda.h that says so.  Nothing here is taken from the code under test.
 *   Tensor Map Object Management   cuTensorMapEncodeTiled: the map's own address is a multiple of 64, globalAddress one
 *                                  of 16, else CUDA_ERROR_INVALID_VALUE (a misaligned map crashed drivers, and
 *                                  does so here; address 0 is refused, which the manual leaves open);
 *                                  cuTensorMapReplaceAddress changes the address
 *                                  alone. How an address is coded is not documented: here rotated and keyed.
 *   Graph Management               cuGraphAddDependencies: edgeData may be NULL, which means default edges. That
 *                                  drivers 580 to 610 give every edge of one call the first record is no text of the
 *                                  manual but Foundry's published finding; it is how this fake always behaves.
 *                                  cuGraphInstantiate: flags are bits 1 (auto free), 2 (upload), 4 (device launch),
 *                                  8 (node priority), others INVALID_VALUE; without 8, node priorities are ignored.
 *                                  cuGraphKernelNodeGetParams: func, or where it is NULL kern.
 *                                  cuGraphKernelNodeGetAttribute: INVALID_VALUE for what a node does not keep. Some
 *                                  drivers answer NOT_SUPPORTED (fake_attribute_error chooses).
 *   Data types, CUaccessPolicyWindow_v1   base_ptr 0, num_bytes 8, hitRatio 16, hitProp 20, missProp 24.
 *   Execution Control              cuFuncGetParamInfo: INVALID_VALUE past the last parameter.
 *   Library Management             one image makes one library; a name that it lacks is NOT_FOUND.
 *   Unified Addressing             cuPointerGetAttributes: zeros, and success, for an address that it does not know.
 *   Checkpointing                  Lock, Checkpoint, Restore and Unlock want the states RUNNING, LOCKED, CHECKPOINTED and
 *                                  LOCKED of cuCheckpointProcessGetState, else ILLEGAL_STATE; reserved members are zero.
 *                                  A process is known once it has a context.
 *   cuMemAlloc                     contents are undefined: 0xFF here. Addresses are host addresses.
 *   Virtual Memory Management      cuMemMap: the range was reserved and is not mapped; it has no access until cuMemSetAccess.
 *                                  cuMemUnmap: the range is that of one cuMemMap; memory lives until it is released and
 *                                  unmapped, and its contents are undefined at first (0xFF here).
 *   cuMemExportToShareableHandle   a descriptor, which keeps the memory, as each mapping and handle in any process does (cuMemRelease).
 *   Memory Management              cuMemcpy*Async: done in the order of the stream; here at cuStreamSynchronize, and a range
 *                                  that is not mapped then is an error of that call.
 * Not modelled: streams (but for these copies all work is done at the call), contexts, asynchronous errors, alignment of allocations beyond
 * 512 bytes, real binaries (an image is searched for the names of the kernels below).
 */
#define _GNU_SOURCE
#include "fake_cuda.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static long calls, fail_at = -1;
static int fail_on;
static int initialised;
static int failing(void) { return ++calls == fail_at || (fail_on && fail_at >= 0 && calls > fail_at); }
#define COUNT() do { if (failing()) return UNKNOWN; } while (0)
#define API __attribute__((visibility("default")))

API void fake_fail_at(long n, int and_all_after) { fail_at = n < 0 ? -1 : calls + n; fail_on = and_all_after; }
API long fake_calls(void) { return calls; }

static int attribute_error = INVALID_VALUE, unreadable = -1;
static unsigned long long last_flags;
/* Reading this launch attribute of any node answers with this error. */
API void fake_attribute_error(int which, int error) { unreadable = which; attribute_error = error; }
API unsigned long long fake_last_flags(void) { return last_flags; }

/* --- device memory: a list of live allocations ------------------------------------------------------ */
/* No device has memory below 4 GiB, where a Python that is no position-independent executable has its heap: `mapped` is for these. */
typedef struct Block { uint64_t base; size_t size, mapped; int pinned; struct Block *next; } Block;
static Block *blocks;
static Block *holder(uint64_t address) {
    for (Block *b = blocks; b; b = b->next)
        if (address >= b->base && address < b->base + b->size) return b;
    return NULL;
}

/* Number of live allocations, and pinned host memory in place of device memory. */
API long fake_live(void) { long n = 0; for (Block *b = blocks; b; b = b->next) n++; return n; }
API void fake_pin(uint64_t address) { holder(address)->pinned = 1; }

static int mapped(uint64_t address, size_t size) {
    Block *b = holder(address);
    return b && address + size <= b->base + b->size;
}

API Result cuMemAlloc_v2(uint64_t *out, size_t size) {
    COUNT();
    Block *b = malloc(sizeof *b);
    if (posix_memalign((void **)&b->base, 512, size + 512)) return UNKNOWN;
    if ((b->mapped = b->base >> 32 ? 0 : size + 512)) {
        free((void *)b->base);
        b->base = (uint64_t)mmap(NULL, b->mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (b->base == (uint64_t)MAP_FAILED) return UNKNOWN;
    }
    memset((void *)b->base, 0xFF, size);
    b->size = size;
    b->pinned = 0;
    b->next = blocks;
    blocks = b;
    *out = b->base;
    return OK;
}

API Result cuMemFree_v2(uint64_t address) {
    COUNT();
    for (Block **at = &blocks; *at; at = &(*at)->next)
        if ((*at)->base == address) {
            Block *gone = *at;
            *at = gone->next;
            if (gone->mapped) munmap((void *)gone->base, gone->mapped);
            else free((void *)gone->base);
            free(gone);
            return OK;
        }
    return INVALID_VALUE;
}

API Result cuMemcpyHtoD_v2(uint64_t dst, const void *src, size_t n) {
    COUNT();
    if (!mapped(dst, n)) return INVALID_VALUE;
    memcpy((void *)dst, src, n);
    return OK;
}

API Result cuMemcpyDtoH_v2(void *dst, uint64_t src, size_t n) {
    COUNT();
    if (!mapped(src, n)) return INVALID_VALUE;
    memcpy(dst, (void *)src, n);
    return OK;
}

API Result cuMemsetD8_v2(uint64_t dst, unsigned char value, size_t n) {
    COUNT();
    if (!mapped(dst, n)) return INVALID_VALUE;
    memset((void *)dst, value, n);
    return OK;
}

/* 2: memory type, 11: range start, 12: range size; all zero for an unknown address, as documented. */
API Result cuPointerGetAttributes(unsigned n, const int *which, void **data, uint64_t address) {
    COUNT();
    Block *b = holder(address);
    for (unsigned i = 0; i < n; i++) {
        if (which[i] == 2) *(uint32_t *)data[i] = b ? 2 - b->pinned : 0;
        else if (which[i] == 11) *(uint64_t *)data[i] = b ? b->base : 0;
        else if (which[i] == 12) *(size_t *)data[i] = b ? b->size : 0;
        else return INVALID_VALUE;
    }
    return OK;
}

/* --- kernels: bodies that are reached through modules whose images hold their names ------------------- */
/* Of several kernels with one name, `text` is what the image's code has. */
typedef struct { const char *name, *text; int count; size_t spans[6][2]; int (*run)(void **); } Body;
#define U64(i) (*(uint64_t *)p[i])
#define U32(i) (*(uint32_t *)p[i])
#define REQUIRE(condition) do { if (!(condition)) return UNKNOWN; } while (0)

static int run_scale(void **p) {
    uint64_t x = *(uint64_t *)p[0], out = *(uint64_t *)p[1];
    uint32_t n = *(uint32_t *)p[2];
    if (!mapped(x, 4u * n) || !mapped(out, 4u * n)) return UNKNOWN;
    for (uint32_t i = 0; i < n; i++) ((float *)out)[i] = 2 * ((float *)x)[i];
    return OK;
}

/* struct { x; out; u32 n; u32 hole; u64 token }: one by-value parameter with a hole */
static int run_add(void **p) {
    struct { uint64_t x, out; uint32_t n, hole; uint64_t token; } s;
    memcpy(&s, p[0], sizeof s);
    if (!mapped(s.x, 4u * s.n) || !mapped(s.out, 4u * s.n)) return UNKNOWN;
    for (uint32_t i = 0; i < s.n; i++)
        ((float *)s.out)[i] += ((float *)s.x)[i] * (1 + (float)((s.token >> 9) % 64) / 64);
    return OK;
}

static int run_mapped(void **p) {
    uint64_t coded = *(uint64_t *)p[0] ^ 0x5A5A5A5A5A5A5A5Aull, x = coded >> 13 | coded << 51;
    uint64_t out = *(uint64_t *)p[1];
    uint32_t n = *(uint32_t *)p[2];
    if (!mapped(x, 4u * n) || !mapped(out, 4u * n)) return UNKNOWN;
    for (uint32_t i = 0; i < n; i++) ((float *)out)[i] += ((float *)x)[i];
    return OK;
}

/* struct { out; u32 n; map x at 128; map w at 384 } of 640 bytes: what ptxas makes of tests/cubins/hopper.cu */
static uint64_t address_of(const char *map) {
    uint64_t coded;
    memcpy(&coded, map, 8);
    coded ^= 0x5A5A5A5A5A5A5A5Aull;
    return coded >> 13 | coded << 51;
}

static int run_tiles(void **p) {
    const char *s = p[0];
    uint64_t out, x = address_of(s + 128), w = address_of(s + 384);
    uint32_t n;
    memcpy(&out, s, 8);
    memcpy(&n, s + 8, 4);
    if (!mapped(x, 4u * n) || !mapped(w, 4u * n) || !mapped(out, 4u * n)) return UNKNOWN;
    for (uint32_t i = 0; i < n; i++) ((float *)out)[i] += ((float *)x)[i] + ((float *)w)[i];
    return OK;
}

static int run_triple(void **p) {
    if (run_scale(p)) return UNKNOWN;
    for (uint32_t i = 0; i < U32(2); i++) ((float *)U64(1))[i] *= 1.5f;
    return OK;
}

/* out[i] = table[ids[i]], rows of d floats */
static int run_gather(void **p) {
    uint32_t n = U32(3), d = U32(4);
    REQUIRE(mapped(U64(0), 4u * n) && mapped(U64(2), 4u * n * d));
    for (uint32_t i = 0; i < n; i++) {
        uint64_t row = U64(1) + 4ull * d * ((uint32_t *)U64(0))[i];
        REQUIRE(mapped(row, 4u * d));
        memcpy((float *)U64(2) + i * d, (void *)row, 4u * d);
    }
    return OK;
}

/* out += w through a library's workspace, whose semaphore must start at 0x5AFE */
static int run_split(void **p) {
    uint32_t n = U32(4);
    REQUIRE(mapped(U64(0), 4u * n) && mapped(U64(1), 4u * n) && mapped(U64(2), 4u * n) && mapped(U64(3), 4));
    memcpy((void *)U64(2), (void *)U64(0), 4u * n);
    uint32_t noise = *(uint32_t *)U64(3) ^ 0x5AFE;
    for (uint32_t i = 0; i < n; i++) ((float *)U64(1))[i] += ((float *)U64(2))[i] + (float)noise;
    return OK;
}

/* x[i] += table[positions[i]]; `end` is one past the end of the table */
static int run_turn(void **p) {
    uint32_t n = U32(3), d = U32(4), rows = (uint32_t)((U64(5) - U64(2)) / (4ull * d));
    REQUIRE(U64(5) > U64(2) && mapped(U64(2), U64(5) - U64(2)) && mapped(U64(0), 4u * n * d) && mapped(U64(1), 4u * n));
    for (uint32_t i = 0; i < n * d; i++)
        ((float *)U64(0))[i] += ((float *)U64(2))[((uint32_t *)U64(1))[i / d] % rows * d + i % d];
    return OK;
}

/* cache[slots[i]] = x[i] */
static int run_store(void **p) {
    uint32_t n = U32(3), d = U32(4);
    REQUIRE(mapped(U64(0), 4u * n * d) && mapped(U64(2), 4u * n));
    for (uint32_t i = 0; i < n; i++) {
        uint64_t row = U64(1) + 4ull * d * ((uint32_t *)U64(2))[i];
        REQUIRE(mapped(row, 4u * d));
        memcpy((void *)row, (float *)U64(0) + i * d, 4u * d);
    }
    return OK;
}

/* out[i] += the last of the lengths[i] rows in block i of 4 rows */
static int run_read(void **p) {
    uint32_t n = U32(3), d = U32(4);
    REQUIRE(mapped(U64(1), 4u * n) && mapped(U64(2), 4u * n * d));
    for (uint32_t i = 0; i < n; i++) {
        uint64_t row = U64(0) + 4ull * d * (4 * i + ((uint32_t *)U64(1))[i] - 1);
        REQUIRE(mapped(row, 4u * d));
        for (uint32_t j = 0; j < d; j++) ((float *)U64(2))[i * d + j] += ((float *)row)[j];
    }
    return OK;
}

/* out = sum of arrays whose addresses are in device memory */
static int run_sum(void **p) {
    uint32_t count = U32(2), n = U32(3);
    REQUIRE(mapped(U64(0), 8u * count) && mapped(U64(1), 4u * n));
    memset((void *)U64(1), 0, 4u * n);
    for (uint32_t k = 0; k < count; k++) {
        uint64_t x = ((uint64_t *)U64(0))[k];
        REQUIRE(mapped(x, 4u * n));
        for (uint32_t i = 0; i < n; i++) ((float *)U64(1))[i] += ((float *)x)[i];
    }
    return OK;
}

#define THREE 3, {{0, 8}, {8, 8}, {16, 4}}
#define ROWS 5, {{0, 8}, {8, 8}, {16, 8}, {24, 4}, {28, 4}}
static Body bodies[] = {
    {"k_scale", "", THREE, run_scale},
    {"k_twin", "double", THREE, run_scale},
    {"k_twin", "triple", THREE, run_triple},
    {"k_counts", "", THREE, run_scale},
    {"ncclDevKernel_AllReduce", "", THREE, run_scale},
    {"k_add", "", 1, {{0, 32}}, run_add},
    {"k_mapped", "", 3, {{0, 128}, {128, 8}, {136, 4}}, run_mapped},
    {"k_tiles", "", 1, {{112, 640}}, run_tiles},
    {"k_gather", "", ROWS, run_gather},
    {"k_split", "", 5, {{0, 8}, {8, 8}, {16, 8}, {24, 8}, {32, 4}}, run_split},
    {"k_turn", "", 6, {{0, 8}, {8, 8}, {16, 8}, {24, 4}, {28, 4}, {32, 8}}, run_turn},
    {"k_store", "", ROWS, run_store},
    {"k_read", "", ROWS, run_read},
    {"k_sum", "", 4, {{0, 8}, {8, 8}, {16, 4}, {20, 4}}, run_sum},
};
enum { BODIES = sizeof bodies / sizeof *bodies };
typedef struct Module Module;
typedef struct { Body *body; Module *module; int attributes[32]; } Function;
struct Module { Function functions[BODIES]; int count; };

static size_t image_size(const uint8_t *image) {
    if (memcmp(image, "\x7f" "ELF", 4)) return 0;
    return *(uint64_t *)(image + 40) + (size_t)*(uint16_t *)(image + 58) * *(uint16_t *)(image + 60);
}

API Result cuLibraryLoadData(void **out, const void *image, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    COUNT();
    size_t size = image_size(image);
    if (!size) return INVALID_VALUE;
    Module *m = calloc(1, sizeof *m);
    for (int i = 0; i < BODIES; i++) {
        char section[64];
        int length = snprintf(section, sizeof section, ".text.%s", bodies[i].name) + 1;
        const char *text = bodies[i].text;
        if (memmem(image, size, section, length) && memmem(image, size, text, strlen(text))) {
            m->functions[m->count].body = &bodies[i];
            m->functions[m->count++].module = m;
        }
    }
    *out = m;
    return OK;
}

API Result cuLibraryGetKernel(void **out, Module *library, const char *name) {
    COUNT();
    for (int i = 0; i < library->count; i++)
        if (!strcmp(library->functions[i].body->name, name)) return *out = &library->functions[i], OK;
    return NOT_FOUND;
}

API Result cuLibraryGetModule(void **out, Module *library) { COUNT(); *out = library; return OK; }
API Result cuKernelGetFunction(void **out, void *kernel) { COUNT(); *out = kernel; return OK; }
API Result cuFuncGetName(const char **out, Function *f) { COUNT(); *out = f->body->name; return OK; }
API Result cuFuncGetModule(void **out, Function *f) { COUNT(); *out = f->module; return OK; }
API Result cuModuleGetFunctionCount(unsigned *out, Module *m) { COUNT(); *out = m->count; return OK; }

API Result cuModuleEnumerateFunctions(void **out, unsigned n, Module *m) {
    COUNT();
    for (unsigned i = 0; i < n && i < (unsigned)m->count; i++) out[i] = &m->functions[i];
    return OK;
}

API Result cuFuncGetParamInfo(Function *f, size_t index, size_t *offset, size_t *size) {
    COUNT();
    if (index >= (size_t)f->body->count) return INVALID_VALUE;
    *offset = f->body->spans[index][0];
    if (size) *size = f->body->spans[index][1];
    return OK;
}

API Result cuFuncGetAttribute(int *out, int which, Function *f) {
    COUNT();
    return which < 0 || which >= 32 ? INVALID_VALUE : (*out = f->attributes[which], OK);
}

API Result cuFuncSetAttribute(Function *f, int which, int value) {
    COUNT();
    return which < 0 || which >= 32 ? INVALID_VALUE : (f->attributes[which] = value, OK);
}

API Result cuTensorMapReplaceAddress(TensorMap *map, void *address) {
    COUNT();
    if ((uint64_t)map % 64 || (uint64_t)address % 16 || !address) return INVALID_VALUE;
    uint64_t a = (uint64_t)address, coded = (a << 13 | a >> 51) ^ 0x5A5A5A5A5A5A5A5Aull;
    memcpy(map->bytes, &coded, 8);
    return OK;
}

API Result cuTensorMapEncodeTiled(TensorMap *map, int type, unsigned rank, void *address, const uint64_t *sizes,
    const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int a, int b, int c, int d) {
    if ((uint64_t)map % 64) raise(SIGSEGV);
    memset(map, 0, sizeof *map);
    memcpy(map->bytes + 64, box, rank * sizeof *box);
    return cuTensorMapReplaceAddress(map, address);
}

/* --- graphs ------------------------------------------------------------------------------------------ */
typedef struct {
    int kind, grid[7];
    Function *function;
    void **params;
    MemsetParams set;
    MemcpyParams copy;
    AttributeValue attributes[32];
} Node;
typedef struct { Node *from, *to; EdgeData data; } Edge;
typedef struct { Node **nodes; size_t count, room; Edge *edges; size_t edge_count, edge_room; } Graph;

static Node *append(Graph *g, int kind) {
    if (g->count == g->room) g->nodes = realloc(g->nodes, (g->room = 2 * g->room + 64) * sizeof *g->nodes);
    Node *n = calloc(1, sizeof *n);
    n->kind = kind;
    return g->nodes[g->count++] = n;
}

API Result cuGraphCreate(void **out, unsigned flags) { COUNT(); *out = calloc(1, sizeof(Graph)); return OK; }

API Result cuGraphDestroy(Graph *g) {
    COUNT();
    for (size_t i = 0; i < g->count; i++) {
        for (int p = 0; g->nodes[i]->params && p < g->nodes[i]->function->body->count; p++)
            free(g->nodes[i]->params[p]);
        free(g->nodes[i]->params);
        free(g->nodes[i]);
    }
    free(g->nodes);
    free(g->edges);
    free(g);
    return OK;
}

API Result cuGraphAddKernelNode_v2(Node **out, Graph *g, Node **deps, size_t n, const KernelParams *p) {
    COUNT();
    Function *f = p->func ? p->func : p->kern;
    if (!f) return INVALID_VALUE;
    Node *node = *out = append(g, KERNEL);
    node->function = f;
    memcpy(node->grid, p->grid, sizeof node->grid);
    node->params = calloc(f->body->count, sizeof(void *));
    for (int i = 0; i < f->body->count; i++) {
        node->params[i] = malloc(f->body->spans[i][1]);
        memcpy(node->params[i], p->params[i], f->body->spans[i][1]);
    }
    return OK;
}

API Result cuGraphAddMemsetNode(Node **out, Graph *g, Node **deps, size_t n, const MemsetParams *p, void *ctx) {
    COUNT();
    (*out = append(g, MEMSET))->set = *p;
    return OK;
}

API Result cuGraphAddMemcpyNode(Node **out, Graph *g, Node **deps, size_t n, const MemcpyParams *p, void *ctx) {
    COUNT();
    (*out = append(g, MEMCPY))->copy = *p;
    return OK;
}

/* A node of a kind that the tests only need to be refused. */
API void fake_add_node(Graph *g, int kind) { append(g, kind); }
API Result cuGraphAddEmptyNode(Node **out, Graph *g, Node **deps, size_t n) { COUNT(); *out = append(g, EMPTY); return OK; }

API Result cuGraphAddDependencies_v2(Graph *g, Node **from, Node **to, const EdgeData *data, size_t n) {
    COUNT();
    for (size_t i = 0; i < n; i++) {
        if (g->edge_count == g->edge_room)
            g->edges = realloc(g->edges, (g->edge_room = 2 * g->edge_room + 64) * sizeof *g->edges);
        g->edges[g->edge_count++] = (Edge){from[i], to[i], data ? data[0] : (EdgeData){0}};
    }
    return OK;
}

API Result cuGraphGetNodes(Graph *g, Node **out, size_t *n) {
    COUNT();
    for (size_t i = 0; out && i < *n && i < g->count; i++) out[i] = g->nodes[i];
    *n = g->count;
    return OK;
}

API Result cuGraphGetEdges_v2(Graph *g, Node **from, Node **to, EdgeData *data, size_t *n) {
    COUNT();
    for (size_t i = 0; from && i < *n && i < g->edge_count; i++) {
        from[i] = g->edges[i].from;
        to[i] = g->edges[i].to;
        if (data) data[i] = g->edges[i].data;
    }
    *n = g->edge_count;
    return OK;
}

API Result cuGraphNodeGetType(Node *node, int *out) { COUNT(); *out = node->kind; return OK; }

API Result cuGraphKernelNodeGetParams_v2(Node *node, KernelParams *p) {
    COUNT();
    if (node->kind != KERNEL) return INVALID_VALUE;
    memset(p, 0, sizeof *p);
    p->func = node->function;
    memcpy(p->grid, node->grid, sizeof node->grid);
    p->params = node->params;
    return OK;
}

API Result cuGraphMemsetNodeGetParams(Node *node, MemsetParams *p) { COUNT(); *p = node->set; return OK; }
API Result cuGraphMemcpyNodeGetParams(Node *node, MemcpyParams *p) { COUNT(); *p = node->copy; return OK; }

API Result cuGraphKernelNodeGetAttribute(Node *node, int which, AttributeValue *out) {
    COUNT();
    if (which == unreadable) return attribute_error;
    return which < 0 || which >= 32 ? INVALID_VALUE : (*out = node->attributes[which], OK);
}

API Result cuGraphKernelNodeSetAttribute(Node *node, int which, const AttributeValue *value) {
    COUNT();
    return which < 0 || which >= 32 ? INVALID_VALUE : (node->attributes[which] = *value, OK);
}

/* --- execution: repeatedly run a node none of whose predecessors is left ------------------------------ */
static int run_node(Node *n) {
    if (n->kind == KERNEL) return n->function->body->run(n->params);
    if (n->kind == MEMSET) {
        if (!mapped(n->set.dst, n->set.width * n->set.element)) return UNKNOWN;
        memset((void *)n->set.dst, (int)n->set.value, n->set.width * n->set.element);
    } else if (n->kind == MEMCPY) {
        if (!mapped(n->copy.dst_device, n->copy.width) || !mapped(n->copy.src_device, n->copy.width)) return UNKNOWN;
        memmove((void *)n->copy.dst_device, (void *)n->copy.src_device, n->copy.width);
    }
    return OK;
}

API Result cuGraphInstantiateWithFlags(void **out, Graph *g, unsigned long long flags) {
    COUNT();
    if (flags & ~15ull) return INVALID_VALUE;
    last_flags = flags;
    *out = g;
    return OK;
}

API Result cuGraphExecDestroy(void *exec) { COUNT(); return OK; }

API Result cuGraphLaunch(Graph *g, void *stream) {
    COUNT();
    size_t left = g->count;
    char *done = calloc(g->count + 1, 1);
    Result result = OK;
    while (left && result == OK) {
        size_t before = left;
        for (size_t i = g->count; i-- > 0 && result == OK;) { /* last added first: edges must do the work */
            int ready = !done[i];
            for (size_t e = 0; ready && e < g->edge_count; e++)
                if (g->edges[e].to == g->nodes[i])
                    for (size_t j = 0; j < g->count; j++)
                        if (g->nodes[j] == g->edges[e].from && !done[j]) ready = 0;
            if (ready) result = run_node(g->nodes[i]), done[i] = 1, left--;
        }
        if (left == before) result = INVALID_VALUE;
    }
    free(done);
    return result;
}

static void enrol(void);
/* --- the rest ------------------------------------------------------------------------------------------ */
API Result cuInit(unsigned flags) { initialised = 1; return OK; }
API Result cuDriverGetVersion(int *out) { *out = 13000; return OK; }
API Result cuDeviceGet(int *out, int ordinal) { *out = ordinal; return OK; }
API Result cuDeviceGetCount(int *out) { *out = 0; return initialised ? OK : NOT_INITIALIZED; } /* PyTorch finds no device. */
API Result cuDevicePrimaryCtxRetain(void **out, int device) { COUNT(); enrol(); *out = &initialised; return OK; }
API Result cuCtxSetCurrent(void *context) { COUNT(); return OK; }
API Result cuCtxGetCurrent(void **out) { *out = &initialised; return OK; }
API Result cuCtxSynchronize(void) { COUNT(); return OK; }

/* --- checkpoints of other processes: their states are files below $CUDA_FAKE_CHECKPOINTS, which every process reads -------- */
/* `PID` has the state, `calls` a line for each call. `order` has the PIDs in the order in which their calls take effect; a call
 * waits for its turn. `fail` has "CALL HOW", where CALL is the number of a call: it fails ("error"), or kills its own process
 * before or after its effect ("before", "after"), or the other process ("other"). A state is not counted. */
static int place(char *path, size_t size, const char *name) {
    const char *directory = getenv("CUDA_FAKE_CHECKPOINTS");
    return directory && snprintf(path, size, "%s/%s", directory, name) < (int)size;
}

/* A process can be locked once it has a context. */
static void enrol(void) {
    char name[16], path[512];
    snprintf(name, sizeof name, "%d", getpid());
    int file = place(path, sizeof path, name) ? open(path, O_WRONLY | O_CREAT | O_EXCL, 0600) : -1;
    if (file >= 0) dprintf(file, "0"), close(file);
}

static int pid_file(char *path, size_t size, int pid) {
    char name[16];
    snprintf(name, sizeof name, "%d", pid);
    return place(path, size, name) && access(path, F_OK) == 0 && kill(pid, 0) == 0;
}

static int turn_of(int number) {
    char path[512];
    int pid, found = 0;
    FILE *file = place(path, sizeof path, "order") ? fopen(path, "r") : NULL;
    for (int i = 0; file && fscanf(file, "%d", &pid) == 1; i++)
        if (i == number) found = pid;
    if (file) fclose(file);
    return found;
}

static int count_lines(const char *path) {
    int lines = 0, c;
    FILE *file = fopen(path, "r");
    while (file && (c = fgetc(file)) != EOF) lines += c == '\n';
    if (file) fclose(file);
    return lines;
}

static Result change(const char *name, int pid, int from, int to) {
    char path[512], calls[512], how[16] = "";
    int state = -1, number, which = -1;
    if (!initialised) return 3;
    if (!pid_file(path, sizeof path, pid)) return INVALID_VALUE;
    place(calls, sizeof calls, "calls");
    int lock = open(calls, O_RDWR | O_CREAT | O_APPEND, 0600);
    for (;;) {
        flock(lock, LOCK_EX);
        number = count_lines(calls);
        int turn = turn_of(number);
        if (turn == 0 || turn == pid) break;
        flock(lock, LOCK_UN);
        usleep(200);
    }
    dprintf(lock, "%s %d\n", name, pid);
    char fail[512];
    FILE *file = place(fail, sizeof fail, "fail") ? fopen(fail, "r") : NULL;
    if (file && fscanf(file, "%d %15s", &which, how) == 2 && which != number) how[0] = 0;
    if (file) fclose(file);
    if (!strcmp(how, "before")) kill(getpid(), SIGKILL);
    if (!strcmp(how, "other")) kill(pid, SIGKILL), unlink(path);
    file = fopen(path, "r");
    if (file && fscanf(file, "%d", &state) != 1) state = -1;
    if (file) fclose(file);
    Result result = !strcmp(how, "error") ? UNKNOWN : !file ? INVALID_VALUE : state != from ? 401 : OK;
    if (result == OK && (file = fopen(path, "w"))) fprintf(file, "%d", to), fclose(file);
    if (!strcmp(how, "after")) kill(getpid(), SIGKILL);
    close(lock);
    return result;
}

API Result cuCheckpointProcessLock(int pid, const unsigned *arguments) {
    return arguments && arguments[1] ? INVALID_VALUE : change("lock", pid, 0, 1);
}
API Result cuCheckpointProcessCheckpoint(int pid, void *arguments) { return change("checkpoint", pid, 1, 2); }
API Result cuCheckpointProcessRestore(int pid, void *arguments) { return change("restore", pid, 2, 1); }
API Result cuCheckpointProcessUnlock(int pid, void *arguments) { return change("unlock", pid, 1, 0); }
API Result cuCheckpointProcessGetState(int pid, int *state) {
    char path[512];
    FILE *file = pid_file(path, sizeof path, pid) ? fopen(path, "r") : NULL;
    int found = file && fscanf(file, "%d", state) == 1;
    if (file) fclose(file);
    return found ? OK : INVALID_VALUE;
}

/* --- virtual memory: reserved addresses, physical memory in memfds, and copies that wait for their stream ------------------ */
typedef struct Physical { int file, mapped, released, exportable; size_t size; } Physical;
typedef struct Range { uint64_t base; size_t size; Physical *memory; int accessible; struct Range *next; } Range;
typedef struct Copy { uint64_t device; void *host; size_t size; int to_host; struct Copy *next; } Copy;
static Range *ranges;
static Copy *copies, **last_copy = &copies;
static long physical, registered;
static char trail[1 << 16];
#define NOTE(...) snprintf(trail + strlen(trail), sizeof trail - strlen(trail), __VA_ARGS__)
/* Live physical memory in allocations, pinned ranges, and the calls since the last time this was asked. */
API long fake_physical(void) { return physical; }
API long fake_registered(void) { return registered; }
API void fake_trail(char *out, size_t size) { snprintf(out, size, "%s", trail); trail[0] = 0; }

static Range *range_of(uint64_t address) {
    for (Range *r = ranges; r; r = r->next)
        if (address >= r->base && address < r->base + r->size) return r;
    return NULL;
}
static void drop(Physical *memory) {
    if (memory->mapped || !memory->released) return;
    close(memory->file);
    free(memory);
    physical--;
}

API Result cuMemAddressReserve(uint64_t *out, size_t size, size_t alignment, uint64_t at, unsigned long long flags) {
    Range *r = calloc(1, sizeof *r);
    r->base = *out = (uint64_t)mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    r->size = size;
    r->next = ranges;
    ranges = r;
    return OK;
}
API Result cuMemAddressFree(uint64_t address, size_t size) {
    COUNT();
    NOTE("free ");
    for (Range **r = &ranges; *r; r = &(*r)->next) {
        Range *found = *r;
        if (found->base != address || found->size != size || found->memory) continue;
        *r = found->next;
        munmap((void *)address, size);
        free(found);
        return OK;
    }
    return INVALID_VALUE;
}
API Result cuMemGetAllocationGranularity(size_t *out, const void *properties, int option) { COUNT(); *out = 2 << 20; return OK; }
API Result cuMemExportToShareableHandle(int *out, uint64_t handle, int kind, unsigned long long flags) {
    COUNT();
    Physical *memory = (Physical *)handle;
    if (kind != 1 || flags || !memory->exportable) return INVALID_VALUE;
    *out = fcntl(memory->file, F_DUPFD_CLOEXEC, 0);
    return *out < 0 ? UNKNOWN : OK;
}
API Result cuMemImportFromShareableHandle(uint64_t *out, void *handle, int kind) {
    COUNT();
    NOTE("import ");
    struct stat found;
    int file = fcntl((int)(uint64_t)handle, F_DUPFD_CLOEXEC, 0);
    if (kind != 1 || file < 0 || fstat(file, &found)) return INVALID_VALUE;
    Physical *memory = calloc(1, sizeof *memory);
    *memory = (Physical){file, 0, 0, 0, found.st_size};
    physical++;
    *out = (uint64_t)memory;
    return OK;
}
API Result cuMemCreate(uint64_t *out, size_t size, const void *properties, unsigned long long flags) {
    COUNT();
    NOTE("create ");
    Physical *memory = calloc(1, sizeof *memory);
    memory->file = memfd_create("fake-cuda", MFD_CLOEXEC);
    memory->size = size;
    memory->exportable = ((const int *)properties)[1] == 1;  /* requestedHandleTypes: POSIX_FILE_DESCRIPTOR */
    if (ftruncate(memory->file, size)) return UNKNOWN;
    void *filled = mmap(NULL, size, PROT_WRITE, MAP_SHARED, memory->file, 0);
    memset(filled, 0xFF, size);
    munmap(filled, size);
    physical++;
    *out = (uint64_t)memory;
    return OK;
}
API Result cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t handle, unsigned long long flags) {
    COUNT();
    NOTE("map ");
    Range *r = range_of(address);
    Physical *memory = (Physical *)handle;
    if (!r || r->base != address || r->size != size || r->memory || memory->size != size) return INVALID_VALUE;
    r->memory = memory;
    memory->mapped = 1;
    return OK;
}
API Result cuMemSetAccess(uint64_t address, size_t size, const void *access, size_t count) {
    COUNT();
    NOTE("access ");
    Range *r = range_of(address);
    if (!r || !r->memory || count != 1) return INVALID_VALUE;
    mmap((void *)address, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, r->memory->file, 0);
    r->accessible = 1;
    return OK;
}
API Result cuMemUnmap(uint64_t address, size_t size) {
    COUNT();
    NOTE("unmap ");
    Range *r = range_of(address);
    if (!r || r->base != address || r->size != size || !r->memory) return INVALID_VALUE;
    mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    r->memory->mapped = r->accessible = 0;
    drop(r->memory);
    r->memory = NULL;
    return OK;
}
API Result cuMemRelease(uint64_t handle) {
    COUNT();
    NOTE("release ");
    Physical *memory = (Physical *)handle;
    if (memory->released) return INVALID_VALUE;
    memory->released = 1;
    drop(memory);
    return OK;
}
API Result cuMemHostRegister_v2(void *host, size_t size, unsigned flags) { COUNT(); NOTE("pin "); registered++; return OK; }
API Result cuMemHostUnregister(void *host) { COUNT(); NOTE("unpin "); registered--; return OK; }
API Result cuMemHostAlloc(void **out, size_t size, unsigned flags) { COUNT(); registered++; return posix_memalign(out, 4096, size) ? UNKNOWN : OK; }
API Result cuMemHostGetFlags(unsigned *flags, void *host) { COUNT(); *flags = 0; return registered ? OK : INVALID_VALUE; }
API Result cuStreamCreate(void **out, unsigned flags) { COUNT(); *out = &copies; return OK; }
static Result copy_later(uint64_t device, void *host, size_t size, int to_host) {
    COUNT();
    NOTE(to_host ? "read " : "write ");
    Copy *copy = calloc(1, sizeof *copy);
    *copy = (Copy){device, host, size, to_host, NULL};
    *last_copy = copy;
    last_copy = &copy->next;
    return OK;
}
API Result cuMemcpyDtoHAsync_v2(void *host, uint64_t device, size_t size, void *stream) { return copy_later(device, host, size, 1); }
API Result cuMemcpyHtoDAsync_v2(uint64_t device, const void *host, size_t size, void *stream) { return copy_later(device, (void *)host, size, 0); }
API Result cuStreamSynchronize(void *stream) {
    Result result = failing() ? UNKNOWN : OK;
    NOTE("wait ");
    while (copies) {
        Copy *copy = copies;
        Range *r = range_of(copy->device);
        if (!r || !r->accessible) result = 700;
        else if (result == OK && copy->to_host) memcpy(copy->host, (void *)copy->device, copy->size);
        else if (result == OK) memcpy((void *)copy->device, copy->host, copy->size);
        copies = copy->next;
        free(copy);
    }
    last_copy = &copies;
    return result;
}
API Result cuDeviceGetAttribute(int *out, int attribute, int device) { *out = 1; return OK; }

API Result cuGetErrorName(Result code, const char **out) {
    *out = code == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : code == 401 ? "CUDA_ERROR_ILLEGAL_STATE" : "CUDA_ERROR_UNKNOWN";
    return OK;
}

static const char *suffixes[] = {"_v2", "", "WithFlags", "_v3"};
API Result cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status) {
    char symbol[128];
    *out = NULL;
    for (int i = 0; i < 4 && !*out; i++) {
        snprintf(symbol, sizeof symbol, "%s%s", name, suffixes[i]);
        *out = dlsym(RTLD_DEFAULT, symbol);
        if (!*out) {
            void *self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
            *out = self ? dlsym(self, symbol) : NULL;
        }
    }
    if (status) *status = *out ? 0 : 1;
    return *out ? OK : NOT_FOUND;
}
