#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

// Hierarchical hashing: splits units into partitions that are balanced whatever the units are.
//
// Source: Zen (Wang et al., 2023), Algorithm 3.2. Slots hold a unit's place among those given in place of the unit, so
// that values are found without a search, and nothing has to stand for "empty" but 0.
namespace atoll_kernels {

constexpr unsigned hash_tries = 3;            // k
constexpr std::size_t max_partitions = 4096;  // ranks that serve

struct HashSeeds {
    std::uint32_t partition;        // of h0
    std::uint32_t slot[hash_tries]; // of h1 ... hk
};

// r1: slots of each partition that threads write side by side; 2 |I| in all (section 3.4.2).
inline std::size_t parallel_slots(std::size_t count, std::size_t partitions) {
    return (2 * count + partitions - 1) / partitions;
}

// r2: the room that a partition's serial memory begins with. It grows where that is not enough.
inline std::size_t serial_slots(std::size_t parallel) { return parallel / 10; }

struct Partitioned {
    std::vector<std::uint64_t> bounds;  // [partitions + 1]: order[bounds[p]] ... order[bounds[p + 1] - 1] are p's
    std::size_t serial = 0;             // units that found no slot in hash_tries rounds
};

// order: a permutation of 0 ... count - 1, grouped by partition; within one in no particular order.
//   unit: uint32 [count]; order: uint32 [count], overwritten; count < 2^32 - 1
//   slots: r1, at least 1; threads: 0 for as many as are worth it
Partitioned hierarchical_hash(const std::uint32_t* unit, std::size_t count, const HashSeeds& seeds,
                              std::size_t partitions, std::size_t slots, int threads, std::uint32_t* order);

// member: every unit below `units`, ordered by partition and then ascending: the sets I_i of Algorithm 3.3.
// Returns the bounds as above.
std::vector<std::uint64_t> partition_members(std::size_t units, std::uint32_t seed, std::size_t partitions,
                                             std::uint32_t* member);

}  // namespace atoll_kernels
