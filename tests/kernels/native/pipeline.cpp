// The pipeline for driver.cpp: ranks that train at once while messages move, then one that is stopped in the middle.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "../../../kernels/pipeline/pipeline.hpp"

using namespace atoll_kernels;

void check_pipeline();

namespace {

void expect(bool holds, const char* what, std::size_t rank) {
    if (holds) return;
    std::fprintf(stderr, "FAILED: %s (rank %zu)\n", what, rank);
    std::_Exit(1);
}

using Floats = std::vector<float>;

const std::vector<std::vector<int>> islands{{0, 1}, {2, 3}};
const std::vector<std::size_t> sizes{1023, 17, 1, 5000};
constexpr std::int64_t steps = 12;

std::shared_ptr<const Floats> random_floats(std::size_t n, std::uint32_t seed) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    Floats x(n);
    for (float& value : x) value = normal(generator);
    return std::make_shared<const Floats>(std::move(x));
}

Clock::time_point soon() { return Clock::now() + std::chrono::seconds(60); }

struct Rank {
    std::size_t number;
    std::vector<Floats> master, residual, first, live;
    std::vector<std::size_t> tensors;
    std::unique_ptr<Pipeline> pipeline;

    Rank(std::size_t rank, SelectionRule selection, ValueFormat values, bool updates) : number(rank) {
        pipeline.reset(new Pipeline({.rank = static_cast<int>(rank),
                                     .islands = islands,
                                     .threads = 3,
                                     .policy = rank == 1 ? Policy::fcfs : Policy::edf,
                                     .values = values,
                                     .selection = selection,
                                     .error_feedback = !updates,
                                     .digest_every = 3,
                                     .seed = 7,
                                     .first_step = 0,
                                     .updates = updates}));
        for (const std::size_t n : sizes) {
            for (std::vector<Floats>* const buffers : {&master, &residual, &first, &live}) buffers->emplace_back(n);
            float* const own_live = updates && keeps_live(tensors.size()) ? nullptr : live.back().data();
            const Parameters parameters{master.back().data(), updates ? nullptr : first.back().data(), nullptr, nullptr,
                                        {own_live, ValueFormat::float32}, n};
            tensors.push_back(pipeline->add_tensor({static_cast<std::int64_t>(tensors.size()), Rule::sgd, parameters,
                                                    updates ? nullptr : residual.back().data(), 0}));
        }
    }

    // Exchanging updates: whether a tensor's live weights are kept here and copied for the pipeline, as a GPU's are.
    bool keeps_live(std::size_t tensor) const { return (number + tensor) % 2 == 1; }

    void compress(std::int64_t step) {
        for (std::size_t tensor = sizes.size(); tensor-- > 0;) {
            const auto gradient = random_floats(sizes[tensor], static_cast<std::uint32_t>(number * 1000 + step * 10));
            pipeline->compress(step, tensor, {gradient->data(), ValueFormat::float32, 0.25F, 9, gradient});
        }
    }

    void train() {
        for (std::int64_t step = 0; step < steps; ++step) {
            compress(step);
            if (step % 4 == 1) {
                pipeline->carry(step);
            } else {
                const double clip_norm = step % 2 == 0 ? 1.0 : 0.0;
                const auto number = static_cast<std::int32_t>(step + 1);
                pipeline->apply(step, {number, {{0.1, 0.01, 0.9, 0, 0}}, false, clip_norm});
            }
            expect(pipeline->await(tensors, step - 1, soon()), "an update did not come", number);
            pipeline->publish(tensors, step - 1);
            if (step % 5 == 4) {
                expect(pipeline->quiesce(soon()), "tasks did not end", number);
                (void)pipeline->recent_parts();
                pipeline->resume();
            }
        }
        expect(pipeline->await(tensors, steps - 1, soon()), "the last update did not come", number);
        pipeline->publish(tensors, steps - 1);
    }

    void fetch(std::int64_t step) {
        for (const std::size_t tensor : tensors) {
            expect(pipeline->await({&tensor, 1}, step, soon()), "an update did not come", number);
            if (!keeps_live(tensor)) {
                pipeline->publish({&tensor, 1}, step);
                continue;
            }
            const auto [version, part] = pipeline->take_changes(tensor);
            for (std::size_t k = 0; k < part.count; ++k) {
                const std::size_t begin = part.index[k] * block_entries, n = live[tensor].size();
                for (std::size_t i = begin; i < std::min(n, begin + block_entries); ++i)
                    live[tensor][i] += part.values[k * block_entries + i - begin];
            }
        }
    }

    std::shared_ptr<const Floats> owed(std::size_t tensor) {
        auto out = std::make_shared<Floats>(sizes[tensor]);
        expect(pipeline->owed(tensor, {live[tensor].data(), ValueFormat::float32}, out->data()) == 0, "not finite", number);
        return out;
    }

    void train_updates() {
        for (std::int64_t step = 0; step < steps; ++step) {
            expect(pipeline->await_compressed(soon()), "parts are not selected", number);
            for (const std::size_t tensor : tensors) {
                const auto moved = random_floats(sizes[tensor], static_cast<std::uint32_t>(number * 1000 + step * 10));
                for (std::size_t i = 0; i < moved->size(); ++i) live[tensor][i] += (*moved)[i];
                Gradient gradient{live[tensor].data(), ValueFormat::float32, 0, 9, nullptr, true};
                if (keeps_live(tensor)) {
                    const auto copy = std::make_shared<const Floats>(live[tensor]);
                    gradient.data = copy->data();
                    gradient.owner = copy;
                }
                pipeline->compress(step, tensor, std::move(gradient));
            }
            pipeline->apply(step, {static_cast<std::int32_t>(step + 1), {{1, 0, 0, 0, 0}}, false, 0});
            if (step % 5 != 3) fetch(step - 1);
            if (step % 5 == 4) {
                expect(pipeline->quiesce(soon()), "tasks did not end", number);
                for (const std::size_t tensor : tensors) (void)owed(tensor);
                pipeline->resume();
            }
        }
        fetch(steps - 1);
    }
};

