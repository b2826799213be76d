#include "compress.hpp"

#include <algorithm>
#include <atomic>
#include <functional>
#include <iterator>
#include <vector>

#include "../processor/thread_pool.hpp"
#include "chunk_places.hpp"
#include "random_blocks.hpp"
#include "scan.hpp"

namespace atoll_kernels {

Selection threshold_block(const Source& from, float threshold, const Chosen& to, int threads, Path path) {
    return blocks_above(
        block_count(from.n), threshold, to, threads, path,
        [&](std::size_t first, std::size_t count, float* scores) { return scan(from, first, count, scores, path); },
        [&](std::size_t block, float* values) { take_block(from, block, values); });
}

Selection topk_block(const Source& from, const Chosen& to, int threads, Path path) {
    const std::size_t blocks = block_count(from.n);
    std::vector<float> scores(blocks), ranked;
    std::atomic<std::size_t> nonfinite{0};
    auto work = [&](std::size_t chunk) {
        const std::size_t first = chunk * scan_blocks;
        nonfinite += scan(from, first, std::min(scan_blocks, blocks - first), scores.data() + first, path);
    };
    for_each_chunk(scan_count(from.n), threads, work);
    if (to.capacity == 0) return {0, 0, nonfinite.load()};
    std::copy_if(scores.begin(), scores.end(), std::back_inserter(ranked), [](float score) { return score > 0; });
    float limit = 0;       // blocks above it are chosen
    std::size_t ties = 0;  // and so many of those that equal it
    if (ranked.size() > to.capacity) {
        const auto last = ranked.begin() + static_cast<std::ptrdiff_t>(to.capacity) - 1;
        std::nth_element(ranked.begin(), last, ranked.end(), std::greater<>());
        limit = *last;
        ties = 1 + static_cast<std::size_t>(std::count(ranked.begin(), last, limit));
    }
    std::size_t chosen = 0;
    for (std::size_t block = 0; block < blocks; ++block) {
        const bool tie = scores[block] == limit && ties > 0;
        if (!tie && !(scores[block] > limit)) continue;
        ties -= tie;
        to.index[chosen] = static_cast<std::uint32_t>(block);
        take_block(from, block, to.values + chosen++ * block_entries);
    }
    return {chosen, ranked.size(), nonfinite.load()};
}

void random_blocks(std::uint64_t seed, std::size_t blocks, std::size_t count, std::uint32_t* index) {
    for (std::size_t k = 0; k < count; ++k) index[k] = random_block_of_interval(seed, k, blocks, count);
}

Selection random_block(const Source& from, std::uint64_t seed, const Chosen& to, int threads, Path path) {
    const std::size_t blocks = block_count(from.n), chosen = std::min(blocks, to.capacity);
    random_blocks(seed, blocks, chosen, to.index);
    std::atomic<std::size_t> nonfinite{0};
    auto work = [&](std::size_t chunk) {
        float scores[scan_blocks];
        const std::size_t first = chunk * scan_blocks, count = std::min(scan_blocks, blocks - first);
        nonfinite.fetch_add(scan(from, first, count, scores, path), std::memory_order_relaxed);
        const std::uint32_t *const begin = to.index, *const end = begin + chosen;
        for (const std::uint32_t* at = std::lower_bound(begin, end, first); at < end && *at < first + count; ++at) {
            float* const values = to.values + static_cast<std::size_t>(at - begin) * block_entries;
            if (scores[*at - first] < 0) {
                std::fill_n(values, block_entries, 0.0F);
            } else {
                take_block(from, *at, values);
            }
        }
    };
    for_each_chunk(scan_count(from.n), threads, work);
    return {chosen, chosen, nonfinite.load()};
}

void sample_scores(const Source& from, std::uint64_t seed, std::size_t count, float* scores) {
    const std::size_t blocks = block_count(from.n);
    for (std::size_t k = 0; k < count; ++k) {
        const std::size_t begin = random_block_of_interval(seed, k, blocks, count) * block_entries;
        const std::size_t n = std::min(block_entries, from.n - begin);
        float residual[block_entries];
        if (from.residual != nullptr) std::copy_n(from.residual + begin, n, residual);
        const Source one{from.gradient + begin, from.residual != nullptr ? residual : nullptr, from.weight, n};
        scan(one, 0, 1, scores + k, Path::portable);
    }
}

}  // namespace atoll_kernels
