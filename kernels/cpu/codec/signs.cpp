#include "signs.hpp"

#include <algorithm>
#include <cstring>

#include "../processor/thread_pool.hpp"

namespace atoll_kernels {
namespace {

constexpr std::size_t lanes = 32;

struct Means {
    float above, below;  // magnitudes
};

double folded(double* sums) {
    for (std::size_t half = lanes / 2; half > 0; half /= 2) {
        for (std::size_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
    }
    return sums[0];
}

// Eight entries at a time; what is left of a block goes one by one.
constexpr std::size_t vector_entries = 8;
typedef float Float8 __attribute__((vector_size(32)));
typedef double Double8 __attribute__((vector_size(64)));
typedef std::int32_t Int8 __attribute__((vector_size(32)));

constexpr Int8 bit_of{1, 2, 4, 8, 16, 32, 64, 128};

ATOLL_INLINE void load(Float8& value, const float* at) { std::memcpy(&value, at, sizeof value); }
ATOLL_INLINE void store(float* at, const Float8& value) { std::memcpy(at, &value, sizeof value); }

ATOLL_INLINE Means means_of(const float* values, std::size_t n, bool two_sided) {
    constexpr std::size_t vectors = lanes / vector_entries;
    Double8 above[vectors] = {}, below[vectors] = {};
    Int8 minus_count = {};
    const Float8 zero = {};
    std::size_t i = 0;
    for (; i + lanes <= n; i += lanes) {
        for (std::size_t k = 0; k < vectors; ++k) {
            Float8 value;
            load(value, values + i + k * vector_entries);
            const Int8 minus = value < zero;
            minus_count -= minus;  // which is -1
            above[k] += __builtin_convertvector(minus ? zero : value, Double8);
            below[k] -= __builtin_convertvector(minus ? value : zero, Double8);
        }
    }
    std::size_t negative = 0;
    for (std::size_t at = 0; at < vector_entries; ++at) negative += static_cast<std::size_t>(minus_count[at]);
    for (std::size_t lane = 0; i < n; ++i, ++lane) {
        const bool minus = values[i] < 0;
        above[lane / vector_entries][lane % vector_entries] += minus ? 0.0F : values[i];
        below[lane / vector_entries][lane % vector_entries] -= minus ? values[i] : 0.0F;
        negative += minus;
    }
    double sums[2][lanes];
    std::memcpy(sums[0], above, sizeof above);
    std::memcpy(sums[1], below, sizeof below);
    const double up = folded(sums[0]), down = folded(sums[1]);
    if (!two_sided) {
        const auto mean = static_cast<float>((up + down) / static_cast<double>(n));
        return {mean, mean};
    }
    const std::size_t positive = n - negative;
    return {positive == 0 ? 0.0F : static_cast<float>(up / static_cast<double>(positive)),
            negative == 0 ? 0.0F : static_cast<float>(down / static_cast<double>(negative))};
}

// One block: its bits begin on a byte.
ATOLL_INLINE void encode_block(float* values, std::size_t n, std::uint8_t* bits, const Means& means) {
    const Float8 zero = {}, above = zero + means.above, below = zero - means.below;
    std::size_t i = 0;
    for (; i + vector_entries <= n; i += vector_entries) {
        Float8 value;
        load(value, values + i);
        const Int8 minus = value < zero, set = minus & bit_of;
        store(values + i, value - (minus ? below : above));
        std::int32_t packed = 0;
        for (std::size_t bit = 0; bit < vector_entries; ++bit) packed |= set[bit];
        bits[i / 8] = static_cast<std::uint8_t>(packed);
    }
    if (i == n) return;
    unsigned packed = 0;
    for (std::size_t at = i; at < n; ++at) {
        const bool minus = values[at] < 0;
        packed |= static_cast<unsigned>(minus) << (at - i);
        values[at] -= minus ? -means.below : means.above;
    }
    bits[i / 8] = static_cast<std::uint8_t>(packed);
}

ATOLL_INLINE void add_block(float* out, std::size_t n, const std::uint8_t* bits, const Means& means) {
    const Float8 zero = {}, above = zero + means.above, below = zero - means.below;
    std::size_t i = 0;
    for (; i + vector_entries <= n; i += vector_entries) {
        Float8 sum;
        load(sum, out + i);
        const Int8 set = (Int8{} + static_cast<std::int32_t>(bits[i / 8])) & bit_of;
        store(out + i, sum + (set != 0 ? below : above));
    }
    for (; i < n; ++i) out[i] += (bits[i / 8] >> (i % 8) & 1) != 0 ? -means.below : means.above;
}

ATOLL_INLINE Means encode_whole_block(float* values, std::size_t n, bool two_sided, std::uint8_t* bits) {
    const Means means = means_of(values, n, two_sided);
    encode_block(values, n, bits, means);
    return means;
}

template <typename Each>
void for_each_block(std::size_t n, int threads, const Each& each) {
    auto work = [&](std::size_t chunk) {
        const std::size_t end = std::min(n, (chunk + 1) * chunk_entries);
        for (std::size_t begin = chunk * chunk_entries; begin < end; begin += sign_block)
            each(begin, std::min(sign_block, end - begin));
    };
    static_assert(chunk_entries % sign_block == 0);
    for_each_chunk(chunk_count(n), threads, work);
}

}  // namespace

void sign_encode(float* values, std::size_t n, const SignCode& code, int threads, Path path) {
    const std::size_t width = code.two_sided ? 2 : 1;
    for_each_block(n, threads, [&](std::size_t begin, std::size_t size) {
        const Means means =
            run_on<encode_whole_block>(path, values + begin, size, code.two_sided, code.bits + begin / 8);
        float* const scale = code.scales + begin / sign_block * width;
        scale[0] = means.above;
        if (code.two_sided) scale[1] = means.below;
    });
}

void sign_add(const SignCode& code, float* out, std::size_t n, int threads, Path path) {
    const std::size_t width = code.two_sided ? 2 : 1;
    for_each_block(n, threads, [&](std::size_t begin, std::size_t size) {
        const float* const scale = code.scales + begin / sign_block * width;
        run_on<add_block>(path, out + begin, size, code.bits + begin / 8, Means{scale[0], scale[width - 1]});
    });
}

}  // namespace atoll_kernels