struct Network {
    std::vector<std::unique_ptr<Rank>>& ranks;
    std::atomic<bool> stop{false};

    void carry() {
        while (!stop) {
            for (const auto& rank : ranks) carry_from(*rank);
            std::this_thread::yield();
        }
    }

    void carry_from(Rank& from) {
        for (const Outgoing& message : from.pipeline->take_outgoing(8)) {
            const std::size_t island = from.number / 2;
            const bool part = message.kind == MessageKind::part;
            for (const auto& to : ranks) {
                if (to->number == from.number || (to->number / 2 == island) != part) continue;
                const char* const why = to->pipeline->deliver(
                    message.kind, part ? from.number : island, static_cast<std::uint64_t>(message.urgency.step),
                    message.tensor, message.count, message.payload->data.get(), message.payload->bytes);
                expect(why == nullptr, why == nullptr ? "" : why, to->number);
            }
        }
    }
};

std::vector<std::unique_ptr<Rank>> new_ranks(SelectionRule selection, ValueFormat values, bool updates = false) {
    std::vector<std::unique_ptr<Rank>> ranks;
    for (std::size_t rank = 0; rank < 4; ++rank)
        ranks.push_back(std::make_unique<Rank>(rank, selection, values, updates));
    return ranks;
}

void train_all(std::vector<std::unique_ptr<Rank>>& ranks, void (Rank::*train)()) {
    Network network{ranks};
    std::thread carrier([&] { network.carry(); });
    std::vector<std::thread> trainers;
    for (const auto& rank : ranks) trainers.emplace_back([&rank, train] { (*rank.*train)(); });
    for (std::thread& trainer : trainers) trainer.join();
    network.stop = true;
    carrier.join();
}

void check_updates(SelectionRule selection, ValueFormat values) {
    auto ranks = new_ranks(selection, values, true);
    train_all(ranks, &Rank::train_updates);
    for (const auto& rank : ranks) {
        expect(rank->master == ranks[0]->master, "the masters differ", rank->number);
        for (const std::size_t tensor : rank->tensors) {
            const auto owed = rank->owed(tensor);
            for (std::size_t i = 0; i < sizes[tensor]; ++i) {
                const float expected = rank->master[tensor][i] - 4 * (*owed)[i];
                expect(std::fabs(rank->live[tensor][i] - expected) < 1e-3F, "live is not master - 4 * owed", rank->number);
            }
        }
    }
}

void check_training(SelectionRule selection, ValueFormat values) {
    auto ranks = new_ranks(selection, values);
    train_all(ranks, &Rank::train);
    const std::vector<Digest> digests = ranks[0]->pipeline->take_digests();
    expect(digests.size() == sizes.size() * steps / 3, "digests are missing", 0);
    for (const auto& rank : ranks) {
        expect(rank->master == ranks[0]->master, "the masters differ", rank->number);
        expect(rank->live == rank->master, "the live weights differ", rank->number);
        const std::size_t left = rank->number == 0 ? 0 : digests.size();
        expect(rank->pipeline->take_digests().size() == left, "digests are missing", rank->number);
    }
}

void check_stop_in_the_middle() {
    for (int turn = 0; turn < 10; ++turn) {
        auto ranks = new_ranks(SelectionRule::threshold, ValueFormat::float16);
        Rank& rank = *ranks[0];
        bool lost = false;
        std::thread waiter([&] {
            try {
                rank.pipeline->await(rank.tensors, 0, soon());
            } catch (const PeerIsLost&) {
                lost = true;
            }
        });
        for (std::int64_t step = 0; step < 3; ++step) rank.compress(step);
        rank.pipeline->fail("a peer is gone");
        waiter.join();
        expect(lost, "nobody was woken", 0);
        rank.pipeline->close();
        rank.pipeline->close();
    }
}

void check_damaged() {
    std::mt19937 generator(3);
    for (int turn = 0; turn < 300; ++turn) {
        auto ranks = new_ranks(turn % 2 == 0 ? SelectionRule::threshold : SelectionRule::random, ValueFormat::float16);
        const std::size_t bytes = generator() % 80, count = generator() % 3;
        const std::unique_ptr<unsigned char[]> payload(new unsigned char[bytes]);
        for (std::size_t i = 0; i < bytes; ++i) payload[i] = static_cast<unsigned char>(generator());
        (void)ranks[0]->pipeline->deliver(MessageKind::sum, 1, 0, 0, count, payload.get(), bytes);
        expect(ranks[0]->pipeline->idle(soon()), "a damaged message keeps the pipeline busy", 0);
    }
}

}  // namespace

void check_pipeline() {
    check_training(SelectionRule::threshold, ValueFormat::float16);
    check_training(SelectionRule::topk, ValueFormat::float32);
    check_training(SelectionRule::random, ValueFormat::bfloat16);
    check_updates(SelectionRule::threshold, ValueFormat::float16);
    check_updates(SelectionRule::random, ValueFormat::float32);
    check_stop_in_the_middle();
    check_damaged();
}
