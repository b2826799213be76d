#include "compact.cuh"
#include "hashing.hpp"

// Zen (Wang et al., 2023), Algorithm 3.3.
namespace atoll_kernels {
namespace {

constexpr unsigned byte_bits = 8;

struct Members {
    const std::uint32_t* member;  // [members], ascending
    std::size_t members;
};

struct Found {
    std::uint64_t matched;
    std::uint64_t descends;  // neighbours that do not ascend
};

__device__ std::size_t first_from(const std::uint32_t* unit, std::size_t count, std::uint32_t least) {
    std::size_t begin = 0;
    while (begin < count) {
        const std::size_t middle = begin + (count - begin) / 2;
        if (unit[middle] < least) {
            begin = middle + 1;
        } else {
            count = middle;
        }
    }
    return begin;
}

__device__ void add(std::uint64_t* to, unsigned mine) {
    if (mine != 0) atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(mine));
}

// A thread makes a byte: it finds the first unit that may be in it, and goes on from there.
// Bound by memory latency: reads 4 bytes a member and writes one bit; log2(count) reads of units for each byte.
__global__ void write_bits(Members of, const std::uint32_t* unit, std::size_t count, std::uint8_t* bitmap,
                           Found* found) {
    const std::size_t bytes = (of.members + byte_bits - 1) / byte_bits;
    unsigned matched = 0;
    for (std::size_t j = std::size_t{blockIdx.x} * block_threads + threadIdx.x; j < bytes;
         j += std::size_t{gridDim.x} * block_threads) {
        const std::size_t begin = j * byte_bits;
        std::size_t k = first_from(unit, count, of.member[begin]);
        unsigned bits = 0;
        for (unsigned i = 0; i < byte_bits && begin + i < of.members && k < count; ++i) {
            if (unit[k] != of.member[begin + i]) continue;
            bits |= 1u << i;
            ++k;
        }
        bitmap[j] = static_cast<std::uint8_t>(bits);
        matched += static_cast<unsigned>(__popc(bits));
    }
    add(&found->matched, matched);
}

__global__ void check_order(const std::uint32_t* unit, std::size_t count, Found* found) {
    unsigned descends = 0;
    for (std::size_t k = std::size_t{blockIdx.x} * block_threads + threadIdx.x + 1; k < count;
         k += std::size_t{gridDim.x} * block_threads)
        descends += unit[k - 1] >= unit[k];
    add(&found->descends, descends);
}

struct SetBits {
    std::size_t items;  // bytes
    const std::uint8_t* bitmap;
    Members of;
    std::uint32_t* unit;

    // A bit beyond the last member counts too: the sum is then none that can be.
    __device__ unsigned count(std::size_t j) const { return static_cast<unsigned>(__popc(bitmap[j])); }
    __device__ void give(std::size_t j, std::uint64_t at) const {
        for (unsigned i = 0; i < byte_bits; ++i)
            if ((bitmap[j] >> i & 1) != 0) unit[at++] = of.member[j * byte_bits + i];
    }
};

}  // namespace

bool bitmap_encode_cuda(const std::uint32_t* member, std::size_t members, const std::uint32_t* unit, std::size_t count,
                        std::uint8_t* bitmap, const Queue& queue) {
    const OnDevice here(queue.device);
    const auto stream = static_cast<cudaStream_t>(queue.stream);
    const Scratch<Found> found(1, queue.device, stream);
    check(cudaMemsetAsync(found.get(), 0, sizeof(Found), stream), "clearing scratch memory");
    launch("starting write_bits", write_bits, blocks_for(bitmap_bytes(members), block_threads), block_threads, stream,
           Members{member, members}, unit, count, bitmap, found.get());
    launch("starting check_order", check_order, blocks_for(count, block_threads), block_threads, stream, unit, count,
           found.get());
    const Found result = read_back(found.get(), stream);
    return result.matched == count && result.descends == 0;
}

bool bitmap_decode_cuda(const std::uint32_t* member, std::size_t members, const std::uint8_t* bitmap,
                        std::uint32_t* unit, std::size_t count, const Queue& queue) {
    const OnDevice here(queue.device);
    const auto stream = static_cast<cudaStream_t>(queue.stream);
    const SetBits set{bitmap_bytes(members), bitmap, {member, members}, unit};
    const Scratch<std::uint64_t> before(compact_tiles(set.items) + 1, queue.device, stream);
    queue_count(set, before.get(), stream);
    if (read_back(before.get() + compact_tiles(set.items), stream) != count) return false;
    if (members % byte_bits != 0 && (read_back(bitmap + members / byte_bits, stream) >> members % byte_bits) != 0)
        return false;
    queue_give(set, before.get(), stream);
    check(cudaStreamSynchronize(stream), "waiting for the result");
    return true;
}

}  // namespace atoll_kernels
