#include "update.hpp"

#include "../cpu/optimizer/hyperparameters.hpp"
#include "device.cuh"

namespace atoll_kernels {
namespace {

struct Outcome {
    std::uint64_t left_out;
    unsigned invalid;
};

// outcome->invalid becomes 1 unless `index` ascends and lies below `end`.   index: uint32 [count], device
// Bound by memory: reads 8 bytes an index, half of them from a cache.
__global__ void check_indices(const std::uint32_t* index, std::size_t count, std::size_t end, Outcome* outcome) {
    for (std::size_t k = std::size_t{blockIdx.x} * block_threads + threadIdx.x; k < count;
         k += std::size_t{gridDim.x} * block_threads) {
        if (index[k] >= end || (k > 0 && index[k] <= index[k - 1])) atomicOr(&outcome->invalid, 1U);
    }
}

struct Entry {
    float p, g, m, v;
};

template <Rule rule, bool moments>
__device__ void step_entry(Entry& e, const Constants& c) {
    if constexpr (rule == Rule::adamw) {
        e.p *= c.shrink;
    } else {
        e.g = e.g + c.decay * e.p;
    }
    if constexpr (rule == Rule::adam || rule == Rule::adamw) {
        e.m = e.m + c.one_minus_beta1 * (e.g - e.m);
        e.v = c.beta2 * e.v + c.one_minus_beta2 * e.g * e.g;
        e.p = e.p - c.step_size * (e.m / (sqrtf(e.v) / c.root2 + c.epsilon));
    } else if constexpr (!moments) {
        e.p = e.p - c.lr * e.g;
    } else {
        e.m = c.momentum * e.m + e.g;
        const float direction = rule == Rule::nesterov ? e.g + c.momentum * e.m : e.m;
        e.p = e.p - c.lr * direction;
    }
}

__device__ void write_live(const Live& live, std::size_t i, float p) {
    switch (live.format) {
        case ValueFormat::float32: static_cast<float*>(live.data)[i] = p; break;
        case ValueFormat::float16: static_cast<std::uint16_t*>(live.data)[i] = to_float16(p); break;
        case ValueFormat::bfloat16: static_cast<std::uint16_t*>(live.data)[i] = to_bfloat16(p); break;
    }
}

// The half of a warp that has one block: its 16 lanes all come here.
struct Half {
    unsigned lane = threadIdx.x % block_entries;
    unsigned shift = threadIdx.x % warp_lanes / block_entries * block_entries;

