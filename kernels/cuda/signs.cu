#include "signs.hpp"

#include <cstdint>

#include "device.cuh"

namespace atoll_kernels {
namespace {

constexpr unsigned lanes = 32;  // of the twin's sums, and of a warp

// One warp a block of sign_block values: lane l adds up entries l, l + 32, ... in float64, lanes are added in pairs.
//   values: float32 [n], device; bits: uint8 [ceil(n / 8)]; scales: float32 [blocks] or [blocks, 2]
// Bound by memory: reads 8n (the second time from a cache), writes 4n + n / 8 bytes. Twin: sign_encode; the same bits.
__global__ void encode_signs(float* values, std::uint64_t n, std::uint8_t* bits, float* scales, bool two_sided,
                             std::uint64_t blocks) {
    const unsigned lane = threadIdx.x % lanes, width = two_sided ? 2 : 1;
    const std::uint64_t warps = std::uint64_t{gridDim.x} * (block_threads / lanes);
    for (std::uint64_t block = std::uint64_t{blockIdx.x} * (block_threads / lanes) + threadIdx.x / lanes;
         block < blocks; block += warps) {
        const std::uint64_t begin = block * sign_block;
        const std::uint64_t size = n - begin < sign_block ? n - begin : sign_block;
        float* const at = values + begin;
        double above = 0, below = 0;
        unsigned negative = 0;
        for (std::uint64_t i = lane; i < size; i += lanes) {
            const float value = at[i];
            const bool minus = value < 0;
            above += minus ? 0.0F : value;
            below -= minus ? value : 0.0F;
            negative += minus;
        }
        for (unsigned half = lanes / 2; half > 0; half /= 2) {
            above += __shfl_xor_sync(all_lanes, above, half);
            below += __shfl_xor_sync(all_lanes, below, half);
            negative += __shfl_xor_sync(all_lanes, negative, half);
        }
        const std::uint64_t positive = size - negative;
        float up = positive == 0 ? 0.0F : static_cast<float>(above / static_cast<double>(positive));
        float down = negative == 0 ? 0.0F : static_cast<float>(below / static_cast<double>(negative));
        if (!two_sided) up = down = static_cast<float>((above + below) / static_cast<double>(size));
        if (lane == 0) {
            scales[block * width] = up;
            if (two_sided) scales[block * width + 1] = down;
        }
        for (std::uint64_t byte = lane; byte * 8 < size; byte += lanes) {
            const std::uint64_t in_byte = size - byte * 8 < 8 ? size - byte * 8 : 8;
            unsigned packed = 0;
            for (std::uint64_t bit = 0; bit < in_byte; ++bit) {
                const float value = at[byte * 8 + bit];
                const bool minus = value < 0;
                packed |= static_cast<unsigned>(minus) << bit;
                at[byte * 8 + bit] = __fadd_rn(value, minus ? down : -up);
            }
            bits[begin / 8 + byte] = static_cast<std::uint8_t>(packed);
        }
    }
}

// out[i] += what bit i stands for. Bound by memory: reads 4n + n / 8, writes 4n bytes. Twin: sign_add; the same bits.
__global__ void add_signs(const std::uint8_t* bits, const float* scales, bool two_sided, float* out, std::uint64_t n) {
    const unsigned width = two_sided ? 2 : 1;
    const std::uint64_t stride = std::uint64_t{gridDim.x} * block_threads;
    for (std::uint64_t i = std::uint64_t{blockIdx.x} * block_threads + threadIdx.x; i < n; i += stride) {
        const float* const scale = scales + i / sign_block * width;
        out[i] = __fadd_rn(out[i], (bits[i / 8] >> (i % 8) & 1) != 0 ? -scale[width - 1] : scale[0]);
    }
}

}  // namespace

void sign_encode_cuda(float* values, std::size_t n, const SignCode& code, int device, void* stream_handle) {
    if (n == 0) return;
    const OnDevice on_device(device);
    const std::size_t blocks = sign_blocks(n);
    launch("starting encode_signs", encode_signs, blocks_for(blocks, block_threads / lanes), block_threads,
           static_cast<cudaStream_t>(stream_handle), values, n, code.bits, code.scales, code.two_sided, blocks);
}

void sign_add_cuda(const SignCode& code, float* out, std::size_t n, int device, void* stream_handle) {
    if (n == 0) return;
    const OnDevice on_device(device);
    launch("starting add_signs", add_signs, blocks_for(n, block_threads), block_threads,
           static_cast<cudaStream_t>(stream_handle), code.bits, code.scales, code.two_sided, out, n);
}

}  // namespace atoll_kernels
