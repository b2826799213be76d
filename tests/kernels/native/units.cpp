// Hierarchical hashing, the hash bitmap and sums in coordinate form for driver.cpp: exact allocations, units that many
// threads place at once into memory that is too small, and every thread count the same sums.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <numeric>
#include <random>
#include <vector>

#include "../../../kernels/cpu/hashing/hash_bitmap.hpp"
#include "../../../kernels/cpu/hashing/hierarchical_hash.hpp"
#include "../../../kernels/cpu/hashing/murmur3.hpp"
#include "../../../kernels/cpu/units/distinct_rows.hpp"
#include "../../../kernels/cpu/units/unit_sum.hpp"

using namespace atoll_kernels;

void check_units();

namespace {

using Units = std::vector<std::uint32_t>;

constexpr HashSeeds seeds{0x9747b28cu, {17, 4294967295u, 0}};

void expect(bool holds, const char* what, std::size_t n) {
    if (holds) return;
    std::fprintf(stderr, "FAILED: %s (n = %zu)\n", what, n);
    std::_Exit(1);
}

// `count` of these, in their order.
Units some_of(const Units& all, std::size_t count, std::uint32_t seed) {
    Units chosen;
    chosen.reserve(count);
    std::mt19937 generator(seed);
    std::sample(all.begin(), all.end(), std::back_inserter(chosen), count, generator);
    return chosen;
}

Units below(std::size_t units) {
    Units all(units);
    std::iota(all.begin(), all.end(), 0u);
    return all;
}

void check_partitions(const Units& unit, const Units& order, const Partitioned& found) {
    const std::size_t count = unit.size(), partitions = found.bounds.size() - 1;
    expect(found.bounds.front() == 0 && found.bounds.back() == count, "bounds are wrong", count);
    Units sorted = order;
    std::sort(sorted.begin(), sorted.end());
    expect(sorted == below(count), "a unit was lost", count);
    for (std::size_t p = 0; p < partitions; ++p) {
        for (std::uint64_t at = found.bounds[p]; at < found.bounds[p + 1]; ++at) {
            const auto home = partition_of(unit[order[at]], seeds.partition, static_cast<std::uint32_t>(partitions));
            expect(home == p, "a unit is in another partition", count);
        }
    }
}

void check_hashing(std::size_t count) {
    const Units unit = some_of(below(3 * count + 1), count, 1);
    Units order(count);
    for (const std::size_t partitions : {std::size_t{1}, std::size_t{3}, std::size_t{16}}) {
        for (const std::size_t slots : {std::size_t{1}, parallel_slots(count, partitions) + 1}) {
            for (const int threads : {1, 2, 5})
                check_partitions(unit, order,
                                 hierarchical_hash(unit.data(), count, seeds, partitions, slots, threads,
                                                   order.data()));
        }
    }
}

void check_bitmap(std::size_t units) {
    Units member(units);
    const std::vector<std::uint64_t> bounds = partition_members(units, seeds.partition, 3, member.data());
    for (std::size_t p = 0; p < 3; ++p) {
        const auto from = member.begin();
        const Units own(from + static_cast<std::ptrdiff_t>(bounds[p]), from + static_cast<std::ptrdiff_t>(bounds[p + 1]));
        const Units unit = some_of(own, own.size() / 2, 5);
        std::vector<std::uint8_t> bitmap(bitmap_bytes(own.size()));
        expect(bitmap_encode(own.data(), own.size(), unit.data(), unit.size(), bitmap.data()), "not encoded", units);
        Units again(unit.size()), fewer(unit.size() / 2);
        expect(bitmap_decode(own.data(), own.size(), bitmap.data(), again.data(), again.size()), "not decoded", units);
        expect(again == unit, "another set came back", units);
        expect(unit.empty() || !bitmap_decode(own.data(), own.size(), bitmap.data(), fewer.data(), fewer.size()),
               "a bitmap of more than there is room for was decoded", units);
    }
}

void check_sums(std::size_t count, std::size_t width) {
    std::mt19937 generator(7);
    std::vector<Units> unit;
    std::vector<std::vector<float>> values;
    for (std::uint32_t t = 0; t < 3; ++t) {
        unit.push_back(some_of(below(2 * count + 1), count, t));
        std::shuffle(unit.back().begin(), unit.back().end(), generator);
        values.emplace_back(count * width);
        for (float& one : values.back()) one = static_cast<float>(generator() % 1000) * 0.37F;
    }
    std::vector<Coordinates> terms;
    for (std::size_t t = 0; t < 3; ++t) terms.push_back({unit[t].data(), values[t].data(), count, 0});
    const UnitRange range{2 * count + 1, 0, 0};
    const CheckedSum expected = sum_coordinates(terms, range, width, 1);
    for (const int threads : {2, 5}) {
        const CheckedSum found = sum_coordinates(terms, range, width, threads);
        expect(found.flaw == UnitFlaw::none && found.sum.count == expected.sum.count, "another sum", count);
        const std::size_t bytes = found.sum.count * width * sizeof(float);
        expect(bytes == 0 || std::memcmp(found.sum.values.get(), expected.sum.values.get(), bytes) == 0, "other bits",
               count);
    }
}

void check_refusals() {
    const std::vector<float> values(2);
    const Units outside{9}, twice{3, 3};
    const UnitRange range{9, 0, 0}, split{9, seeds.partition, 2};
    expect(sum_coordinates({{outside.data(), values.data(), 1, 0}}, range, 1, 1).flaw == UnitFlaw::outside,
           "a unit outside was added", 1);
    expect(sum_coordinates({{twice.data(), values.data(), 2, 0}}, range, 1, 1).flaw == UnitFlaw::twice,
           "a unit was added twice", 2);
    const std::uint32_t other = 1 - partition_of(3, seeds.partition, 2);
    expect(sum_coordinates({{twice.data(), values.data(), 1, other}}, split, 1, 1).flaw == UnitFlaw::foreign,
           "a unit of another partition was added", 1);
}

void check_rows(std::size_t count, std::size_t width) {
    std::vector<float> values(count * width), dense(count * width);
    for (std::size_t k = 0; k < count; ++k) {
        for (std::size_t i = 0; i < width; ++i) values[k * width + i] = static_cast<float>(k % 37 + i);
        if (k % 3 == 0) dense[k * width + width - 1] = 1;
    }
    Units reference(count), first(count);
    const std::size_t found = distinct_rows(values.data(), count, width, reference.data(), first.data());
    expect(found == std::min<std::size_t>(count, 37), "another number of distinct rows", count);
    for (std::size_t k = 0; k < count; ++k) expect(first[reference[k]] == k % 37, "a row refers to another", count);
    expect(nonzero_units(dense.data(), count, width, 5).size() == (count + 2) / 3, "other units are not zero", count);
}

}  // namespace

void check_units() {
    for (const std::size_t n : {0, 1, 31, 33, 1025}) {
        check_hashing(n);
        check_bitmap(n);
        for (const std::size_t width : {1, 3, 64}) {
            check_sums(n, width);
            check_rows(n, width);
        }
    }
    check_hashing(100'000);
    check_sums(9000, 128);  // several chunks
    check_refusals();
}
