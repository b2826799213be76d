#pragma once

#include <cstddef>
#include <cstdint>

// The hash bitmap: which of a partition's units are there, one bit for each, in the order of `partition_members`.
//
// Source: Zen (Wang et al., 2023), Algorithm 3.3. All partitions' bitmaps together have one bit a unit (Theorem 3.3).
namespace atoll_kernels {

inline std::size_t bitmap_bytes(std::size_t members) { return (members + 7) / 8; }

// bitmap: bit i of byte j stands for member[8 j + i]. Returns whether every unit is a member.
//   member: uint32 [members], ascending; unit: uint32 [count], ascending; bitmap: [bitmap_bytes(members)], overwritten
bool bitmap_encode(const std::uint32_t* member, std::size_t members, const std::uint32_t* unit, std::size_t count,
                   std::uint8_t* bitmap);

// The units whose bits are set, ascending. Returns whether there are exactly `count` of them, none beyond the members.
//   unit: uint32 [count], overwritten
bool bitmap_decode(const std::uint32_t* member, std::size_t members, const std::uint8_t* bitmap, std::uint32_t* unit,
                   std::size_t count);

}  // namespace atoll_kernels
