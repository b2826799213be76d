#include "hierarchical_hash.hpp"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>

#include "../processor/thread_pool.hpp"
#include "murmur3.hpp"

namespace atoll_kernels {
namespace {

constexpr std::size_t units_at_once = std::size_t{1} << 14;  // of one thread: some hundred microseconds

// What found no slot, of one partition: written one after the other, and larger when it is full.
struct Serial {
    std::mutex lock;
    std::vector<std::uint32_t> places;

    void append(std::uint32_t place) {
        const std::lock_guard<std::mutex> mine(lock);
        places.push_back(place);
    }
};

bool takes(std::uint32_t& slot, std::uint32_t place) {
    const std::atomic_ref<std::uint32_t> shared(slot);
    std::uint32_t empty = 0;
    return shared.load(std::memory_order_relaxed) == 0 &&
           shared.compare_exchange_strong(empty, place + 1, std::memory_order_relaxed);
}

}  // namespace

Partitioned hierarchical_hash(const std::uint32_t* unit, std::size_t count, const HashSeeds& seeds,
                              std::size_t partitions, std::size_t slots, int threads, std::uint32_t* order) {
    const auto memory = std::make_unique<std::uint32_t[]>(partitions * slots);  // zeros: empty
    std::vector<Serial> serial(partitions);
    for (Serial& one : serial) one.places.reserve(serial_slots(slots));

    auto place_units = [&](std::size_t chunk) {
        const std::size_t end = std::min(count, (chunk + 1) * units_at_once);
        for (std::size_t j = chunk * units_at_once; j < end; ++j) {
            const std::uint32_t p = partition_of(unit[j], seeds.partition, static_cast<std::uint32_t>(partitions));
            bool placed = false;
            for (unsigned i = 0; i < hash_tries && !placed; ++i) {
                const std::size_t q = bucket_of(murmur3(unit[j], seeds.slot[i]), slots);
                placed = takes(memory[p * slots + q], static_cast<std::uint32_t>(j));
            }
            if (!placed) serial[p].append(static_cast<std::uint32_t>(j));
        }
    };
    for_each_chunk((count + units_at_once - 1) / units_at_once, threads, place_units);

    std::vector<std::uint64_t> found(partitions);
    auto count_found = [&](std::size_t p) {
        const std::uint32_t* const mine = memory.get() + p * slots;
        found[p] = slots - static_cast<std::size_t>(std::count(mine, mine + slots, 0u)) + serial[p].places.size();
    };
    for_each_chunk(partitions, threads, count_found);
    Partitioned result;
    result.bounds.assign(partitions + 1, 0);
    for (std::size_t p = 0; p < partitions; ++p) {
        result.bounds[p + 1] = result.bounds[p] + found[p];
        result.serial += serial[p].places.size();
    }
    auto extract = [&](std::size_t p) {
        std::uint32_t* to = order + result.bounds[p];
        const std::uint32_t* const mine = memory.get() + p * slots;
        for (std::size_t q = 0; q < slots; ++q)
            if (mine[q] != 0) *to++ = mine[q] - 1;
        std::copy(serial[p].places.begin(), serial[p].places.end(), to);
    };
    for_each_chunk(partitions, threads, extract);
    return result;
}

std::vector<std::uint64_t> partition_members(std::size_t units, std::uint32_t seed, std::size_t partitions,
                                             std::uint32_t* member) {
    const auto of = static_cast<std::uint32_t>(partitions);
    std::vector<std::uint64_t> bounds(partitions + 1);
    for (std::size_t u = 0; u < units; ++u) ++bounds[partition_of(static_cast<std::uint32_t>(u), seed, of) + 1];
    for (std::size_t p = 0; p < partitions; ++p) bounds[p + 1] += bounds[p];
    std::vector<std::uint64_t> next(bounds.begin(), bounds.end() - 1);
    for (std::size_t u = 0; u < units; ++u) {
        const auto unit = static_cast<std::uint32_t>(u);
        member[next[partition_of(unit, seed, of)]++] = unit;
    }
    return bounds;
}

}  // namespace atoll_kernels
