// Variables that one launch leaves to the next: two copies of them would be two variables.
//   nvcc -std=c++17 -ptx -arch=compute_80 -o state.ptx state.cu
__device__ unsigned tickets;
static __device__ float history[32];

extern "C" __global__ void takes_a_ticket(unsigned* out) { out[threadIdx.x] = atomicAdd(&tickets, 1u); }

extern "C" __global__ void remembers(const float* x) { history[threadIdx.x & 31] += x[threadIdx.x]; }
