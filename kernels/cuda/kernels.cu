#include "kernels.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>

namespace atoll_kernels {
namespace {

constexpr int block_threads = 256;
constexpr std::size_t max_blocks = 4096;  // more than any device runs at once; longer buffers take several turns
constexpr std::size_t chunk_entries = std::size_t{1} << 16;  // one partial sum; fixes the order of additions

void check(cudaError_t code, const char* doing) {
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

class Scratch {
  public:
    Scratch(std::size_t count, cudaStream_t stream) : stream_(stream) {
        check(cudaMallocAsync(&memory_, count * sizeof(double), stream), "allocating partial sums");
    }
    ~Scratch() { cudaFreeAsync(memory_, stream_); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    double* get() const { return static_cast<double*>(memory_); }

  private:
    void* memory_ = nullptr;
    cudaStream_t stream_;
};

// Sum over the block in a fixed order; the result is in thread 0.
__device__ double sum_over_block(double mine) {
    __shared__ double sums[block_threads];
    sums[threadIdx.x] = mine;
    __syncthreads();
    for (unsigned half = block_threads / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    return sums[0];
}

// partial[c] = sum of squares of chunk c.   x: float32 [n]; partial: float64 [ceil(n / chunk_entries)]
__global__ void square_chunks(const float* x, std::uint64_t n, double* partial, std::uint64_t chunks) {
    for (std::uint64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const std::uint64_t begin = chunk * chunk_entries;
        const std::uint64_t end = begin + chunk_entries < n ? begin + chunk_entries : n;
        double mine = 0;
        for (std::uint64_t i = begin + threadIdx.x; i < end; i += block_threads) {
            const double value = x[i];
            mine += value * value;
        }
        const double sum = sum_over_block(mine);
        if (threadIdx.x == 0) partial[chunk] = sum;
        __syncthreads();  // the next chunk uses the shared sums again
    }
}

// total[0] = sum of partial[0 .. chunks), by one block.
__global__ void sum_partials(const double* partial, std::uint64_t chunks, double* total) {
    double mine = 0;
    for (std::uint64_t i = threadIdx.x; i < chunks; i += block_threads) mine += partial[i];
    const double sum = sum_over_block(mine);
    if (threadIdx.x == 0) total[0] = sum;
}

struct Terms {  // a kernel's parameters: by value, at most 4 KiB
    Term at[max_inputs];
    unsigned count;
};
static_assert(sizeof(Terms) <= 4096);

// The twin of the CPU's weighted_sum: no fused multiply-add, so the same bits.
__global__ void add_terms(float* out, std::uint64_t n, const __grid_constant__ Terms terms) {
    const std::uint64_t stride = std::uint64_t{gridDim.x} * block_threads;
    for (std::uint64_t i = std::uint64_t{blockIdx.x} * block_threads + threadIdx.x; i < n; i += stride) {
        float sum = terms.count == 0 ? 0.0F : __fmul_rn(terms.at[0].weight, terms.at[0].x[i]);
        for (unsigned k = 1; k < terms.count; ++k)
            sum = __fadd_rn(sum, __fmul_rn(terms.at[k].weight, terms.at[k].x[i]));
        out[i] = sum;
    }
}

unsigned blocks_for(std::size_t units) { return static_cast<unsigned>(std::min(units, max_blocks)); }

}  // namespace

int cuda_device_count() {
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
    cudaGetLastError();  // forget it: it would be reported again by an unrelated later call
    return 0;
}

double squared_norm_cuda(const float* x, std::size_t n, int device, void* stream_handle) {
    if (n == 0) return 0;
    const OnDevice on_device(device);
    const auto stream = static_cast<cudaStream_t>(stream_handle);
    const std::size_t chunks = (n + chunk_entries - 1) / chunk_entries;
    const Scratch scratch(chunks + 1, stream);
    double* const total = scratch.get() + chunks;
    square_chunks<<<blocks_for(chunks), block_threads, 0, stream>>>(x, n, scratch.get(), chunks);
    check(cudaGetLastError(), "starting square_chunks");
    sum_partials<<<1, block_threads, 0, stream>>>(scratch.get(), chunks, total);
    check(cudaGetLastError(), "starting sum_partials");
    double result = 0;
    check(cudaMemcpyAsync(&result, total, sizeof result, cudaMemcpyDeviceToHost, stream), "copying the sum");
    check(cudaStreamSynchronize(stream), "waiting for the sum");
    return result;
}

void weighted_sum_cuda(float* out, std::size_t n, const Term* terms, std::size_t count, int device,
                       void* stream_handle) {
    if (n == 0) return;
    const OnDevice on_device(device);
    Terms parameters{};
    std::copy_n(terms, count, parameters.at);
    parameters.count = static_cast<unsigned>(count);
    const std::size_t blocks = (n + block_threads - 1) / block_threads;
    add_terms<<<blocks_for(blocks), block_threads, 0, static_cast<cudaStream_t>(stream_handle)>>>(out, n, parameters);
    check(cudaGetLastError(), "starting add_terms");
}

}  // namespace atoll_kernels
