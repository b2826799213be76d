#include "compress.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <memory>
#include <mutex>
#include <vector>

#include "../strata.hpp"
#include "scan.hpp"
#include "thread_pool.hpp"

namespace atoll_kernels {
namespace {

// Gives chunks that are scanned in any order their places in the output in ascending order. Nobody waits: whoever
// scans the chunk that closes a gap copies all that follows from it.
class Placing {
  public:
    explicit Placing(std::size_t chunks) : counts_(chunks), scanned_(chunks) {}

    // gather(chunk, place) is called once for every chunk.
    template <typename Gather>
    void scanned(std::size_t chunk, std::size_t count, const Gather& gather) {
        std::size_t from, to, place;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            counts_[chunk] = count;
            scanned_[chunk] = true;
            from = to = next_;
            place = total_;
            for (; to < counts_.size() && scanned_[to]; ++to) total_ += counts_[to];
            next_ = to;
        }
        for (std::size_t c = from; c < to; ++c) {
            gather(c, place);
            place += counts_[c];  // of chunks below next_: nobody writes there any more
        }
    }

    std::size_t total() const { return total_; }

  private:
    std::mutex mutex_;
    std::vector<std::size_t> counts_;
    std::vector<unsigned char> scanned_;
    std::size_t next_ = 0;
    std::size_t total_ = 0;
};

// Calls take(unit, place) for every set bit, in ascending order, while there is room.
template <typename Take>
void take_set_bits(const std::uint64_t* words, std::size_t count, std::size_t first, std::size_t place,
                   std::size_t capacity, const Take& take) {
    for (std::size_t w = 0; w < count; ++w) {
        for (std::uint64_t bits = words[w]; bits != 0; bits &= bits - 1) {
            if (place >= capacity) return;
            take(first + 64 * w + static_cast<std::size_t>(std::countr_zero(bits)), place++);
        }
    }
}

}  // namespace

Selection threshold_block(const Source& from, float threshold, const Chosen& to, int threads, Path path) {
    constexpr std::size_t words = scan_blocks / 64;
    const std::size_t blocks = block_count(from.n), chunks = scan_count(from.n);
    const std::unique_ptr<std::uint64_t[]> above(new std::uint64_t[chunks * words]);
    Placing placing(chunks);
    std::atomic<std::size_t> nonfinite{0};
    const auto gather = [&](std::size_t chunk, std::size_t place) {
        const std::size_t count = std::min(scan_blocks, blocks - chunk * scan_blocks);
        take_set_bits(above.get() + chunk * words, (count + 63) / 64, chunk * scan_blocks, place, to.capacity,
                      [&](std::size_t block, std::size_t at) {
                          to.index[at] = static_cast<std::uint32_t>(block);
                          take_block(from, block, to.values + at * block_entries);
                      });
    };
    auto work = [&](std::size_t chunk) {
        float scores[scan_blocks];
        const std::size_t first = chunk * scan_blocks, count = std::min(scan_blocks, blocks - first);
        nonfinite.fetch_add(scan(from, first, count, scores, path), std::memory_order_relaxed);
        placing.scanned(chunk, mark_above(scores, count, threshold, above.get() + chunk * words, path), gather);
    };
    for_each_chunk(chunks, threads, work);
    return {std::min(placing.total(), to.capacity), placing.total(), nonfinite.load()};
}

Selection threshold_element(const Source& from, float threshold, const Chosen& to, int threads, Path path) {
    constexpr std::size_t words = scan_entries / 64;
    const std::size_t chunks = scan_count(from.n);
    const std::unique_ptr<std::uint64_t[]> above(new std::uint64_t[chunks * words]);
    Placing placing(chunks);
    std::atomic<std::size_t> nonfinite{0};
    const auto gather = [&](std::size_t chunk, std::size_t place) {
        const std::size_t count = std::min(scan_entries, from.n - chunk * scan_entries);
        take_set_bits(above.get() + chunk * words, (count + 63) / 64, chunk * scan_entries, place, to.capacity,
                      [&](std::size_t i, std::size_t at) {
                          to.index[at] = static_cast<std::uint32_t>(i);
                          to.values[at] = take_entry(from, i);
                      });
    };
    auto work = [&](std::size_t chunk) {
        const std::size_t first = chunk * scan_entries, count = std::min(scan_entries, from.n - first);
        const ElementCounts counts =
            scan_elements(from, first, count, threshold, above.get() + chunk * words, nullptr, path);
        nonfinite.fetch_add(counts.nonfinite, std::memory_order_relaxed);
        placing.scanned(chunk, counts.above, gather);
    };
    for_each_chunk(chunks, threads, work);
    return {std::min(placing.total(), to.capacity), placing.total(), nonfinite.load()};
}

void random_blocks(std::uint64_t seed, std::size_t blocks, std::size_t count, std::uint32_t* index) {
    for (std::size_t k = 0; k < count; ++k) index[k] = block_of_stratum(seed, k, blocks, count);
}

Selection random_block(const Source& from, std::uint64_t seed, const Chosen& to, int threads, Path path) {
    const std::size_t blocks = block_count(from.n), kept = std::min(blocks, to.capacity);
    random_blocks(seed, blocks, kept, to.index);
    std::atomic<std::size_t> nonfinite{0};
    auto work = [&](std::size_t chunk) {
        float scores[scan_blocks];
        const std::size_t first = chunk * scan_blocks, count = std::min(scan_blocks, blocks - first);
        nonfinite.fetch_add(scan(from, first, count, scores, path), std::memory_order_relaxed);
        const std::uint32_t *const begin = to.index, *const end = begin + kept;
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
    return {kept, kept, nonfinite.load()};
}

void sample_scores(const Source& from, std::uint64_t seed, std::size_t count, float* scores) {
    const std::size_t blocks = block_count(from.n);
    for (std::size_t k = 0; k < count; ++k) {
        const std::size_t begin = block_of_stratum(seed, k, blocks, count) * block_entries;
        const std::size_t n = std::min(block_entries, from.n - begin);
        float residual[block_entries];
        if (from.residual != nullptr) std::copy_n(from.residual + begin, n, residual);
        const Source one{from.gradient + begin, from.residual != nullptr ? residual : nullptr, from.weight, n};
        scan(one, 0, 1, scores + k, Path::portable);
    }
}

}  // namespace atoll_kernels
