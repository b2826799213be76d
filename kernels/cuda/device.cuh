#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "device.hpp"

// Surroundings of every kernel here: errors, the device, scratch memory, launches. Kernels are launched by a plain
// function call, not by <<< >>>, so that tests/kernels/native/cuda_on_cpu can run them on a machine without a GPU.
namespace atoll_kernels {

constexpr unsigned block_threads = 256;
constexpr unsigned warp_lanes = 32;
constexpr unsigned all_lanes = 0xffffffff;
constexpr std::size_t max_blocks = 4096;  // more than any device runs at once; longer buffers take several turns

inline void check(cudaError_t code, const char* doing) {
    if (code != cudaSuccess)
        throw CudaError(std::string(doing) + ": " + cudaGetErrorName(code) + ", " + cudaGetErrorString(code));
}

// The caller's current device is theirs: put back whatever happens.
class OnDevice {
  public:
    explicit OnDevice(int device) {
        check(cudaGetDevice(&before_), "asking for the current device");
        check(cudaSetDevice(device), "choosing the device");
    }
    ~OnDevice() { cudaSetDevice(before_); }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

  private:
    int before_ = 0;
};

// The pool that scratch memory comes from, one for each device, for as long as the process lives. The device's own pool
// gives everything back whenever a stream is waited for, and mapping memory anew costs more than most kernels here.
cudaMemPool_t scratch_pool(int device);

// Memory for `count` entries that lives until the work queued on the stream when it is left behind is done.
template <typename T>
class Scratch {
  public:
    Scratch(std::size_t count, int device, cudaStream_t stream) : stream_(stream) {
        void* memory = nullptr;
        check(
            cudaMallocFromPoolAsync(&memory, std::max<std::size_t>(count, 1) * sizeof(T), scratch_pool(device), stream),
            "allocating scratch memory");
        memory_ = static_cast<T*>(memory);
    }
    ~Scratch() { cudaFreeAsync(memory_, stream_); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    T* get() const { return memory_; }

  private:
    T* memory_ = nullptr;
    cudaStream_t stream_;
};

// The number of blocks of threads to start for so much work; each kernel strides over what is beyond.
inline unsigned blocks_for(std::size_t units, std::size_t units_per_block) {
    return static_cast<unsigned>(
        std::clamp<std::size_t>((units + units_per_block - 1) / units_per_block, 1, max_blocks));
}

template <typename... Parameters, typename... Arguments>
void launch(const char* starting, void (*kernel)(Parameters...), unsigned blocks, unsigned threads, cudaStream_t stream,
            Arguments&&... arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.stream = stream;
    check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...), starting);
}

// The value at `from`, once all work queued on the stream is done.
template <typename T>
T read_back(const T* from, cudaStream_t stream) {
    T value;
    check(cudaMemcpyAsync(&value, from, sizeof value, cudaMemcpyDeviceToHost, stream), "copying the result");
    check(cudaStreamSynchronize(stream), "waiting for the result");
    return value;
}

}  // namespace atoll_kernels
