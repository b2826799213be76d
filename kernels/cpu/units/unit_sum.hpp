#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

// Sums of tensors in coordinate form (COO): of each unit that is there its number, and its values.
//
// A unit is a row of `width` neighbouring entries, or a single one.
namespace atoll_kernels {

struct Coordinates {
    const std::uint32_t* unit;  // [count], each once, in any order
    const float* values;        // [count, width]
    std::size_t count;
    std::uint32_t partition;  // the only one that its units may be of, where there are partitions
};

// Which units may be there: those below `units`. seed, partitions: of h0; 0 partitions: there are none.
struct UnitRange {
    std::size_t units;
    std::uint32_t seed;
    std::uint32_t partitions;
};

struct UnitSum {
    std::unique_ptr<std::uint32_t[]> unit;  // [count], ascending
    std::unique_ptr<float[]> values;        // [count, width]
    std::size_t count = 0;
};

enum class UnitFlaw { none, outside, foreign, twice };

struct CheckedSum {
    UnitSum sum;
    UnitFlaw flaw = UnitFlaw::none;
    std::size_t which = 0;   // of the terms has it
    std::uint32_t unit = 0;  // what is wrong with it: not below `units`, of another partition, or there twice
};

// The units that are in any term, with the sum of their values over the terms that have them, added in the terms'
// order: the bits are those of the same sum in NumPy, for every number of threads.
// Bound by memory: reads 4 (width + 1) bytes a unit of each term, writes 4 (width + 1) a unit of the sum.
CheckedSum sum_coordinates(const std::vector<Coordinates>& terms, const UnitRange& range, std::size_t width,
                           int threads);

// The units of which an entry is not zero (NaN is not), ascending. -0.0 is zero.
//   dense: float32 [units, width]
std::vector<std::uint32_t> nonzero_units(const float* dense, std::size_t units, std::size_t width, int threads);

}  // namespace atoll_kernels
