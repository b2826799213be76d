#include "squared_norm.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "../processor/thread_pool.hpp"

namespace atoll_kernels {
namespace {

// A chunk is read as two streams side by side: one sequential stream keeps too few cache lines in flight to use all the
// bandwidth one core can have. Four were slower than two wherever it was measured: docs/performance.md, Kernels.
constexpr std::size_t streams = 2;
constexpr std::size_t vectors = 4;          // a stream advances by so many at a time, so that additions overlap
constexpr std::size_t width = vectors * 4;  // entries
constexpr std::size_t lanes = streams * width;

typedef float Float4 __attribute__((vector_size(16)));
typedef double Double4 __attribute__((vector_size(32)));

ATOLL_INLINE void add_squares(Double4& sum, const float* at) {
    Float4 narrow;
    std::memcpy(&narrow, at, sizeof narrow);
    const Double4 wide = __builtin_convertvector(narrow, Double4);
    sum += wide * wide;
}

ATOLL_INLINE double sum_chunk(const float* x, std::size_t n) {
    const std::size_t stride = n / streams / width * width;
    Double4 sums[streams][vectors] = {};
    for (std::size_t i = 0; i < stride; i += width) {
        for (std::size_t s = 0; s < streams; ++s) {
            for (std::size_t v = 0; v < vectors; ++v) add_squares(sums[s][v], x + s * stride + i + 4 * v);
        }
    }
    double lane[lanes];
    std::memcpy(lane, sums, sizeof lane);
    const std::size_t rest = streams * stride;  // fewer than `lanes` entries are left: each has a lane of its own
    for (std::size_t i = rest; i < n; ++i) lane[i - rest] += static_cast<double>(x[i]) * x[i];
    for (std::size_t half = lanes / 2; half > 0; half /= 2) {
        for (std::size_t j = 0; j < half; ++j) lane[j] += lane[j + half];
    }
    return lane[0];
}

}  // namespace

double squared_norm(const float* x, std::size_t n, int threads, Path path) {
    if (n <= chunk_entries) return run_on<sum_chunk>(path, x, n);
    std::vector<double> partial(chunk_count(n));
    auto work = [&](std::size_t chunk) {
        const std::size_t begin = chunk * chunk_entries;
        partial[chunk] = run_on<sum_chunk>(path, x + begin, std::min(chunk_entries, n - begin));
    };
    for_each_chunk(partial.size(), threads, work);
    double total = 0;
    for (const double sum : partial) total += sum;
    return total;
}

}  // namespace atoll_kernels
