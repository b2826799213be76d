// Selection, block COO and the sparse optimizers for driver.cpp: exact allocations, every thread count the same bits.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "../../../kernels/cpu/codec/block_coo.hpp"
#include "../../../kernels/cpu/optimizer/sparse_optimizer.hpp"
#include "../../../kernels/cpu/processor/thread_pool.hpp"
#include "../../../kernels/cpu/select/compress.hpp"
#include "../../../kernels/cpu/select/difference.hpp"

using namespace atoll_kernels;

void check_sparse();

namespace {

void expect(bool holds, const char* what, std::size_t n) {
    if (holds) return;
    std::fprintf(stderr, "FAILED: %s (n = %zu)\n", what, n);
    std::_Exit(1);
}

using Floats = std::vector<float>;
using Indices = std::vector<std::uint32_t>;

bool same(const Floats& a, const Floats& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

Floats random_floats(std::size_t n, std::uint32_t seed) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    Floats x(n);
    for (float& value : x) value = normal(generator);
    return x;
}

struct Result {
    Selection selection;
    Floats residual, values;
    Indices index;
    bool operator==(const Result& other) const {
        return selection.chosen == other.selection.chosen && selection.found == other.selection.found &&
               selection.nonfinite == other.selection.nonfinite && same(residual, other.residual) &&
               same(values, other.values) && index == other.index;
    }
};

template <typename Select>
Result select(const Floats& gradient, bool feedback, std::size_t capacity, const Select& kernel) {
    Result result{{}, random_floats(gradient.size(), 9), Floats(capacity * block_entries), Indices(capacity)};
    const Source from{gradient.data(), feedback ? result.residual.data() : nullptr, 0.5F, gradient.size()};
    result.selection = kernel(from, Chosen{result.index.data(), result.values.data(), capacity});
    return result;
}

template <typename Kernel>
void check_selection(const Floats& gradient, std::size_t capacity, const Kernel& kernel) {
    for (const bool feedback : {false, true}) {
        const auto run = [&](int threads, Path path) {
            return select(gradient, feedback, capacity,
                          [&](const Source& from, const Chosen& to) { return kernel(from, to, threads, path); });
        };
        const Result expected = run(1, Path::portable);
        for (const int threads : {1, 2, 5})
            expect(run(threads, best_path()) == expected, "a selection differs", gradient.size());
    }
}

void check_selections(std::size_t n) {
    Floats gradient = random_floats(n, 1);
    if (n > 20) gradient[n / 2] = std::numeric_limits<float>::quiet_NaN();
    const std::size_t blocks = block_count(n);
    for (const std::size_t capacity : {std::size_t{0}, blocks / 3, blocks}) {
        check_selection(gradient, capacity,
                        [](const auto& from, const auto& to, int threads, Path path) {
                            return threshold_block(from, 12.0F, to, threads, path);
                        });
        check_selection(gradient, capacity, topk_block);
        check_selection(gradient, capacity,
                        [](const auto& from, const auto& to, int threads, Path path) {
                            return random_block(from, 7, to, threads, path);
                        });
    }
}

void check_difference(std::size_t n) {
    Floats shared_param = random_floats(n, 1);
    if (n > 20) shared_param[n / 2] = std::numeric_limits<float>::quiet_NaN();
    const Floats live = random_floats(n, 2);
    std::vector<std::uint16_t> narrow(n);
    for (std::size_t i = 0; i < n; ++i) narrow[i] = to_bfloat16(live[i]);
    const std::size_t blocks = block_count(n);
    for (const ValueFormat format : {ValueFormat::float32, ValueFormat::float16, ValueFormat::bfloat16}) {
        const void* const data = format == ValueFormat::float32 ? static_cast<const void*>(live.data()) : narrow.data();
        const Floats rounded_away = random_floats(n, 3);
        const float* const lost = format == ValueFormat::float32 ? nullptr : rounded_away.data();
        const Difference of{shared_param.data(), data, format, 0.5F, n, lost};
        for (const std::size_t capacity : {std::size_t{0}, blocks / 3, blocks}) {
            const auto run = [&](int threads, Path path) {
                Result result{{}, Floats(n), Floats(capacity * block_entries), Indices(capacity)};
                result.selection =
                    difference_block(of, 9.0F, {result.index.data(), result.values.data(), capacity}, threads, path);
                difference(of, result.residual.data(), path);
                return result;
            };
            const Result expected = run(1, Path::portable);
            for (const int threads : {1, 2, 5})
                expect(run(threads, best_path()) == expected, "a difference differs", n);
        }
    }
    Floats scores(blocks);
    difference_scores({shared_param.data(), narrow.data(), ValueFormat::bfloat16, 0.5F, n}, 3, blocks, scores.data());
}

void check_wire(std::size_t n) {
    const std::size_t blocks = block_count(n), count = (blocks + 1) / 2;
    Indices index(count), back(count);
    random_blocks(3, blocks, count, index.data());
    const Floats values = random_floats(count * block_entries, 4);
    for (const IndexFormat indices : {IndexFormat::none, IndexFormat::delta}) {
        for (const WireValues format : {WireValues::float32, WireValues::float16, WireValues::bfloat16,
                                        WireValues::int8, WireValues::int4, WireValues::int2}) {
            const Layout layout{indices, format, n};
            Floats residual(n), decoded(values.size());
            const std::unique_ptr<unsigned char[]> out(new unsigned char[largest_payload(layout, count)]);
            const std::size_t bytes = encode(layout, {index.data(), values.data(), count}, out.get(), residual.data());
            for (std::size_t cut = 0; cut <= std::min<std::size_t>(bytes, 40); ++cut) {
                const std::unique_ptr<unsigned char[]> exact(new unsigned char[bytes - cut]);
                std::memcpy(exact.get(), out.get(), bytes - cut);
                const char* const wrong = decode(layout, exact.get(), bytes - cut, count, back.data(), decoded.data());
                expect((wrong == nullptr) == (cut == 0), "a payload's length is judged wrongly", n);
            }
        }
    }
}

void check_noise() {
    std::mt19937 generator(5);
    for (int turn = 0; turn < 3000; ++turn) {
        const std::size_t bytes = generator() % 200, count = generator() % 12;
        const Layout layout{static_cast<IndexFormat>(generator() % 2), static_cast<WireValues>(generator() % 6),
                            generator() % 1000};
        const std::unique_ptr<unsigned char[]> noise(new unsigned char[bytes]);
        for (std::size_t i = 0; i < bytes; ++i) noise[i] = static_cast<unsigned char>(generator());
        Indices index(count);
        for (std::size_t k = 0; k < count; ++k) index[k] = static_cast<std::uint32_t>(k);
        Floats values(count * block_entries);
        if (layout.indices == IndexFormat::none && !valid_indices(index.data(), count, block_count(layout.entries)))
            continue;
        if (decode(layout, noise.get(), bytes, count, index.data(), values.data()) == nullptr)
            expect(all_finite(values.data(), values.size()), "noise was decoded into a NaN", bytes);
    }
}

void check_optimizers(std::size_t n) {
    const std::size_t blocks = block_count(n), count = (blocks + 2) / 3;
    Indices index(count);
    random_blocks(8, blocks, count, index.data());
    const Floats values = random_floats(count * block_entries, 2);
    for (const Rule rule : {Rule::sgd, Rule::nesterov, Rule::adam, Rule::adamw}) {
        const auto run = [&](int threads, Path path) {
            Floats shared_param = random_floats(n, 1), first(n), second(n);
            std::vector<std::int32_t> last_step(blocks);
            std::vector<std::uint16_t> live(n);
            const bool adaptive = rule == Rule::adam || rule == Rule::adamw;
            const Parameters to{shared_param.data(),
                                first.data(),
                                adaptive ? second.data() : nullptr,
                                last_step.data(),
                                {live.data(), ValueFormat::float16},
                                n};
            for (const std::int32_t step : {1, 4})
                apply_update(to, {index.data(), values.data(), count}, {rule, 0.1, 0.01, 0.9, 0.99, 1e-8, 1, step},
                             threads, path);
            return shared_param;
        };
        const Floats expected = run(1, Path::portable);
        for (const int threads : {1, 2, 5}) expect(same(run(threads, best_path()), expected), "an update differs", n);
    }
}

void check_sum(std::size_t n) {
    const std::size_t blocks = block_count(n), count = (blocks + 1) / 2;
    std::vector<Indices> indices(3, Indices(count));
    std::vector<Floats> values;
    std::vector<Units> inputs;
    for (std::size_t w = 0; w < 3; ++w) {
        random_blocks(w, blocks, count, indices[w].data());
        values.push_back(random_floats(count * block_entries, static_cast<std::uint32_t>(w)));
        inputs.push_back({indices[w].data(), values.back().data(), count});
    }
    const std::size_t total = count_union(inputs.data(), 3, 2);
    Floats first;
    for (const int threads : {1, 2, 5}) {
        Indices index(total);
        Floats sum(total * block_entries);
        sum_units(inputs.data(), 3, index.data(), sum.data(), threads);
        expect(valid_indices(index.data(), total, blocks), "the sum's indices do not ascend", n);
        if (threads == 1) first = sum;
        expect(same(sum, first), "a sum differs", n);
    }
}

}  // namespace

void check_sparse() {
    for (const std::size_t n : {0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 1023, 1025}) {
        check_selections(n);
        check_difference(n);
        check_wire(n);
        check_optimizers(n);
        check_sum(n);
    }
    const std::size_t several = 2 * chunk_entries + 33;
    check_selections(several);
    check_optimizers(several);
    check_sum(several);
    check_noise();
}
