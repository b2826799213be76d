#include "signs.hpp"

#include <cstdint>

#include "device.cuh"

namespace atoll_kernels {
namespace {

constexpr unsigned lanes = 32;  // of the twin's sums, and of a warp

constexpr unsigned rows = sign_block / lanes;  // of 32 neighbouring values, which a warp reads and writes at once
static_assert(rows == lanes, "lane r keeps the bits of row r");

// One warp a block of sign_block values: lane l keeps entries l, l + 32, ... in registers and adds them up in float64;
// lanes are added in pairs.
//   values: float32 [n], device; bits: uint8 [ceil(n / 8)]; scales: float32 [blocks] or [blocks, 2]
// Bound by memory: reads 4n, writes 4n + n / 8 bytes, all of a warp side by side. Twin: sign_encode; the same bits.
__global__ void encode_signs(float* values, std::uint64_t n, std::uint8_t* bits, float* scales, bool two_sided,
                             std::uint64_t blocks) {
    const unsigned lane = threadIdx.x % lanes, width = two_sided ? 2 : 1;
    const bool words = reinterpret_cast<std::uintptr_t>(bits) % sizeof(std::uint32_t) == 0;
    const std::uint64_t warps = std::uint64_t{gridDim.x} * (block_threads / lanes);
    for (std::uint64_t block = std::uint64_t{blockIdx.x} * (block_threads / lanes) + threadIdx.x / lanes;
         block < blocks; block += warps) {
        const std::uint64_t begin = block * sign_block;
        const unsigned size = n - begin < sign_block ? static_cast<unsigned>(n - begin) : sign_block;
        float* const at = values + begin;
        float mine[rows];
        double above = 0, below = 0;
        unsigned negative = 0, word = 0;  // word: the bits of row `lane`
#pragma unroll
        for (unsigned row = 0; row < rows; ++row) {
            const unsigned i = row * lanes + lane;
            const float value = mine[row] = i < size ? at[i] : 0.0F;
            const bool minus = value < 0;
            above += minus ? 0.0F : value;
            below -= minus ? value : 0.0F;
            const unsigned ballot = __ballot_sync(all_lanes, minus);
            negative += __popc(ballot);
            if (lane == row) word = ballot;
        }
        for (unsigned half = lanes / 2; half > 0; half /= 2) {
            above += __shfl_xor_sync(all_lanes, above, half);
            below += __shfl_xor_sync(all_lanes, below, half);
        }
        const unsigned positive = size - negative;
        float up = positive == 0 ? 0.0F : static_cast<float>(above / static_cast<double>(positive));
        float down = negative == 0 ? 0.0F : static_cast<float>(below / static_cast<double>(negative));
        if (!two_sided) up = down = static_cast<float>((above + below) / static_cast<double>(size));
        if (lane == 0) {
            scales[block * width] = up;
            if (two_sided) scales[block * width + 1] = down;
        }
#pragma unroll
        for (unsigned row = 0; row < rows; ++row) {
            const unsigned i = row * lanes + lane;
            if (i < size) at[i] = __fadd_rn(mine[row], mine[row] < 0 ? down : -up);
        }
        std::uint8_t* const to = bits + begin / 8 + lane * sizeof word;
        if (words && size == sign_block) {
            *reinterpret_cast<std::uint32_t*>(to) = word;
        } else {
            for (unsigned byte = 0; byte < sizeof word; ++byte)
                if ((lane * sizeof word + byte) * 8 < size) to[byte] = static_cast<std::uint8_t>(word >> 8 * byte);
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

void sign_encode_cuda(float* values, std::size_t n, const SignCode& code, const Queue& queue) {
    if (n == 0) return;
    const OnDevice on_device(queue.device);
    const std::size_t blocks = sign_blocks(n);
    launch("starting encode_signs", encode_signs, blocks_for(blocks, block_threads / lanes), block_threads,
           static_cast<cudaStream_t>(queue.stream), values, n, code.bits, code.scales, code.two_sided, blocks);
}

void sign_add_cuda(const SignCode& code, float* out, std::size_t n, const Queue& queue) {
    if (n == 0) return;
    const OnDevice on_device(queue.device);
    launch("starting add_signs", add_signs, blocks_for(n, block_threads), block_threads,
           static_cast<cudaStream_t>(queue.stream), code.bits, code.scales, code.two_sided, out, n);
}

}  // namespace atoll_kernels
