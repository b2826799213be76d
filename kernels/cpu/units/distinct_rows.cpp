#include "distinct_rows.hpp"

#include <bit>
#include <cstring>
#include <numeric>
#include <vector>

namespace atoll_kernels {
namespace {

// Of the row's bits. Only this process compares them, so the bytes' order is of no matter.
std::uint64_t hash_of(const float* row, std::size_t width) {
    std::uint64_t hash = 0x9e3779b97f4a7c15u;
    for (std::size_t i = 0; i < width; ++i) {
        std::uint32_t bits;
        std::memcpy(&bits, row + i, sizeof bits);
        hash = (std::rotl(hash, 23) ^ bits) * 0x2545f4914f6cdd1du;
    }
    return hash ^ (hash >> 32);
}

}  // namespace

std::size_t distinct_rows(const float* values, std::size_t count, std::size_t width, std::uint32_t* reference,
                          std::uint32_t* first) {
    const std::size_t slots = std::bit_ceil(2 * count + 1);
    std::vector<std::uint32_t> table(slots);  // number of a distinct row + 1; 0: empty
    std::size_t found = 0;
    for (std::size_t k = 0; k < count; ++k) {
        if (k == probe_rows && found * 8 > probe_rows * worth_eighths) {
            std::iota(reference, reference + count, 0u);
            std::iota(first, first + count, 0u);
            return count;
        }
        const float* const row = values + k * width;
        std::size_t at = hash_of(row, width) & (slots - 1);
        while (table[at] != 0 && std::memcmp(values + first[table[at] - 1] * width, row, width * sizeof(float)) != 0)
            at = (at + 1) & (slots - 1);
        if (table[at] == 0) {
            first[found] = static_cast<std::uint32_t>(k);
            table[at] = static_cast<std::uint32_t>(++found);
        }
        reference[k] = table[at] - 1;
    }
    return found;
}

}  // namespace atoll_kernels
