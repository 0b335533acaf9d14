// What the compiler itself puts among the writable data: function objects of the C++ library, texts, tables.
// None of it is state: every kernel here is a function of its parameters.
//   nvcc -std=c++17 -ptx -arch=compute_80 -o objects.ptx objects.cu
#include <cstdio>

namespace library {
struct Begin { template <class T> __device__ T* operator()(T* x) const { return x; } };
struct Swap { template <class T> __device__ void operator()(T& a, T& b) const { T c = a; a = b; b = c; } };
inline namespace cpo {
__device__ Begin begin;
__device__ Swap swap;
}
}

__device__ const float table[4] = {1.0f, 2.0f, 4.0f, 8.0f};
__constant__ float bank[64];

extern "C" __global__ void uses_objects(float* x, int n) {
    float* first = library::begin(x);
    if (threadIdx.x + 1 < n) library::swap(first[threadIdx.x], first[threadIdx.x + 1]);
}

extern "C" __global__ void uses_text(const float* x, int n) {
    if (threadIdx.x < n && x[threadIdx.x] < 0) printf("element %d of %s is negative\n", threadIdx.x, "x");
}

extern "C" __global__ void uses_tables(float* x, int n) {
    if (threadIdx.x < n) x[threadIdx.x] *= table[threadIdx.x & 3] + bank[threadIdx.x & 63];
}
