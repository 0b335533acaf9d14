// Parameters and launches of Hopper kernels: tensor maps inside a struct, a cluster, a grid-wide barrier.
//   nvcc -std=c++17 -ptx -arch=compute_90a -o hopper.ptx hopper.cu
#include <cooperative_groups.h>
#include <cuda.h>

struct Tiles {
    const float* bias;
    int rows, columns;
    CUtensorMap a;  // at 128: the type is aligned so
    char layout[40];
    CUtensorMap b;  // at 384
    float* out;
};

extern "C" __global__ void reads_tiles(const __grid_constant__ Tiles t, const __grid_constant__ CUtensorMap c) {
    extern __shared__ __align__(128) float tile[];
    auto head = reinterpret_cast<const unsigned long long*>(&t.a);
    auto tail = reinterpret_cast<const unsigned long long*>(&t.b);
    auto last = reinterpret_cast<const unsigned long long*>(&c);
    tile[threadIdx.x] = t.bias[threadIdx.x % t.columns];
    t.out[threadIdx.x] = tile[threadIdx.x] + float(head[0] + tail[0] + last[0]) + t.layout[threadIdx.x % 40];
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) in_clusters(float* x) {
    cooperative_groups::this_cluster().sync();
    x[blockIdx.x * blockDim.x + threadIdx.x] += 1;
}

extern "C" __global__ void in_a_grid(float* x) {
    x[threadIdx.x] += 1;
    cooperative_groups::this_grid().sync();
    x[threadIdx.x] *= 2;
}

struct Much { char bytes[20000]; };

extern "C" __global__ void takes_much(const __grid_constant__ Much m, char* out) {
    __shared__ char turned[64];
    turned[63 - threadIdx.x] = m.bytes[threadIdx.x * 7];
    __syncthreads();
    out[threadIdx.x] = turned[threadIdx.x];
}
