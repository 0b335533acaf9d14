/* The few driver types that the fake needs, written from the documented layouts. */
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef int Result;
enum { OK = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_SUPPORTED = 801, UNKNOWN = 999 };
enum { KERNEL = 0, MEMCPY = 1, MEMSET = 2, HOST = 3, EMPTY = 5 };

typedef struct {
    void *func;
    uint32_t grid[3], block[3], shared;
    void **params;
    void **extra;
    void *kern, *ctx;
} KernelParams; /* 72 bytes */

typedef struct {
    uint64_t dst;
    size_t pitch;
    uint32_t value, element;
    size_t width, height;
} MemsetParams;

typedef struct {
    size_t src_x, src_y, src_z, src_lod;
    uint32_t src_type;
    const void *src_host;
    uint64_t src_device;
    void *src_array, *reserved0;
    size_t src_pitch, src_height;
    size_t dst_x, dst_y, dst_z, dst_lod;
    uint32_t dst_type;
    void *dst_host;
    uint64_t dst_device;
    void *dst_array, *reserved1;
    size_t dst_pitch, dst_height;
    size_t width, height, depth;
} MemcpyParams;

typedef struct {
    uint8_t from_port, to_port, type, reserved[5];
} EdgeData;

typedef struct {
    uint8_t bytes[64];
} AttributeValue;

typedef struct {
    uint8_t bytes[128];
} TensorMap;
