#include "wire_values.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "../processor/features.hpp"
#include "half.hpp"

namespace atoll_kernels {
namespace {

constexpr std::size_t lanes = 16;          // values that share a scale, and that are summed side by side
constexpr std::size_t group_values = 512;  // that share two magnitudes

std::size_t ceil_div(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

std::uint16_t load16(const unsigned char* in) {
    std::uint16_t bits;
    std::memcpy(&bits, in, sizeof bits);
    return bits;
}

void store16(std::uint16_t bits, unsigned char* out) { std::memcpy(out, &bits, sizeof bits); }

template <float largest, std::uint16_t narrow(float)>
void write_narrow(const float* values, std::size_t count, unsigned char* out) {
    for (std::size_t i = 0; i < count; ++i) store16(narrow(std::clamp(values[i], -largest, largest)), out + 2 * i);
}

template <float widen(std::uint16_t)>
void read_narrow(const unsigned char* in, std::size_t count, float* values) {
    for (std::size_t i = 0; i < count; ++i) values[i] = widen(load16(in + 2 * i));
}

// Largest magnitude of `count` <= 16 values as a scale of `steps` steps, so that steps * scale stays finite.
std::uint16_t scale_of(const float* values, std::size_t count, float steps) {
    float largest = 0;
    for (std::size_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(values[i]));
    return to_bfloat16(std::min(largest, 0x1.fcp127F) / steps);
}

int quantised(float value, float scale, int steps) {
    if (!(scale > 0)) return 0;
    const float ratio = value / scale;
    const int nearest = static_cast<int>(ratio + (ratio < 0 ? -0.5F : 0.5F));
    return std::clamp(nearest, -steps, steps);
}

template <int steps, typename Put>
void write_scaled(const float* values, std::size_t count, unsigned char* scales, const Put& put) {
    for (std::size_t begin = 0; begin < count; begin += lanes, scales += 2) {
        const std::size_t n = std::min(lanes, count - begin);
        const std::uint16_t bits = scale_of(values + begin, n, steps);
        store16(bits, scales);
        int all[lanes] = {};
        for (std::size_t i = 0; i < n; ++i) all[i] = quantised(values[begin + i], from_bfloat16(bits), steps);
        put(begin, n, all);
    }
}

void write_int8(const float* values, std::size_t count, unsigned char* out) {
    unsigned char* const to = out + 2 * ceil_div(count, lanes);
    write_scaled<127>(values, count, out, [to](std::size_t begin, std::size_t n, const int* all) {
        for (std::size_t i = 0; i < n; ++i) to[begin + i] = static_cast<unsigned char>(all[i]);
    });
}

void read_int8(const unsigned char* in, std::size_t count, float* values) {
    const unsigned char* const from = in + 2 * ceil_div(count, lanes);
    for (std::size_t i = 0; i < count; ++i)
        values[i] = static_cast<float>(static_cast<signed char>(from[i])) * from_bfloat16(load16(in + i / lanes * 2));
}

void write_int4(const float* values, std::size_t count, unsigned char* out) {
    unsigned char* const to = out + 2 * ceil_div(count, lanes);
    write_scaled<7>(values, count, out, [to](std::size_t begin, std::size_t n, const int* all) {
        for (std::size_t i = 0; i < n; i += 2) {
            const int high = i + 1 < n ? all[i + 1] : 0;
            to[(begin + i) / 2] = static_cast<unsigned char>((all[i] + 8) | (high + 8) << 4);
        }
    });
}

void read_int4(const unsigned char* in, std::size_t count, float* values) {
    const unsigned char* const from = in + 2 * ceil_div(count, lanes);
    for (std::size_t i = 0; i < count; ++i) {
        const int steps = (from[i / 2] >> (i % 2 * 4) & 0xf) - 8;
        values[i] = static_cast<float>(steps) * from_bfloat16(load16(in + i / lanes * 2));
    }
}

struct Levels {
    float low, high;
};

// Means of the magnitudes up to `limit` and above it; of no magnitude the other mean.
ATOLL_INLINE Levels means_around(const float* values, std::size_t count, float limit) {
    float low[lanes] = {}, high[lanes] = {}, above[lanes] = {};
    std::size_t begin = 0;
    for (; begin + lanes <= count; begin += lanes) {
        for (std::size_t lane = 0; lane < lanes; ++lane) {
            const float size = std::fabs(values[begin + lane]);
            const float is_high = size > limit ? 1.0F : 0.0F;  // factors, not branches: which it is, nobody can guess
            high[lane] += size * is_high;
            low[lane] += size * (1 - is_high);
            above[lane] += is_high;
        }
    }
    for (std::size_t i = begin; i < count; ++i) {
        const float size = std::fabs(values[i]);
        (size > limit ? high : low)[i - begin] += size;
        above[i - begin] += size > limit ? 1.0F : 0.0F;
    }
    double of_low = 0, of_high = 0, is_above = 0;
    for (std::size_t lane = 0; lane < lanes; ++lane) {
        of_low += static_cast<double>(low[lane]);
        of_high += static_cast<double>(high[lane]);
        is_above += static_cast<double>(above[lane]);
    }
    const double is_below = static_cast<double>(count) - is_above;
    const double mean_high = is_above > 0 ? of_high / is_above : of_low / is_below;
    const double mean_low = is_below > 0 ? of_low / is_below : mean_high;
    constexpr double largest = largest_bfloat16;
    return {static_cast<float>(std::min(mean_low, largest)), static_cast<float>(std::min(mean_high, largest))};
}

ATOLL_INLINE Levels levels_of(const float* values, std::size_t count) {
    Levels levels = means_around(values, count, std::numeric_limits<float>::max());  // low: the mean of all
    levels.high = levels.low;
    for (int step = 0; step < 2; ++step) levels = means_around(values, count, levels.low / 2 + levels.high / 2);
    return levels;
}

// Two bits for each of 16 values, into 4 bytes.
ATOLL_INLINE void put_codes(const float* values, float limit, unsigned char* out) {
    std::uint32_t codes[lanes];
    for (std::size_t lane = 0; lane < lanes; ++lane)
        codes[lane] = 2 * std::uint32_t{values[lane] < 0} + std::uint32_t{std::fabs(values[lane]) > limit};
    for (std::size_t byte = 0; byte < lanes / 4; ++byte) {
        const std::uint32_t* const four = codes + 4 * byte;
        out[byte] = static_cast<unsigned char>(four[0] | four[1] << 2 | four[2] << 4 | four[3] << 6);
    }
}

ATOLL_INLINE void write_int2(const float* values, std::size_t count, unsigned char* out) {
    unsigned char* to = out + 4 * ceil_div(count, group_values);
    for (std::size_t begin = 0; begin < count; begin += group_values, out += 4) {
        const std::size_t n = std::min(group_values, count - begin);
        const Levels levels = levels_of(values + begin, n);
        store16(to_bfloat16(levels.low), out);
        store16(to_bfloat16(levels.high), out + 2);
        const float limit = levels.low / 2 + levels.high / 2;
        std::size_t at = begin;
        for (; at + lanes <= begin + n; at += lanes, to += lanes / 4) put_codes(values + at, limit, to);
        if (at == begin + n) continue;
        float rest[lanes] = {};  // 0: code 0
        std::copy(values + at, values + begin + n, rest);
        unsigned char codes[lanes / 4];
        put_codes(rest, limit, codes);
        std::memcpy(to, codes, ceil_div(begin + n - at, 4));
    }
}

void read_int2(const unsigned char* in, std::size_t count, float* values) {
    const unsigned char* const from = in + 4 * ceil_div(count, group_values);
    for (std::size_t begin = 0; begin < count; begin += group_values, in += 4) {
        const std::size_t n = std::min(group_values, count - begin);
        const float low = from_bfloat16(load16(in)), high = from_bfloat16(load16(in + 2));
        const float table[4] = {low, high, -low, -high};
        for (std::size_t i = 0; i < n; ++i) values[begin + i] = table[from[(begin + i) / 4] >> (i % 4 * 2) & 3];
    }
}

}  // namespace

std::size_t wire_bytes(WireValues format, std::size_t count) {
    switch (format) {
        case WireValues::float32: return 4 * count;
        case WireValues::float16:
        case WireValues::bfloat16: return 2 * count;
        case WireValues::int8: return count + 2 * ceil_div(count, lanes);
        case WireValues::int4: return ceil_div(count, 2) + 2 * ceil_div(count, lanes);
        case WireValues::int2: break;
    }
    return ceil_div(count, 4) + 4 * ceil_div(count, group_values);
}

void write_values(WireValues format, const float* values, std::size_t count, unsigned char* out) {
    if (count == 0) return;
    switch (format) {
        case WireValues::float32: std::memcpy(out, values, count * sizeof(float)); break;
        case WireValues::float16: write_narrow<largest_float16, to_float16>(values, count, out); break;
        case WireValues::bfloat16: write_narrow<largest_bfloat16, to_bfloat16>(values, count, out); break;
        case WireValues::int8: write_int8(values, count, out); break;
        case WireValues::int4: write_int4(values, count, out); break;
        case WireValues::int2: run_on<write_int2>(best_path(), values, count, out); break;
    }
}

void read_values(WireValues format, const unsigned char* in, std::size_t count, float* values) {
    if (count == 0) return;
    switch (format) {
        case WireValues::float32: std::memcpy(values, in, count * sizeof(float)); break;
        case WireValues::float16: read_narrow<from_float16>(in, count, values); break;
        case WireValues::bfloat16: read_narrow<from_bfloat16>(in, count, values); break;
        case WireValues::int8: read_int8(in, count, values); break;
        case WireValues::int4: read_int4(in, count, values); break;
        case WireValues::int2: read_int2(in, count, values); break;
    }
}

}  // namespace atoll_kernels
