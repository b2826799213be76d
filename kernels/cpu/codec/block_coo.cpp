#include "block_coo.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "../processor/thread_pool.hpp"
#include "../select/compress.hpp"

static_assert(std::endian::native == std::endian::little, "the wire is little-endian");

namespace atoll_kernels {
namespace {

constexpr std::size_t longest_number = 5;

unsigned char* write_deltas(const Units& units, unsigned char* out) {
    std::uint32_t next = 0;  // the lowest index that may follow
    for (std::size_t k = 0; k < units.count; ++k) {
        std::uint32_t gap = units.index[k] - next;
        next = units.index[k] + 1;
        for (; gap >= 0x80; gap >>= 7) *out++ = static_cast<unsigned char>(gap | 0x80);
        *out++ = static_cast<unsigned char>(gap);
    }
    return out;
}

// Returns the end of the numbers, or null.
const unsigned char* read_deltas(const unsigned char* at, const unsigned char* end, std::size_t count,
                                 std::size_t index_end, std::uint32_t* index) {
    std::uint64_t next = 0;
    for (std::size_t k = 0; k < count; ++k) {
        std::uint64_t gap = 0;
        for (std::size_t byte = 0;; ++byte) {
            if (at == end || byte == longest_number) return nullptr;
            gap |= std::uint64_t{*at & 0x7fU} << (7 * byte);
            if ((*at++ & 0x80) == 0) break;
        }
        if (next + gap >= index_end) return nullptr;
        index[k] = static_cast<std::uint32_t>(next + gap);
        next += gap + 1;
    }
    return at;
}

void return_rounding(const Layout& layout, const Units& units, const unsigned char* written, float* residual) {
    const auto sent = std::make_unique_for_overwrite<float[]>(units.count * block_entries);
    read_values(layout.values, written, units.count * block_entries, sent.get());
    for (std::size_t k = 0; k < units.count; ++k) {
        const std::size_t at = k * block_entries, begin = units.index[k] * block_entries;
        const std::size_t n = std::min(block_entries, layout.entries - begin);
        for (std::size_t i = 0; i < n; ++i) residual[begin + i] += units.values[at + i] - sent[at + i];
    }
}

// Merges the inputs' indices within [begin, end): found(index, positions in the inputs, mask of inputs that have it).
struct Merge {
    const Units* inputs;
    std::size_t count;

