#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../../bindings/gil.hpp"
#include "../../bindings/loaded.hpp"
#include "../hashing/hash_bitmap.hpp"
#include "../hashing/hierarchical_hash.hpp"
#include "../units/distinct_rows.hpp"
#include "../units/unit_sum.hpp"
#include "call_options.hpp"
#include "modules.hpp"

namespace atoll_kernels {
namespace {

using namespace nb::literals;

HashSeeds checked_seeds(const std::vector<std::uint32_t>& seeds) {
    if (seeds.size() != hash_tries + 1)
        refuse("seeds has " + number(seeds.size()) + " numbers; pass h0's and those of the " + number(hash_tries) +
               " that choose a slot");
    HashSeeds checked{seeds[0], {}};
    for (unsigned i = 0; i < hash_tries; ++i) checked.slot[i] = seeds[i + 1];
    return checked;
}

void check_partitions(std::size_t partitions) {
    if (partitions < 1 || partitions > max_partitions)
        refuse("partitions = " + number(partitions) + " is not in 1.." + number(max_partitions));
}

// The arguments of both directions of the hash bitmap.
struct BitmapCall {
    Loaded member, unit, bitmap;

    BitmapCall(nb::handle member_object, nb::handle unit_object, nb::handle bitmap_object, Access unit_access)
        : member(required(member_object, "member", Access::read, index_entries)),
          unit(required(unit_object, "unit", unit_access, index_entries)),
          bitmap(required(bitmap_object, "bitmap", unit_access == Access::read ? Access::write : Access::read,
                          byte_entries)) {
        check_entries(bitmap, bitmap_bytes(member.entries), "it must have one bit for each member");
        refuse_overlap({&member, &unit, &bitmap});
    }
};

// slots: 0 for those of the published algorithm.
nb::tuple hash_units(nb::handle unit_object, const std::vector<std::uint32_t>& seed_list, std::size_t partitions,
                     nb::handle order_object, std::size_t slots, int threads) {
    const int checked = checked_threads(threads);
    const Loaded unit = required(unit_object, "unit", Access::read, index_entries);
    const Loaded order = required(order_object, "order", Access::write, index_entries);
    const HashSeeds seeds = checked_seeds(seed_list);
    check_partitions(partitions);
    if (slots == 0) slots = std::max<std::size_t>(1, parallel_slots(unit.entries, partitions));
    check_entries(order, unit.entries, "it must be as long as unit");
    if (unit.entries >= UINT32_MAX || slots > UINT32_MAX)
        refuse("unit has " + number(unit.entries) + " entries, more than 32 bits count; split it");
    refuse_overlap({&unit, &order});
    const Partitioned result = without_gil(unit.entries, [&] {
        return hierarchical_hash(unit.as<std::uint32_t>(), unit.entries, seeds, partitions, slots, checked,
                                 order.as<std::uint32_t>());
    });
    return nb::make_tuple(result.bounds, result.serial);
}

std::vector<std::uint64_t> fill_members(std::uint32_t seed, std::size_t partitions, nb::handle member_object) {
    const Loaded member = required(member_object, "member", Access::write, index_entries);
    check_partitions(partitions);
    const GilReleased released(member.entries);
    return partition_members(member.entries, seed, partitions, member.as<std::uint32_t>());
}

void encode_bitmap(nb::handle member, nb::handle unit, nb::handle bitmap) {
    const BitmapCall call(member, unit, bitmap, Access::read);
    const bool all = without_gil(call.member.entries, [&] {
        return bitmap_encode(call.member.as<std::uint32_t>(), call.member.entries, call.unit.as<std::uint32_t>(),
                             call.unit.entries, call.bitmap.as<std::uint8_t>());
    });
    if (!all) refuse("unit does not ascend, or has one that is no member of the partition");
}

void decode_bitmap(nb::handle member, nb::handle bitmap, nb::handle unit) {
    const BitmapCall call(member, unit, bitmap, Access::write);
    const bool all = without_gil(call.member.entries, [&] {
        return bitmap_decode(call.member.as<std::uint32_t>(), call.member.entries, call.bitmap.as<std::uint8_t>(),
                             call.unit.as<std::uint32_t>(), call.unit.entries);
    });
    if (!all) refuse("bitmap has not " + number(call.unit.entries) + " bits set, or has one beyond the last member");
}

template <typename T>
nb::object as_array(std::unique_ptr<T[]> data, std::initializer_list<std::size_t> shape) {
    T* const raw = data.release();
    const nb::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return nb::ndarray<nb::numpy, T>(raw, shape, owner).cast();
}

[[noreturn]] void refuse_flaw(const CheckedSum& result, const UnitRange& range, std::uint32_t partition) {
    const std::string unit = "terms[" + number(result.which) + "] has unit " + number(result.unit);
    switch (result.flaw) {
        case UnitFlaw::outside: refuse(unit + ", beyond the last of " + number(range.units));
        case UnitFlaw::foreign: refuse(unit + ", which is not of partition " + number(partition));
        default: refuse(unit + " twice");
    }
}

nb::tuple sum_units_of(nb::handle terms, std::size_t units, std::size_t width, std::uint32_t seed,
                       std::uint32_t partitions, const std::vector<std::uint32_t>& partition_of_term, int threads) {
    const int checked = checked_threads(threads);
    if (width < 1) refuse("width = 0 is no unit; pass 1 for single entries");
    if (units > std::size_t{1} << 32) refuse("units = " + number(units) + " is beyond numbers of 32 bits");
    if (partitions != 0 && partition_of_term.size() != nb::len(terms))
        refuse("partition has " + number(partition_of_term.size()) + " entries; pass one for each term");
    std::vector<Loaded> loaded;
    std::vector<Coordinates> coordinates;
    std::size_t entries = units / 64;
    for (std::size_t t = 0; t < nb::len(terms); ++t) {
        const nb::object unit = terms[t][0], values = terms[t][1];
        const std::string name = "terms[" + number(t) + "]";
        const Loaded& u = loaded.emplace_back(required(unit, name.c_str(), Access::read, index_entries));
        const auto* const first = u.as<std::uint32_t>();
        const std::size_t count = u.entries;
        const Loaded& v = loaded.emplace_back(required(values, name.c_str(), Access::read));
        check_entries(v, count * width, "it must hold the values of every unit");
        coordinates.push_back({first, v.data, count, partitions != 0 ? partition_of_term[t] : 0});
        entries += v.entries;
    }
    const UnitRange range{units, seed, partitions};
    CheckedSum result = without_gil(entries, [&] { return sum_coordinates(coordinates, range, width, checked); });
    if (result.flaw != UnitFlaw::none) refuse_flaw(result, range, coordinates[result.which].partition);
    const std::size_t count = result.sum.count;
    return nb::make_tuple(as_array(std::move(result.sum.unit), {count}),
                          as_array(std::move(result.sum.values), {count, width}));
}

nb::object find_nonzero_units(nb::handle dense_object, std::size_t width, int threads) {
    const int checked = checked_threads(threads);
    const Loaded dense = required(dense_object, "dense", Access::read);
    if (width < 1 || dense.entries % width != 0)
        refuse("dense has " + number(dense.entries) + " entries, which is no number of units of " + number(width));
    if (dense.entries / width > std::size_t{1} << 32)
        refuse("dense has " + number(dense.entries / width) + " units, beyond numbers of 32 bits");
    const std::vector<std::uint32_t> found = without_gil(
        dense.entries, [&] { return nonzero_units(dense.data, dense.entries / width, width, checked); });
    auto data = std::make_unique_for_overwrite<std::uint32_t[]>(found.size());
    if (!found.empty()) std::memcpy(data.get(), found.data(), found.size() * sizeof(std::uint32_t));
    return as_array(std::move(data), {found.size()});
}

std::size_t find_distinct_rows(nb::handle values_object, std::size_t width, nb::handle reference_object,
                               nb::handle first_object) {
    const Loaded values = required(values_object, "values", Access::read);
    const Loaded reference = required(reference_object, "reference", Access::write, index_entries);
    const Loaded first = required(first_object, "first", Access::write, index_entries);
    if (width < 1) refuse("width = 0 is no row; pass 1 for single entries");
    if (reference.entries >= UINT32_MAX) refuse("there are " + number(reference.entries) + " rows; split them");
    check_entries(values, reference.entries * width, "it must hold the values of every row");
    check_entries(first, reference.entries, "it must be as long as reference");
    refuse_overlap({&values, &reference, &first});
    const GilReleased released(values.entries);
    return distinct_rows(values.data, reference.entries, width, reference.as<std::uint32_t>(),
                         first.as<std::uint32_t>());
}

}  // namespace

void bind_units(nb::module_& m) {
    m.def("hierarchical_hash", hash_units, "unit"_a.none(), "seeds"_a, "partitions"_a, "order"_a.none(), "slots"_a = 0,
          "threads"_a = 0);
    m.def("partition_members", fill_members, "seed"_a, "partitions"_a, "member"_a.none());
    m.def("bitmap_encode", encode_bitmap, "member"_a.none(), "unit"_a.none(), "bitmap"_a.none());
    m.def("bitmap_decode", decode_bitmap, "member"_a.none(), "bitmap"_a.none(), "unit"_a.none());
    m.def("sum_coordinates", sum_units_of, "terms"_a, "units"_a, "width"_a, "seed"_a = 0, "partitions"_a = 0,
          "partition"_a = std::vector<std::uint32_t>(), "threads"_a = 0);
    m.def("distinct_rows", find_distinct_rows, "values"_a.none(), "width"_a, "reference"_a.none(), "first"_a.none());
    m.def("nonzero_units", find_nonzero_units, "dense"_a.none(), "width"_a, "threads"_a = 0);
}

}  // namespace atoll_kernels
