// The timeline, its search, fusion and the codec of signs for driver.cpp: random cases at every small size, against
// what slower code says of them.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "../../../kernels/cpu/codec/signs.hpp"
#include "../../../kernels/planning/fusion.hpp"
#include "../../../kernels/planning/search.hpp"
#include "../../../kernels/planning/timeline.hpp"

using namespace atoll_kernels;

void check_planning();

namespace {

void expect(bool holds, const char* what, std::size_t n) {
    if (holds) return;
    std::fprintf(stderr, "FAILED: %s (n = %zu)\n", what, n);
    std::_Exit(1);
}

std::vector<TensorWork> tensors_of(std::size_t n, std::mt19937& generator) {
    std::uniform_real_distribution<double> size(0, 50), seconds(0, 1);
    std::vector<TensorWork> tensors(n);
    for (TensorWork& one : tensors) one = {std::floor(size(generator)), seconds(generator)};
    return tensors;
}

// Nothing; a link; compressed on the device, a link, decompressed; the same on the processors.
std::vector<std::vector<Task>> options_of(std::mt19937& generator) {
    std::uniform_real_distribution<double> alpha(0, 0.5), beta(0, 0.05);
    const auto task = [&](std::size_t resource, double factor) {
        return Task{resource, alpha(generator), beta(generator), factor};
    };
    return {{}, {task(1, 1)}, {task(0, 1), task(1, 0.1), task(0, 1)}, {task(2, 1), task(1, 0.1), task(2, 1)}};
}

void check_timeline(std::size_t n, std::mt19937& generator) {
    const std::vector<TensorWork> tensors = tensors_of(n, generator);
    Timeline timeline(tensors, options_of(generator), 3);
    double backward_s = 0;
    for (const TensorWork& one : tensors) backward_s += one.backward_s;
    Choice choice(n);
    for (std::size_t at = 0; at < n; ++at) choice[at] = static_cast<std::uint16_t>(generator() % 4);
    const double end_s = timeline.end_s(choice);
    expect(end_s >= backward_s - 1e-9, "a timeline ends before its backward pass", n);
    expect(timeline.end_s(choice, end_s / 2) == Timeline::never || end_s == 0, "a limit is not kept", n);
    const Searched found = search(timeline, 20'000);
    expect(found.choice.size() == n && found.end_s <= end_s + 1e-9, "a search found less than a random choice", n);
    expect(std::fabs(timeline.end_s(found.choice) - found.end_s) < 1e-9, "a search says another end than it has", n);
}

// Groups one after the other, as fusion.hpp says.
double fused_s(const std::vector<TensorWork>& tensors, const std::vector<std::size_t>& ends, const Cost& compress,
               const Cost& communicate) {
    double computed_s = 0, sent_s = 0;
    std::size_t begin = 0;
    for (const std::size_t end : ends) {
        double bytes = 0;
        for (; begin < end; ++begin) {
            bytes += tensors[begin].bytes;
            computed_s += tensors[begin].backward_s;
        }
        computed_s += compress(bytes);
        sent_s = std::max(computed_s, sent_s) + communicate(bytes);
    }
    return sent_s;
}

void check_fusion(std::size_t n, std::mt19937& generator) {
    const std::vector<TensorWork> tensors = tensors_of(n, generator);
    std::uniform_real_distribution<double> alpha(0, 0.5), beta(0, 0.05);
    const Cost compress{alpha(generator), beta(generator), 20}, communicate{alpha(generator), beta(generator), 0};
    const Fused fused = fuse(tensors, compress, communicate);
    expect(!fused.ends.empty() && fused.ends.back() == n, "fusion left tensors out", n);
    expect(std::fabs(fused_s(tensors, fused.ends, compress, communicate) - fused.end_s) < 1e-9,
           "fusion says another end than it has", n);
    if (n > 10) return;
    for (std::size_t cuts = 0; cuts < std::size_t{1} << (n - 1); ++cuts) {
        std::vector<std::size_t> ends;
        for (std::size_t end = 1; end < n; ++end) {
            if ((cuts >> (end - 1) & 1) != 0) ends.push_back(end);
        }
        ends.push_back(n);
        expect(fused_s(tensors, ends, compress, communicate) >= fused.end_s - 1e-9, "another grouping is sooner", n);
    }
}

// Buffers of exactly what is needed, so that a write outside is seen.
void check_signs(std::size_t n, bool two_sided, std::mt19937& generator) {
    std::normal_distribution<float> normal;
    const std::size_t scales = sign_blocks(n) * (two_sided ? 2 : 1);
    const std::unique_ptr<float[]> values(new float[n]), given(new float[n]), out(new float[n]), again(new float[n]);
    const std::unique_ptr<float[]> scale(new float[scales]);
    const std::unique_ptr<std::uint8_t[]> bits(new std::uint8_t[sign_bytes(n)]);
    for (std::size_t i = 0; i < n; ++i) given[i] = normal(generator);
    for (const Path path : {Path::portable, best_path()}) {
        for (const int threads : {1, 3}) {
            std::copy_n(given.get(), n, values.get());
            std::fill_n(out.get(), n, 0.0F);
            const SignCode code{bits.get(), scale.get(), two_sided};
            sign_encode(values.get(), n, code, threads, path);
            sign_add(code, out.get(), n, threads, path);
            for (std::size_t i = 0; i < n; ++i)
                expect(std::fabs(out[i] + values[i] - given[i]) < 1e-5F, "signs lose something of the values", n);
            if (path == Path::portable && threads == 1) std::copy_n(out.get(), n, again.get());
            expect(n == 0 || std::memcmp(out.get(), again.get(), n * sizeof(float)) == 0, "signs' bits differ", n);
        }
    }
}

}  // namespace

void check_planning() {
    std::mt19937 generator(7);
    for (std::size_t n = 1; n <= 10; ++n) {
        for (int turn = 0; turn < 5; ++turn) {
            check_timeline(n, generator);
            check_fusion(n, generator);
        }
    }
    for (const std::size_t n : {40, 200}) {
        check_timeline(n, generator);
        check_fusion(n, generator);
    }
    for (const std::size_t n : {0, 1, 7, 8, 9, 31, 33, 1023, 1024, 1025, 300'001}) {
        check_signs(n, false, generator);
        check_signs(n, true, generator);
    }
}
