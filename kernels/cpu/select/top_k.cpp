// Exact top-k: the k-th largest magnitude by counting three digits (radix select on the bits of a float32, which
// order like the numbers they stand for when no sign is set), then one pass that copies all above it.
#include <algorithm>
#include <atomic>
#include <bit>
#include <memory>
#include <vector>

#include "../processor/thread_pool.hpp"
#include "compress.hpp"
#include "scan.hpp"

namespace atoll_kernels {
namespace {

constexpr int bits_per_digit[] = {11, 10, 10};
constexpr std::size_t bins = std::size_t{1} << 11;

// 0 stands for "never": a zero, or what is not finite.
struct BlockKeys {
    const float* scores;
    std::size_t count;
    std::uint32_t operator()(std::size_t block) const {
        return scores[block] > 0 ? std::bit_cast<std::uint32_t>(scores[block]) : 0;
    }
};

struct ElementKeys {
    const Source& from;
    const std::uint64_t* nonfinite;
    std::size_t count;
    std::uint32_t operator()(std::size_t i) const {
        if ((nonfinite[i / 64] >> (i % 64) & 1) != 0) return 0;
        return std::bit_cast<std::uint32_t>(entry(from, i)) & 0x7fffffff;
    }
};

struct Cutoff {
    std::uint32_t key;  // units above it are chosen
    std::size_t ties;   // and so many of those that equal it
    std::size_t nonzero;
};

template <typename Keys>
Cutoff find_cutoff(const Keys& keys, std::size_t k, int threads) {
    std::uint32_t prefix = 0;
    std::size_t left = k, nonzero = 0;
    int shift = 31;
    for (const int width : bits_per_digit) {
        const int known = shift;  // bits above this are those of `prefix`
        shift -= width;
        std::vector<std::atomic<std::uint64_t>> counts(bins);
        std::atomic<std::uint64_t> zeros{0};
        auto work = [&](std::size_t chunk) {
            std::uint32_t mine[bins] = {};
            std::uint32_t my_zeros = 0;
            const std::size_t end = std::min(keys.count, (chunk + 1) * chunk_entries);
            for (std::size_t i = chunk * chunk_entries; i < end; ++i) {
                const std::uint32_t key = keys(i);
                my_zeros += key == 0;
                if (static_cast<std::uint64_t>(key) >> known == prefix) ++mine[key >> shift & ((1U << width) - 1)];
            }
            for (std::size_t bin = 0; bin < bins; ++bin) {
                if (mine[bin] != 0) counts[bin].fetch_add(mine[bin], std::memory_order_relaxed);
            }
            zeros.fetch_add(my_zeros, std::memory_order_relaxed);
        };
        for_each_chunk(chunk_count(keys.count), threads, work);
        nonzero = keys.count - zeros.load();
        if (nonzero <= k) return {0, 0, nonzero};
        std::size_t bin = (std::size_t{1} << width) - 1;
        for (; counts[bin].load() < left; --bin) left -= counts[bin].load();
        prefix = prefix << width | static_cast<std::uint32_t>(bin);
    }
    return {prefix, left, nonzero};
}

template <typename Keys, typename Take>
Selection take_top(const Keys& keys, std::size_t k, std::size_t nonfinite, int threads, const Take& take) {
    if (k == 0 || keys.count == 0) return {0, 0, nonfinite};
    const Cutoff cutoff = find_cutoff(keys, k, threads);
    const std::size_t chunks = chunk_count(keys.count);
    struct Part {
        std::size_t above, equal;
    };
    std::vector<Part> parts(chunks);
    const auto end_of = [&](std::size_t chunk) { return std::min(keys.count, (chunk + 1) * chunk_entries); };
    auto count = [&](std::size_t chunk) {
        Part part{0, 0};
        for (std::size_t i = chunk * chunk_entries; i < end_of(chunk); ++i) {
            const std::uint32_t key = keys(i);
            part.above += key > cutoff.key;
            part.equal += key == cutoff.key;
        }
        parts[chunk] = part;
    };
    for_each_chunk(chunks, threads, count);
    Part before{0, 0};
    for (Part& part : parts) {
        const Part mine = part;
        part = before;
        before.above += mine.above;
        before.equal += mine.equal;
    }
    auto gather = [&](std::size_t chunk) {
        std::size_t ties = std::min(parts[chunk].equal, cutoff.ties);
        std::size_t place = parts[chunk].above + ties;
        for (std::size_t i = chunk * chunk_entries; i < end_of(chunk); ++i) {
            const std::uint32_t key = keys(i);
            if (key > cutoff.key || (key == cutoff.key && ties < cutoff.ties)) {
                ties += key == cutoff.key;
                take(i, place++);
            }
        }
    };
    for_each_chunk(chunks, threads, gather);
    return {before.above + cutoff.ties, cutoff.nonzero, nonfinite};
}

}  // namespace

Selection topk_block(const Source& from, const Chosen& to, int threads, Path path) {
    const std::size_t blocks = block_count(from.n);
    const std::unique_ptr<float[]> scores(new float[blocks]);
    std::atomic<std::size_t> nonfinite{0};
    auto work = [&](std::size_t chunk) {
        const std::size_t first = chunk * scan_blocks;
        nonfinite += scan(from, first, std::min(scan_blocks, blocks - first), scores.get() + first, path);
    };
    for_each_chunk(scan_count(from.n), threads, work);
    return take_top(BlockKeys{scores.get(), blocks}, to.capacity, nonfinite.load(), threads,
                    [&](std::size_t block, std::size_t at) {
                        to.index[at] = static_cast<std::uint32_t>(block);
                        take_block(from, block, to.values + at * block_entries);
                    });
}

Selection topk_element(const Source& from, const Chosen& to, int threads, Path path) {
    constexpr std::size_t words = scan_entries / 64;
    const std::size_t chunks = scan_count(from.n);
    const std::unique_ptr<std::uint64_t[]> bad(new std::uint64_t[chunks * words]);
    std::atomic<std::size_t> nonfinite{0};
    auto work = [&](std::size_t chunk) {
        std::uint64_t above[words];
        const std::size_t first = chunk * scan_entries;
        nonfinite += scan_elements(from, first, std::min(scan_entries, from.n - first), 0.0F, above,
                                   bad.get() + chunk * words, path)
                         .nonfinite;
    };
    for_each_chunk(chunks, threads, work);
    return take_top(ElementKeys{from, bad.get(), from.n}, to.capacity, nonfinite.load(), threads,
                    [&](std::size_t i, std::size_t at) {
                        to.index[at] = static_cast<std::uint32_t>(i);
                        to.values[at] = take_entry(from, i);
                    });
}

}  // namespace atoll_kernels
