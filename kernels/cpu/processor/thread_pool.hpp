#pragma once

#include <cstddef>

namespace atoll_kernels {

constexpr int max_threads = 256;

// Entries in one unit of work (1 MiB); what fits one is not worth waking threads for. Part of the contract of
// squared_norm: its partial sums are per chunk, so the result depends on the length alone and not on how many threads
// shared the chunks. Shorter chunks restart the processor's prefetching too often.
constexpr std::size_t chunk_entries = std::size_t{1} << 18;

inline std::size_t chunk_count(std::size_t entries) { return (entries + chunk_entries - 1) / chunk_entries; }

// work(context, chunk) is called once for each chunk in [0, chunks), on the calling thread and on up to threads - 1
// threads of the process's own pool (threads = 0: default_threads() in all); returns when all have returned. `work`
// must not throw. A second caller at the same moment does its chunks alone: nobody waits for a stranger's work. A
// forked child starts threads of its own.
using Work = void (*)(void* context, std::size_t chunk);
void for_each_chunk(std::size_t chunks, int threads, Work work, void* context);

template <typename Function>
void for_each_chunk(std::size_t chunks, int threads, Function& function) {
    const Work work = [](void* context, std::size_t chunk) { (*static_cast<Function*>(context))(chunk); };
    for_each_chunk(chunks, threads, work, &function);
}

// Joins the pool's threads. A later call of for_each_chunk starts new ones.
void stop_threads();

}  // namespace atoll_kernels
