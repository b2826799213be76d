#include "unit_sum.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "../hashing/murmur3.hpp"
#include "../processor/features.hpp"
#include "../processor/thread_pool.hpp"

namespace atoll_kernels {
namespace {

constexpr std::size_t word_units = 64;

// A set of units below some end, that knows how many of it lie before each.
class UnitSet {
  public:
    explicit UnitSet(std::size_t units) : words_((units + word_units - 1) / word_units) {}

    bool has(std::uint32_t unit) const { return (words_[unit / word_units] >> unit % word_units & 1) != 0; }
    void add(std::uint32_t unit) { words_[unit / word_units] |= std::uint64_t{1} << unit % word_units; }
    void remove(std::uint32_t unit) { words_[unit / word_units] &= ~(std::uint64_t{1} << unit % word_units); }

    // How many there are. What `before` says holds from now on, until another is added.
    std::size_t count() {
        before_.resize(words_.size());
        std::size_t sum = 0;
        for (std::size_t w = 0; w < words_.size(); ++w) {
            before_[w] = static_cast<std::uint32_t>(sum);
            sum += static_cast<std::size_t>(std::popcount(words_[w]));
        }
        return sum;
    }

    std::size_t before(std::uint32_t unit) const {
        const std::uint64_t lower = (std::uint64_t{1} << unit % word_units) - 1;
        return before_[unit / word_units] + static_cast<std::size_t>(std::popcount(words_[unit / word_units] & lower));
    }

    void list(std::uint32_t* unit) const {
        for (std::size_t w = 0; w < words_.size(); ++w) {
            for (std::uint64_t left = words_[w]; left != 0; left &= left - 1) {
                const auto at = static_cast<std::size_t>(std::countr_zero(left));
                *unit++ = static_cast<std::uint32_t>(w * word_units + at);
            }
        }
    }

  private:
    std::vector<std::uint64_t> words_;
    std::vector<std::uint32_t> before_;
};

UnitFlaw flaw_of(std::uint32_t unit, std::uint32_t partition, const UnitRange& range, const UnitSet& own) {
    if (unit >= range.units) return UnitFlaw::outside;
    if (range.partitions != 0 && partition_of(unit, range.seed, range.partitions) != partition)
        return UnitFlaw::foreign;
    return own.has(unit) ? UnitFlaw::twice : UnitFlaw::none;
}

}  // namespace

CheckedSum sum_coordinates(const std::vector<Coordinates>& terms, const UnitRange& range, std::size_t width,
                           int threads) {
    CheckedSum result;
    UnitSet all(range.units), own(range.units);
    for (std::size_t t = 0; t < terms.size(); ++t) {
        for (std::size_t k = 0; k < terms[t].count; ++k) {
            const std::uint32_t unit = terms[t].unit[k];
            result.flaw = flaw_of(unit, terms[t].partition, range, own);
            if (result.flaw != UnitFlaw::none) {
                result.which = t;
                result.unit = unit;
                return result;
            }
            own.add(unit);
            all.add(unit);
        }
        for (std::size_t k = 0; k < terms[t].count; ++k) own.remove(terms[t].unit[k]);
    }
    UnitSum& sum = result.sum;
    sum.count = all.count();
    sum.unit = std::make_unique_for_overwrite<std::uint32_t[]>(sum.count);
    sum.values = std::make_unique_for_overwrite<float[]>(sum.count * width);
    all.list(sum.unit.get());
    std::vector<std::uint8_t> begun(sum.count);

    // Each chunk has the units of a part of the sum, and looks through all terms for them.
    const std::size_t most = static_cast<std::size_t>(threads != 0 ? threads : default_threads());
    const std::size_t chunks = std::clamp<std::size_t>(chunk_count(sum.count * width), 1, most);
    auto add = [&](std::size_t chunk) {
        const std::size_t begin = sum.count * chunk / chunks, end = sum.count * (chunk + 1) / chunks;
        for (const Coordinates& term : terms) {
            for (std::size_t k = 0; k < term.count; ++k) {
                const std::size_t at = all.before(term.unit[k]);
                if (at < begin || at >= end) continue;
                float* const to = sum.values.get() + at * width;
                const float* const from = term.values + k * width;
                if (begun[at] == 0) {
                    std::memcpy(to, from, width * sizeof(float));
                    begun[at] = 1;
                } else {
                    for (std::size_t i = 0; i < width; ++i) to[i] += from[i];
                }
            }
        }
    };
    for_each_chunk(chunks, threads, add);
    return result;
}

std::vector<std::uint32_t> nonzero_units(const float* dense, std::size_t units, std::size_t width, int threads) {
    const std::size_t at_once = std::max<std::size_t>(1, chunk_entries / std::max<std::size_t>(width, 1));
    std::vector<std::vector<std::uint32_t>> found((units + at_once - 1) / at_once);
    auto look = [&](std::size_t chunk) {
        const std::size_t end = std::min(units, (chunk + 1) * at_once);
        for (std::size_t u = chunk * at_once; u < end; ++u) {
            const float* const row = dense + u * width;
            if (!std::all_of(row, row + width, [](float x) { return x == 0; }))
                found[chunk].push_back(static_cast<std::uint32_t>(u));
        }
    };
    for_each_chunk(found.size(), threads, look);
    std::vector<std::uint32_t> all;
    for (const std::vector<std::uint32_t>& part : found) all.insert(all.end(), part.begin(), part.end());
    return all;
}

}  // namespace atoll_kernels
