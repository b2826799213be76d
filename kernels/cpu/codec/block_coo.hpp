#pragma once

#include <cstddef>
#include <cstdint>

#include "wire_values.hpp"

// Sparse updates on the wire: indices and values of blocks, nothing else. How many, of which tensor and in which
// formats is for the message's header. Little-endian, the indices first:
//   delta   count numbers in LEB128 (7 bits a byte, the lowest first, at most 5 bytes): the first index, then each
//           index minus the one before minus 1
//   none    nothing: both ends have the indices from random_blocks
// then the values, 16 * count of them as in wire_values.hpp.
namespace atoll_kernels {

enum class IndexFormat { none, delta };

struct Layout {
    IndexFormat indices;
    WireValues values;
    std::size_t entries;  // of the tensor: indices are below ceil(entries / 16)
};

struct Units {
    const std::uint32_t* index;
    const float* values;
    std::size_t count;
};

std::size_t largest_payload(const Layout& layout, std::size_t count);

// Writes at most largest_payload bytes to `out` and returns how many; `residual` (float32 [entries]; may be null) gets
// what formats other than float32 took away added.
std::size_t encode(const Layout& layout, const Units& units, unsigned char* out, float* residual);

// Reads exactly `bytes` bytes, whatever they are, into index [count] (unused for none) and values [16 * count].
// Returns null, or what is wrong: not as long as it must be, indices that do not ascend or lie outside, values that are
// not finite. The outputs are then undefined. Values beyond the tensor's end come out as 0.
const char* decode(const Layout& layout, const unsigned char* payload, std::size_t bytes, std::size_t count,
                   std::uint32_t* index, float* values);

bool all_finite(const float* values, std::size_t count);

// True if indices ascend and lie below `end`.
bool valid_indices(const std::uint32_t* index, std::size_t count, std::size_t end);

constexpr std::size_t most_inputs = 64;  // workers in one sum

// The number of units in the sum of `inputs`.
std::size_t count_union(const Units* inputs, std::size_t inputs_count, int threads);

// The sum of several workers' units into index [count] and values [16 * count], count from count_union. A unit that
// several have is ((first + second) + third)..., in the order of `inputs`: every rank that has the same inputs in the
// same order gets the same bits. Inputs must pass valid_indices.
void sum_units(const Units* inputs, std::size_t inputs_count, std::uint32_t* index, float* values, int threads);

}  // namespace atoll_kernels
