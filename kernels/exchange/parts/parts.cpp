#include "parts.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "../../cpu/select/compress.hpp"

namespace atoll_kernels {

Part::Part(std::size_t blocks)
    : index(std::make_unique_for_overwrite<std::uint32_t[]>(blocks)),
      values(std::make_unique_for_overwrite<float[]>(blocks * block_entries)),
      count(blocks) {}

std::size_t Format::blocks() const { return block_count(layout.entries); }

SharedPayload copied(const unsigned char* data, std::size_t bytes) {
    Payload payload{std::make_unique_for_overwrite<unsigned char[]>(bytes), bytes};
    if (bytes != 0) std::memcpy(payload.data.get(), data, bytes);
    return std::make_shared<const Payload>(std::move(payload));
}

SharedPart copied(const Units& units) {
    Part part(units.count);
    std::copy_n(units.index, units.count, part.index.get());
    std::copy_n(units.values, units.count * block_entries, part.values.get());
    return std::make_shared<const Part>(std::move(part));
}

EncodedPart encode_part(const Format& format, const Units& units, float* residual, Scratch& scratch) {
    unsigned char* const out = scratch.bytes.of(largest_payload(format.layout, units.count));
    const std::size_t bytes = encode(format.layout, units, out, residual);
    SharedPayload payload = copied(out, bytes);
    if (format.layout.values == WireValues::float32) return {copied(units), std::move(payload)};
    Part part;
    read(format, *payload, units.count, part);  // nothing can be wrong with what was just written
    return {std::make_shared<const Part>(std::move(part)), std::move(payload)};
}

const char* read(const Format& format, const Payload& payload, std::size_t count, Part& part) {
    part = Part(count);
    const std::size_t blocks = format.blocks();
    if (format.layout.indices == IndexFormat::none) random_blocks(format.seed, blocks, count, part.index.get());
    const char* const wrong =
        decode(format.layout, payload.data.get(), payload.bytes, count, part.index.get(), part.values.get());
    if (wrong != nullptr) return wrong;
    const std::size_t beyond = blocks * block_entries - format.layout.entries;
    if (beyond != 0 && count != 0 && part.index[count - 1] == blocks - 1)
        std::fill_n(part.values.get() + count * block_entries - beyond, beyond, 0.0F);
    return nullptr;
}

Units sum_of(const std::vector<SharedPart>& inputs, Scratch& scratch) {
    std::vector<Units> units;
    units.reserve(inputs.size());
    for (const SharedPart& input : inputs) units.push_back(input->units());
    const std::size_t count = count_union(units.data(), units.size(), 1), entries = count * block_entries;
    std::uint32_t* const index = scratch.index.of(count);
    float* const values = scratch.values.of(entries);
    sum_units(units.data(), units.size(), index, values, 1);
    if (!all_finite(values, entries)) {
        constexpr float largest = std::numeric_limits<float>::max();
        for (std::size_t i = 0; i < entries; ++i) values[i] = std::clamp(values[i], -largest, largest);
    }
    return {index, values, count};
}

void add_to(float* to, std::size_t entries, const Units& units) {
    for (std::size_t k = 0; k < units.count; ++k) {
        const std::size_t begin = units.index[k] * block_entries, end = std::min(entries, begin + block_entries);
        for (std::size_t i = begin; i < end; ++i) to[i] += units.values[k * block_entries + i - begin];
    }
}

Part plus(const Units& a, const Units& b, float factor) {
    const Units both[] = {a, b};
    Part sum(count_union(both, 2, 1));
    std::size_t at_a = 0, at_b = 0;
    for (std::size_t k = 0; k < sum.count; ++k) {
        const bool has_a = at_a < a.count && (at_b == b.count || a.index[at_a] <= b.index[at_b]);
        const bool has_b = at_b < b.count && (at_a == a.count || b.index[at_b] <= a.index[at_a]);
        float* const values = sum.values.get() + k * block_entries;
        sum.index[k] = has_a ? a.index[at_a] : b.index[at_b];
        if (has_a) {
            std::copy_n(a.values + at_a++ * block_entries, block_entries, values);
        } else {
            std::fill_n(values, block_entries, 0.0F);
        }
        if (!has_b) continue;
        const float* const more = b.values + at_b++ * block_entries;
        for (std::size_t i = 0; i < block_entries; ++i) values[i] += factor * more[i];
    }
    return sum;
}

Part minus(const Units& a, const Units& b) {
    Part difference(a.count);
    std::copy_n(a.index, a.count, difference.index.get());
    for (std::size_t i = 0; i < a.count * block_entries; ++i) difference.values[i] = a.values[i] - b.values[i];
    return difference;
}

}  // namespace atoll_kernels
