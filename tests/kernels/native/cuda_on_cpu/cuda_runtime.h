#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <type_traits>
#include <utility>

// Enough of the CUDA runtime to run the files in kernels/cuda on a processor, compiled as C++. Each thread of a block is
// a fiber that runs until it reaches a barrier or a warp's exchange; blocks run one after the other, in either direction,
// so that a missing barrier shows. What this cannot show: races between single instructions, and speed. What it refuses:
// a barrier or exchange that not all threads reach.

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __grid_constant__

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    dim3() = default;
    explicit dim3(unsigned all) : x(all) {}
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

struct float4 {
    float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace cuda_on_cpu {

void run_block(unsigned threads, const std::function<void()>& thread);  // fibers.cpp
void meet_block();
void meet_warp();
void* warp_slots();  // 8 bytes for each of the 32 lanes of the calling thread's warp
bool backwards();      // whether blocks, or a block's threads up to the next barrier, now run from the last to the first

template <typename T>
T exchange(T mine, unsigned from_lane) {
    static_assert(sizeof(T) <= 8);
    auto* const slots = static_cast<unsigned char*>(warp_slots());
    std::memcpy(slots + threadIdx.x % 32 * 8, &mine, sizeof mine);
    meet_warp();
    T theirs;
    std::memcpy(&theirs, slots + from_lane * 8, sizeof theirs);
    meet_warp();
    return theirs;
}

}  // namespace cuda_on_cpu

inline void __syncthreads() { cuda_on_cpu::meet_block(); }

template <typename T>
T __shfl_xor_sync(unsigned, T mine, unsigned mask) {
    return cuda_on_cpu::exchange(mine, threadIdx.x % 32 ^ mask);
}

inline unsigned __ballot_sync(unsigned, bool mine) {
    unsigned all = 0;
    auto* const slots = static_cast<unsigned char*>(cuda_on_cpu::warp_slots());
    slots[threadIdx.x % 32 * 8] = mine;
    cuda_on_cpu::meet_warp();
    for (unsigned lane = 0; lane < 32; ++lane) all |= unsigned{slots[lane * 8] != 0} << lane;
    cuda_on_cpu::meet_warp();
    return all;
}

inline int __popc(unsigned x) { return std::popcount(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __fadd_rn(float a, float b) { return a + b; }

template <typename T>
T atomicAdd(T* to, T more) {
    return std::exchange(*to, *to + more);
}

enum cudaError_t { cudaSuccess = 0, cudaErrorMemoryAllocation = 2 };
using cudaStream_t = void*;
using cudaMemPool_t = void*;
enum { cudaMemAllocationTypePinned, cudaMemLocationTypeDevice, cudaMemPoolAttrReleaseThreshold };
enum { cudaMemcpyDeviceToHost };

struct cudaMemPoolProps {
    int allocType;
    struct {
        int type, id;
    } location;
};

struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    cudaStream_t stream;
};

inline const char* cudaGetErrorName(cudaError_t) { return "an error"; }
inline const char* cudaGetErrorString(cudaError_t) { return "of the stand-in"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps*) { return *pool = nullptr, cudaSuccess; }
inline cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, int, void*) { return cudaSuccess; }

inline cudaError_t cudaMallocFromPoolAsync(void** memory, std::size_t bytes, cudaMemPool_t, cudaStream_t) {
    *memory = std::malloc(bytes);
    if (*memory == nullptr) return cudaErrorMemoryAllocation;
    std::memset(*memory, 0xcb, bytes);  // what is read before it is written shows
    return cudaSuccess;
}

inline cudaError_t cudaFreeAsync(void* memory, cudaStream_t) { return std::free(memory), cudaSuccess; }

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, int, cudaStream_t) {
    return std::memcpy(to, from, bytes), cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments&&... arguments) {
    gridDim = config->gridDim;
    blockDim = config->blockDim;
    const std::function<void()> thread = [&] { kernel(static_cast<std::remove_cv_t<Parameters>>(arguments)...); };
    const bool from_last = cuda_on_cpu::backwards();
    for (unsigned b = 0; b < gridDim.x; ++b) {
        blockIdx.x = from_last ? gridDim.x - 1 - b : b;
        cuda_on_cpu::run_block(blockDim.x, thread);
    }
    return cudaSuccess;
}
