#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "../processor/thread_pool.hpp"
#include "compress.hpp"
#include "scan.hpp"

namespace atoll_kernels {

// Gives chunks that are scanned in any order their places in the output in ascending order. Nobody waits: whoever
// scans the chunk that closes a gap copies all that follows from it.
class ChunkPlaces {
  public:
    explicit ChunkPlaces(std::size_t chunks) : counts_(chunks), scanned_(chunks) {}

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

// The blocks whose score exceeds `threshold`, the first to.capacity of them. Threads share the chunks:
//   scan(first, count, scores)  fills scores [count], -1 for a block that is not finite, and returns how many are not
//   take(block, values)         copies a chosen block out
template <typename Scan, typename Take>
Selection blocks_above(std::size_t blocks, float threshold, const Chosen& to, int threads, Path path, const Scan& scan,
                       const Take& take) {
    constexpr std::size_t words = scan_blocks / 64;
    const std::size_t chunks = (blocks + scan_blocks - 1) / scan_blocks;
    const std::unique_ptr<std::uint64_t[]> above(new std::uint64_t[chunks * words]);
    ChunkPlaces places(chunks);
    std::atomic<std::size_t> nonfinite{0};
    const auto gather = [&](std::size_t chunk, std::size_t place) {
        const std::size_t count = std::min(scan_blocks, blocks - chunk * scan_blocks);
        take_set_bits(above.get() + chunk * words, (count + 63) / 64, chunk * scan_blocks, place, to.capacity,
                      [&](std::size_t block, std::size_t at) {
                          to.index[at] = static_cast<std::uint32_t>(block);
                          take(block, to.values + at * block_entries);
                      });
    };
    auto work = [&](std::size_t chunk) {
        float scores[scan_blocks];
        const std::size_t first = chunk * scan_blocks, count = std::min(scan_blocks, blocks - first);
        nonfinite.fetch_add(scan(first, count, scores), std::memory_order_relaxed);
        places.scanned(chunk, mark_above(scores, count, threshold, above.get() + chunk * words, path), gather);
    };
    for_each_chunk(chunks, threads, work);
    return {std::min(places.total(), to.capacity), places.total(), nonfinite.load()};
}

}  // namespace atoll_kernels