    __device__ bool all(bool mine) const { return (__ballot_sync(all_lanes, mine) >> shift & 0xffff) == 0xffff; }
    __device__ std::uint32_t from_first(std::uint32_t mine) const {
        return __shfl_sync(all_lanes, mine, 0, block_entries);
    }
};

// Returns how many steps the block was missed since its last touch, and notes this touch. One lane reads and writes.
__device__ std::uint32_t note_touch(const Half& half, std::int32_t* last_step, std::size_t block, std::int32_t step,
                                    bool touch) {
    std::uint32_t missed = 0;
    if (touch && half.lane == 0) {
        const std::int64_t between = std::int64_t{step} - last_step[block] - 1;
        missed = between > 0 ? static_cast<std::uint32_t>(between) : 0;
        last_step[block] = step;
    }
    return half.from_first(missed);
}

// The optimizer's step on the blocks of `update`, a block to half a warp; one with a value that is not finite is left
// out whole and counted. Does nothing where check_indices found fault.
//   to: float32 [n], last_step int32 [ceil(n / 16)], live; update: index uint32 [K], values float32 [K, 16]; all device
// Bound by memory latency: 64 bytes each of master, moments, live and values a block, at scattered places.
// Twin: apply_update; the same bits.
template <Rule rule, bool moments>
__global__ void update_blocks(Parameters to, Units update, Hyperparameters hyper, Constants c, Outcome* outcome) {
    constexpr bool adaptive = rule == Rule::adam || rule == Rule::adamw;
    if (outcome->invalid != 0) return;
    const Half half;
    const std::size_t stride = std::size_t{gridDim.x} * block_threads;
    for (std::size_t turn = std::size_t{blockIdx.x} * block_threads; turn < update.count * block_entries;
         turn += stride) {
        const std::size_t at = turn + threadIdx.x, k = at / block_entries;
        const bool given = k < update.count;
        const std::size_t block = given ? update.index[k] : 0;
        const float value = given ? update.values[at] : 0.0F;
        const bool finite = half.all((__float_as_uint(value) & 0x7f800000) != 0x7f800000);
        const bool touch = given && finite;
        if (given && !finite && half.lane == 0)
            atomicAdd(reinterpret_cast<unsigned long long*>(&outcome->left_out), 1ULL);
        const std::uint32_t missed =
            to.last_step != nullptr ? note_touch(half, to.last_step, block, hyper.step, touch) : 0;
        const std::size_t i = block * block_entries + half.lane;
        if (!touch || i >= to.n) continue;
        Entry e{to.master[i], c.scale * value, 0.0F, 0.0F};
        if constexpr (moments) e.m = to.first[i];
        if constexpr (adaptive) e.v = to.second[i];
        if (missed > 0) {
            e.m *= static_cast<float>(power(hyper.momentum_or_beta1, missed));
            if (to.second != nullptr) e.v *= static_cast<float>(power(hyper.beta2, missed));
        }
        step_entry<rule, moments>(e, c);
        to.master[i] = e.p;
        if constexpr (moments) to.first[i] = e.m;
        if constexpr (adaptive) to.second[i] = e.v;
        if (to.live.data != nullptr) write_live(to.live, i, e.p);
    }
}

// live[16 index[k] + i] = values[16 k + i], rounded to live's format; entries from n on are left out.
// Bound by memory latency: reads 68 and writes 64 bytes (32 in 16 bits) a block, at scattered places.
__global__ void scatter(Live live, std::size_t n, Units update) {
    for (std::size_t at = std::size_t{blockIdx.x} * block_threads + threadIdx.x; at < update.count * block_entries;
         at += std::size_t{gridDim.x} * block_threads) {
        const std::size_t i = std::size_t{update.index[at / block_entries]} * block_entries + at % block_entries;
        if (i < n) write_live(live, i, update.values[at]);
    }
}

using Update = void (*)(Parameters, Units, Hyperparameters, Constants, Outcome*);

Update update_for(Rule rule, bool moments) {
    switch (rule) {
        case Rule::adam: return update_blocks<Rule::adam, true>;
        case Rule::adamw: return update_blocks<Rule::adamw, true>;
        case Rule::nesterov: return update_blocks<Rule::nesterov, true>;
        case Rule::sgd: break;
    }
    return moments ? update_blocks<Rule::sgd, true> : update_blocks<Rule::sgd, false>;
}

}  // namespace

UpdateResult apply_update_cuda(const Parameters& parameters, const Units& update, const Hyperparameters& hyper,
                               const Queue& queue) {
    if (update.count == 0) return {true, 0};
    const OnDevice on_device(queue.device);
    const auto stream = static_cast<cudaStream_t>(queue.stream);
    const Scratch<Outcome> outcome(1, queue.device, stream);
    check(cudaMemsetAsync(outcome.get(), 0, sizeof(Outcome), stream), "clearing the outcome");
    launch("starting check_indices", check_indices, blocks_for(update.count, block_threads), block_threads, stream,
           update.index, update.count, block_count(parameters.n), outcome.get());
    launch("starting update_blocks", update_for(hyper.rule, parameters.first != nullptr),
           blocks_for(update.count * block_entries, block_threads), block_threads, stream, parameters, update, hyper,
           prepare(hyper), outcome.get());
    const Outcome seen = read_back(outcome.get(), stream);
    return {seen.invalid == 0, seen.left_out};
}

void scatter_blocks_cuda(const Live& live, std::size_t n, const Units& update, const Queue& queue) {
    if (update.count == 0) return;
    const OnDevice on_device(queue.device);
    launch("starting scatter", scatter, blocks_for(update.count * block_entries, block_threads), block_threads,
           static_cast<cudaStream_t>(queue.stream), live, n, update);
}

}  // namespace atoll_kernels
