#include "hash_bitmap.hpp"

#include <algorithm>
#include <bit>

namespace atoll_kernels {

bool bitmap_encode(const std::uint32_t* member, std::size_t members, const std::uint32_t* unit, std::size_t count,
                   std::uint8_t* bitmap) {
    std::fill_n(bitmap, bitmap_bytes(members), std::uint8_t{0});
    std::size_t k = 0;
    for (std::size_t t = 0; t < members && k < count; ++t) {
        if (member[t] != unit[k]) continue;
        bitmap[t / 8] = static_cast<std::uint8_t>(bitmap[t / 8] | 1u << t % 8);
        ++k;
    }
    return k == count;
}

bool bitmap_decode(const std::uint32_t* member, std::size_t members, const std::uint8_t* bitmap, std::uint32_t* unit,
                   std::size_t count) {
    std::size_t found = 0;
    for (std::size_t j = 0; j < bitmap_bytes(members); ++j) found += std::popcount(bitmap[j]);
    if (found != count) return false;
    if (members % 8 != 0 && (bitmap[members / 8] >> members % 8) != 0) return false;
    std::size_t k = 0;
    for (std::size_t j = 0; j < bitmap_bytes(members); ++j) {
        for (unsigned left = bitmap[j]; left != 0; left &= left - 1)
            unit[k++] = member[8 * j + static_cast<unsigned>(std::countr_zero(left))];
    }
    return true;
}

}  // namespace atoll_kernels
