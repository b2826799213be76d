#include "digest.hpp"

#include <bit>
#include <cstring>

#include "../../cpu/select/compress.hpp"

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

namespace atoll_kernels {
namespace {

constexpr std::size_t lanes = block_entries * sizeof(float) / sizeof(std::uint64_t);
constexpr std::uint64_t odd = 0x9e3779b97f4a7c15ULL;

struct Lanes {
    std::uint64_t state[lanes];

    // Each lane's step is a bijection of its state for any word: a difference never disappears again.
    void take(const float* block) {
        for (std::size_t lane = 0; lane < lanes; ++lane) {
            std::uint64_t word;
            std::memcpy(&word, block + 2 * lane, sizeof word);
            state[lane] = std::rotl(state[lane] ^ word, 29) * odd;
        }
    }
};

std::uint64_t mixed(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

}  // namespace

std::uint64_t digest(const float* x, std::size_t n) {
    Lanes all;
    for (std::size_t lane = 0; lane < lanes; ++lane) all.state[lane] = (lane + 1) * odd;
    const std::size_t whole = n / block_entries * block_entries;
    for (std::size_t begin = 0; begin < whole; begin += block_entries) all.take(x + begin);
    if (whole < n) {
        float tail[block_entries] = {};
        std::memcpy(tail, x + whole, (n - whole) * sizeof(float));
        all.take(tail);
    }
    std::uint64_t sum = mixed(n);
    for (const std::uint64_t state : all.state) sum = mixed(sum ^ state) * odd;
    return mixed(sum);
}

}  // namespace atoll_kernels