    template <typename Found>
    void within(std::size_t begin, std::size_t end, const Found& found) const {
        std::size_t at[most_inputs], stop[most_inputs];
        for (std::size_t w = 0; w < count; ++w) {
            const std::uint32_t *const first = inputs[w].index, *const last = first + inputs[w].count;
            at[w] = static_cast<std::size_t>(std::lower_bound(first, last, begin) - first);
            stop[w] = static_cast<std::size_t>(std::lower_bound(first, last, end) - first);
        }
        while (true) {
            std::uint64_t lowest = std::numeric_limits<std::uint64_t>::max();
            for (std::size_t w = 0; w < count; ++w) {
                if (at[w] < stop[w]) lowest = std::min<std::uint64_t>(lowest, inputs[w].index[at[w]]);
            }
            if (lowest == std::numeric_limits<std::uint64_t>::max()) return;
            std::uint64_t have = 0;
            for (std::size_t w = 0; w < count; ++w) {
                if (at[w] < stop[w] && inputs[w].index[at[w]] == lowest) have |= std::uint64_t{1} << w;
            }
            found(static_cast<std::uint32_t>(lowest), at, have);
            for (; have != 0; have &= have - 1) ++at[std::countr_zero(have)];
        }
    }
};

// Ranges of indices of about as much work each.
std::vector<std::size_t> split(const Units* inputs, std::size_t count) {
    constexpr std::size_t range_units = 4096;
    const Units* longest = inputs;
    for (std::size_t w = 1; w < count; ++w) longest = inputs[w].count > longest->count ? inputs + w : longest;
    std::vector<std::size_t> bounds{0};
    if (count != 0) {
        for (std::size_t k = range_units; k < longest->count; k += range_units) bounds.push_back(longest->index[k]);
    }
    bounds.push_back(std::size_t{1} << 32);
    return bounds;
}

std::vector<std::size_t> count_ranges(const Merge& merge, const std::vector<std::size_t>& bounds, int threads) {
    std::vector<std::size_t> counts(bounds.size() - 1);
    auto work = [&](std::size_t range) {
        std::size_t count = 0;
        merge.within(bounds[range], bounds[range + 1],
                     [&](std::uint32_t, const std::size_t*, std::uint64_t) { ++count; });
        counts[range] = count;
    };
    for_each_chunk(counts.size(), threads, work);
    return counts;
}

}  // namespace

std::size_t largest_payload(const Layout& layout, std::size_t count) {
    const std::size_t index_bytes = layout.indices == IndexFormat::delta ? longest_number : 0;
    return count * index_bytes + wire_bytes(layout.values, count * block_entries);
}

std::size_t encode(const Layout& layout, const Units& units, unsigned char* out, float* residual) {
    unsigned char* at = out;
    if (layout.indices == IndexFormat::delta) at = write_deltas(units, at);
    write_values(layout.values, units.values, units.count * block_entries, at);
    if (residual != nullptr && layout.values != WireValues::float32) return_rounding(layout, units, at, residual);
    return static_cast<std::size_t>(at - out) + wire_bytes(layout.values, units.count * block_entries);
}

const char* decode(const Layout& layout, const unsigned char* payload, std::size_t bytes, std::size_t count,
                   std::uint32_t* index, float* values) {
    const std::size_t values_count = count * block_entries, tail = wire_bytes(layout.values, values_count);
    const std::size_t index_end = block_count(layout.entries);
    if (bytes < tail) return "is too short for its values";
    const std::size_t head = bytes - tail;
    if (layout.indices == IndexFormat::none && head != 0) return "is longer than its values";
    if (layout.indices == IndexFormat::delta) {
        const unsigned char* const end = read_deltas(payload, payload + head, count, index_end, index);
        if (end == nullptr) return "has indices that are cut short or lie outside the tensor";
        if (end != payload + head) return "is longer than its indices and values";
    }
    read_values(layout.values, payload + head, values_count, values);
    if (!all_finite(values, values_count)) return "has values that are not finite";
    const std::size_t beyond = index_end * block_entries - layout.entries;
    if (beyond != 0 && count != 0 && layout.indices != IndexFormat::none && index[count - 1] == index_end - 1)
        std::fill_n(values + values_count - beyond, beyond, 0.0F);
    return nullptr;
}

bool all_finite(const float* values, std::size_t count) {
    std::uint32_t bad = 0;
    for (std::size_t i = 0; i < count; ++i) {
        bad |= static_cast<std::uint32_t>((std::bit_cast<std::uint32_t>(values[i]) & 0x7f800000) == 0x7f800000);
    }
    return bad == 0;
}

bool valid_indices(const std::uint32_t* index, std::size_t count, std::size_t end) {
    unsigned bad = 0;
    for (std::size_t k = 1; k < count; ++k) bad |= static_cast<unsigned>(index[k] <= index[k - 1]);
    return bad == 0 && (count == 0 || index[count - 1] < end);
}

std::size_t count_union(const Units* inputs, std::size_t inputs_count, int threads) {
    std::size_t total = 0;
    for (const std::size_t count : count_ranges({inputs, inputs_count}, split(inputs, inputs_count), threads))
        total += count;
    return total;
}

void sum_units(const Units* inputs, std::size_t inputs_count, std::uint32_t* index, float* values, int threads) {
    const Merge merge{inputs, inputs_count};
    const std::vector<std::size_t> bounds = split(inputs, inputs_count);
    std::vector<std::size_t> places = count_ranges(merge, bounds, threads);
    std::size_t before = 0;
    for (std::size_t& place : places) before += std::exchange(place, before);
    auto work = [&](std::size_t range) {
        std::size_t place = places[range];
        merge.within(bounds[range], bounds[range + 1],
                     [&](std::uint32_t unit, const std::size_t* at, std::uint64_t have) {
                         index[place] = unit;
                         float* const sum = values + place++ * block_entries;
                         const auto values_of = [&](std::uint64_t from) {
                             const auto w = static_cast<std::size_t>(std::countr_zero(from));
                             return inputs[w].values + at[w] * block_entries;
                         };
                         std::copy_n(values_of(have), block_entries, sum);
                         for (have &= have - 1; have != 0; have &= have - 1) {
                             const float* const more = values_of(have);
                             for (std::size_t i = 0; i < block_entries; ++i) sum[i] += more[i];
                         }
                     });
    };
    for_each_chunk(places.size(), threads, work);
}

}  // namespace atoll_kernels
