#pragma once

#include <cstdint>
#include <vector>

#include "../cpu/hashing/hash_bitmap.hpp"
#include "../cpu/hashing/hierarchical_hash.hpp"
#include "loaded.hpp"

// Shared by the CPU's and the CUDA binding of hierarchical hashing and the hash bitmap.
namespace atoll_kernels {

inline HashSeeds checked_seeds(const std::vector<std::uint32_t>& seeds) {
    if (seeds.size() != hash_tries + 1)
        refuse("seeds has " + number(seeds.size()) + " numbers; pass h0's and those of the " + number(hash_tries) +
               " that choose a slot");
    HashSeeds checked{seeds[0], {}};
    for (unsigned i = 0; i < hash_tries; ++i) checked.slot[i] = seeds[i + 1];
    return checked;
}

inline std::size_t checked_partitions(std::size_t partitions) {
    if (partitions < 1 || partitions > max_partitions)
        refuse("partitions = " + number(partitions) + " is not in 1.." + number(max_partitions));
    return partitions;
}

// The arguments of hierarchical_hash. slots: 0 for those of the published algorithm.
struct HashCall {
    Loaded unit, order;
    HashSeeds seeds;
    std::size_t partitions, slots;

    HashCall(int device_type, nb::handle unit_object, const std::vector<std::uint32_t>& seed_list,
             std::size_t partition_count, nb::handle order_object, std::size_t slot_count)
        : unit(required(unit_object, "unit", Access::read, index_entries, device_type)),
          order(required(order_object, "order", Access::write, index_entries, device_type)),
          seeds(checked_seeds(seed_list)),
          partitions(checked_partitions(partition_count)),
          slots(slot_count != 0 ? slot_count
                                : std::max<std::size_t>(1, parallel_slots(unit.entries, partition_count))) {
        check_entries(order, unit.entries, "it must be as long as unit");
        if (unit.entries >= UINT32_MAX || slots > UINT32_MAX)
            refuse("unit has " + number(unit.entries) + " entries, more than 32 bits count; split it");
        refuse_overlap({&unit, &order});
    }
};

// The arguments of both directions of the hash bitmap.
struct BitmapCall {
    Loaded member, unit, bitmap;

    BitmapCall(int device_type, nb::handle member_object, nb::handle unit_object, nb::handle bitmap_object,
               Access unit_access)
        : member(required(member_object, "member", Access::read, index_entries, device_type)),
          unit(required(unit_object, "unit", unit_access, index_entries, device_type)),
          bitmap(required(bitmap_object, "bitmap", unit_access == Access::read ? Access::write : Access::read,
                          byte_entries, device_type)) {
        check_entries(bitmap, bitmap_bytes(member.entries), "it must have one bit for each member");
        refuse_overlap({&member, &unit, &bitmap});
    }
};

[[noreturn]] inline void refuse_units() {
    refuse("unit does not ascend, or has one that is no member of the partition");
}

[[noreturn]] inline void refuse_bitmap(std::size_t count) {
    refuse("bitmap has not " + number(count) + " bits set, or has one beyond the last member");
}

}  // namespace atoll_kernels
