#include "../cpu/hashing/murmur3.hpp"
#include "compact.cuh"
#include "hashing.hpp"

// Zen (Wang et al., 2023), Algorithm 3.2: threads write their unit's place into a slot that is empty, and read back in
// the next launch, when all writes are done, whose it has become. Units that no try placed go behind their partition's
// slots; their room is counted first, so that nothing is dropped however many there are.
namespace atoll_kernels {
namespace {

struct Hashing {
    const std::uint32_t* unit;  // [count]
    std::size_t count;
    HashSeeds seeds;
    std::uint32_t partitions;
    std::size_t slots, stride;  // of a partition: those that are used, and those up to the next one's, a whole of tiles

    __device__ std::uint32_t home(std::size_t j) const { return partition_of(unit[j], seeds.partition, partitions); }
    __device__ std::size_t slot(std::size_t j, unsigned turn) const {
        return home(j) * stride + bucket_of(murmur3(unit[j], seeds.slot[turn]), slots);
    }
};

struct State {
    std::uint32_t* memory;  // [partitions * stride]: a place + 1; 0: empty
    std::uint8_t* placed;   // [count]
    std::uint64_t* serial;  // [partitions + 1]: units of each that found no slot; later how many are before it
    std::uint32_t* next;    // [partitions]
};

__device__ std::size_t my_first() { return std::size_t{blockIdx.x} * block_threads + threadIdx.x; }
__device__ std::size_t my_stride() { return std::size_t{gridDim.x} * block_threads; }

// Two that write into one slot at once: either's write stays, whole.
// Bound by memory latency: reads 5 bytes a unit, and reads and writes 4 in scattered places.
__global__ void write_places(Hashing by, State to, unsigned turn) {
    for (std::size_t j = my_first(); j < by.count; j += my_stride()) {
        if (to.placed[j] != 0) continue;
        volatile std::uint32_t* const slot = to.memory + by.slot(j, turn);
        if (*slot == 0) *slot = static_cast<std::uint32_t>(j) + 1;
    }
}

__global__ void find_placed(Hashing by, State to, unsigned turn) {
    for (std::size_t j = my_first(); j < by.count; j += my_stride()) {
        if (to.placed[j] == 0 && to.memory[by.slot(j, turn)] == static_cast<std::uint32_t>(j) + 1) to.placed[j] = 1;
    }
}

__global__ void count_serial(Hashing by, State to) {
    for (std::size_t j = my_first(); j < by.count; j += my_stride()) {
        if (to.placed[j] == 0)
            atomicAdd(reinterpret_cast<unsigned long long*>(to.serial + by.home(j)), 1ull);
    }
}

struct FilledSlots {
    std::size_t items;
    const std::uint32_t* memory;
    const std::uint64_t* serial_before;
    std::size_t stride;
    std::uint32_t* order;

    __device__ unsigned count(std::size_t slot) const { return memory[slot] != 0; }
    __device__ void give(std::size_t slot, std::uint64_t at) const {
        if (memory[slot] != 0) order[at + serial_before[slot / stride]] = memory[slot] - 1;
    }
};

// bounds[p]: slots filled before partition p, and units of earlier partitions that found none.
__global__ void find_bounds(const std::uint64_t* tile_before, const std::uint64_t* serial_before,
                            std::size_t tiles_each, std::size_t partitions, std::uint64_t* bounds) {
    for (std::size_t p = my_first(); p <= partitions; p += my_stride())
        bounds[p] = tile_before[p * tiles_each] + serial_before[p];
}

__global__ void append_serial(Hashing by, State from, const std::uint64_t* bounds, std::uint32_t* order) {
    for (std::size_t j = my_first(); j < by.count; j += my_stride()) {
        if (from.placed[j] != 0) continue;
        const std::uint32_t p = by.home(j);
        order[bounds[p + 1] - 1 - atomicAdd(from.next + p, 1u)] = static_cast<std::uint32_t>(j);
    }
}

template <typename T>
void clear(T* memory, std::size_t count, cudaStream_t stream) {
    check(cudaMemsetAsync(memory, 0, count * sizeof(T), stream), "clearing scratch memory");
}

}  // namespace

Partitioned hierarchical_hash_cuda(const std::uint32_t* unit, std::size_t count, const HashSeeds& seeds,
                                   std::size_t partitions, std::size_t slots, std::uint32_t* order,
                                   const Queue& queue) {
    const OnDevice here(queue.device);
    const auto stream = static_cast<cudaStream_t>(queue.stream);
    const std::size_t tiles_each = compact_tiles(slots), stride = tiles_each * tile_items;
    const std::size_t places = partitions * stride;
    const Hashing by{unit, count, seeds, static_cast<std::uint32_t>(partitions), slots, stride};
    const Scratch<std::uint32_t> memory(places, queue.device, stream), next(partitions, queue.device, stream);
    const Scratch<std::uint8_t> placed(count, queue.device, stream);
    const Scratch<std::uint64_t> serial(partitions + 1, queue.device, stream);
    const Scratch<std::uint64_t> before(partitions * tiles_each + 1, queue.device, stream);
    const Scratch<std::uint64_t> bounds(partitions + 1, queue.device, stream);
    const State state{memory.get(), placed.get(), serial.get(), next.get()};
    clear(memory.get(), places, stream);
    clear(placed.get(), count, stream);
    clear(serial.get(), partitions + 1, stream);
    clear(next.get(), partitions, stream);

    const unsigned blocks = blocks_for(count, block_threads);
    for (unsigned turn = 0; turn < hash_tries; ++turn) {
        launch("starting write_places", write_places, blocks, block_threads, stream, by, state, turn);
        launch("starting find_placed", find_placed, blocks, block_threads, stream, by, state, turn);
    }
    launch("starting count_serial", count_serial, blocks, block_threads, stream, by, state);
    queue_sum_up(serial.get(), partitions, stream);
    const FilledSlots filled{places, memory.get(), serial.get(), stride, order};
    queue_count(filled, before.get(), stream);
    queue_give(filled, before.get(), stream);
    launch("starting find_bounds", find_bounds, blocks_for(partitions + 1, block_threads), block_threads, stream,
           before.get(), serial.get(), tiles_each, partitions, bounds.get());
    launch("starting append_serial", append_serial, blocks, block_threads, stream, by, state, bounds.get(), order);

    Partitioned result;
    result.bounds.resize(partitions + 1);
    check(cudaMemcpyAsync(result.bounds.data(), bounds.get(), (partitions + 1) * sizeof(std::uint64_t),
                          cudaMemcpyDeviceToHost, stream),
          "copying the bounds");
    result.serial = read_back(serial.get() + partitions, stream);
    return result;
}

}  // namespace atoll_kernels
