// The exchange engine for driver.cpp: ranks that train at once while messages move, then one that is stopped in the
// middle.
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

#include "../../../kernels/exchange/engine/gradient_engine.hpp"
#include "../../../kernels/exchange/engine/update_engine.hpp"

using namespace atoll_kernels;

void check_exchange();

namespace {

void expect(bool holds, const char* what, std::size_t rank) {
    if (holds) return;
    std::fprintf(stderr, "FAILED: %s (rank %zu)\n", what, rank);
    std::_Exit(1);
}

using Floats = std::vector<float>;

const std::vector<std::vector<int>> islands{{0, 1}, {2, 3}};
const std::vector<std::size_t> sizes{1023, 17, 1, 5000};
const std::vector<std::size_t> k_blocks{9, 9, 9, 9};
constexpr std::int64_t rounds = 12;
constexpr float weight = 0.25F;  // of each rank's updates

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
    std::int64_t every = 1;
    std::vector<Floats> shared_param, residual, first, live, aggregator_sum;
    std::vector<std::size_t> tensors;
    std::unique_ptr<ExchangeEngine> engine;
    GradientEngine* gradients = nullptr;  // one of the two is the engine
    UpdateEngine* own_updates = nullptr;

    // owned: tensors have aggregators, and are exchanged in every second round.
    Rank(std::size_t rank, SelectionRule selection, WireValues values, bool updates, bool owned)
        : number(rank), every(owned ? 2 : 1) {
        const Settings settings{.rank = static_cast<int>(rank),
                                .islands = islands,
                                .threads = 3,
                                .values = values,
                                .selection = selection,
                                .digest_every = 3,
                                .seed = 7,
                                .first_round = 0};
        if (updates) {
            own_updates = new UpdateEngine(settings, every, false);
            engine.reset(own_updates);
        } else {
            gradients = new GradientEngine(settings, true);
            engine.reset(gradients);
        }
        for (const std::size_t n : sizes) {
            for (std::vector<Floats>* const buffers : {&shared_param, &residual, &first, &live, &aggregator_sum})
                buffers->emplace_back(n);
            float* const own_live = updates && keeps_live(tensors.size()) ? nullptr : live.back().data();
            const Parameters parameters{shared_param.back().data(),
                                        updates ? nullptr : first.back().data(),
                                        nullptr,
                                        nullptr,
                                        {own_live, ValueFormat::float32},
                                        n};
            TensorSettings tensor{static_cast<std::int64_t>(tensors.size()), Rule::sgd, parameters,
                                    updates ? nullptr : residual.back().data(), 0, 0, {}, nullptr};
            if (owned) {
                tensor.turn = tensor.order % 2;
                tensor.aggregator = tensors.size() / 2 % 2;
                if (number == *tensor.aggregator * 2) tensor.aggregator_sum = aggregator_sum.back().data();
            }
            tensors.push_back(updates ? own_updates->add_tensor(tensor) : gradients->add_tensor(tensor));
        }
    }

    // Exchanging updates: whether a tensor's live weights are kept here and copied for the engine, as a GPU's are.
    bool keeps_live(std::size_t tensor) const { return (number + tensor) % 2 == 1; }

    void compress(std::int64_t sync_round) {
        for (std::size_t tensor = sizes.size(); tensor-- > 0;) {
            const auto gradient =
                random_floats(sizes[tensor], static_cast<std::uint32_t>(number * 1000 + sync_round * 10));
            gradients->compress(sync_round, tensor, {gradient->data(), ValueFormat::float32, 0.25F, 9, gradient});
        }
    }

    void train() {
        for (std::int64_t sync_round = 0; sync_round < rounds; ++sync_round) {
            compress(sync_round);
            if (sync_round % 4 == 1) {
                gradients->accumulate(sync_round);
            } else {
                const double clip_norm = sync_round % 2 == 0 ? 1.0 : 0.0;
                const auto number = static_cast<std::int32_t>(sync_round + 1);
                gradients->apply(sync_round, {number, {{0.1, 0.01, 0.9, 0, 0}}, false, clip_norm});
            }
            expect(engine->await(tensors, sync_round - 1, soon()), "an update did not come", number);
            engine->publish(tensors, sync_round - 1);
            if (sync_round % 5 == 4) {
                expect(engine->quiesce(soon()), "tasks did not end", number);
                (void)engine->recent_parts();
                engine->resume();
            }
        }
        expect(engine->await(tensors, rounds - 1, soon()), "the last update did not come", number);
        engine->publish(tensors, rounds - 1);
    }

    void fetch(std::int64_t sync_round) {
        for (const std::size_t tensor : tensors) {
            expect(engine->await({&tensor, 1}, sync_round, soon()), "an update did not come", number);
            if (!keeps_live(tensor)) {
                engine->publish({&tensor, 1}, sync_round);
                continue;
            }
            const Part part = std::move(engine->take_changes({&tensor, 1})[0].part);
            for (std::size_t k = 0; k < part.count; ++k) {
                const std::size_t begin = part.index[k] * block_entries, n = live[tensor].size();
                for (std::size_t i = begin; i < std::min(n, begin + block_entries); ++i)
                    live[tensor][i] += part.values[k * block_entries + i - begin];
            }
        }
    }

    std::shared_ptr<const Floats> read_residual(std::size_t tensor) {
        auto out = std::make_shared<Floats>(sizes[tensor]);
        expect(own_updates->read_residual(tensor, {live[tensor].data(), ValueFormat::float32}, out->data()) == 0,
               "not finite", number);
        return out;
    }

    void train_updates() {
        for (std::int64_t sync_round = 0; sync_round < rounds; ++sync_round) {
            expect(engine->await_compressed({}, soon()), "parts are not selected", number);
            for (const std::size_t tensor : tensors) {
                const auto moved =
                    random_floats(sizes[tensor], static_cast<std::uint32_t>(number * 1000 + sync_round * 10));
                for (std::size_t i = 0; i < moved->size(); ++i) live[tensor][i] += (*moved)[i];
                if (!keeps_live(tensor) || (every == 2 && sync_round % 2 != static_cast<std::int64_t>(tensor % 2)))
                    continue;
                const auto copy = std::make_shared<const Floats>(live[tensor]);
                own_updates->compress_live(sync_round, tensor, {copy->data(), ValueFormat::float32, weight, 9, copy});
            }
            own_updates->sum_updates(sync_round, weight, k_blocks, k_blocks);
            if (sync_round % 5 != 3) fetch(sync_round - 1);
            if (sync_round % 5 == 4) {
                expect(engine->quiesce(soon()), "tasks did not end", number);
                for (const std::size_t tensor : tensors) (void)read_residual(tensor);
                engine->resume();
            }
        }
        fetch(rounds - 1);
    }
};

struct Network {
    std::vector<std::unique_ptr<Rank>>& ranks;
    std::atomic<bool> stop{false};

    void move_messages() {
        while (!stop) {
            for (const auto& rank : ranks) move_from(*rank);
            std::this_thread::yield();
        }
    }

    void move_from(Rank& from) {
        for (const Outgoing& message : from.engine->take_outgoing(8)) {
            const std::size_t island = from.number / 2;
            const bool part = message.kind == MessageKind::part;
            const bool total = message.kind == MessageKind::from_aggregator;
            for (const auto& to : ranks) {
                const bool here = message.to == Outgoing::everyone
                                      ? total || (to->number / 2 == island) == part
                                      : static_cast<std::size_t>(message.to) == to->number;
                if (to->number == from.number || !here) continue;
                const char* const why = to->engine->deliver(
                    message.kind, part ? from.number : island, static_cast<std::uint64_t>(message.urgency.sync_round),
                    message.tensor, message.count, message.payload->data.get(), message.payload->bytes);
                expect(why == nullptr, why == nullptr ? "" : why, to->number);
            }
        }
    }
};

std::vector<std::unique_ptr<Rank>> new_ranks(SelectionRule selection, WireValues values, bool updates = false,
                                             bool owned = false) {
    std::vector<std::unique_ptr<Rank>> ranks;
    for (std::size_t rank = 0; rank < 4; ++rank)
        ranks.push_back(std::make_unique<Rank>(rank, selection, values, updates, owned));
    return ranks;
}

void train_all(std::vector<std::unique_ptr<Rank>>& ranks, void (Rank::*train)()) {
    Network network{ranks};
    std::thread carrier([&] { network.move_messages(); });
    std::vector<std::thread> trainers;
    for (const auto& rank : ranks) trainers.emplace_back([&rank, train] { (*rank.*train)(); });
    for (std::thread& trainer : trainers) trainer.join();
    network.stop = true;
    carrier.join();
}

void check_updates(SelectionRule selection, WireValues values, bool owned) {
    auto ranks = new_ranks(selection, values, true, owned);
    train_all(ranks, &Rank::train_updates);
    for (const auto& rank : ranks) {
        expect(rank->shared_param == ranks[0]->shared_param, "the shared parameters differ", rank->number);
        for (const std::size_t tensor : rank->tensors) {
            const auto left = rank->read_residual(tensor);
            for (std::size_t i = 0; i < sizes[tensor]; ++i) {
                const float expected = rank->shared_param[tensor][i] - (*left)[i] / weight;
                expect(std::fabs(rank->live[tensor][i] - expected) < 1e-3F,
                       "live is not shared_param - residual / weight", rank->number);
            }
        }
    }
}

void check_training(SelectionRule selection, WireValues values) {
    auto ranks = new_ranks(selection, values);
    train_all(ranks, &Rank::train);
    const std::vector<Digest> digests = ranks[0]->engine->take_digests();
    expect(digests.size() == sizes.size() * rounds / 3, "digests are missing", 0);
    for (const auto& rank : ranks) {
        expect(rank->shared_param == ranks[0]->shared_param, "the shared parameters differ", rank->number);
        expect(rank->live == rank->shared_param, "the live weights differ", rank->number);
        const std::size_t left = rank->number == 0 ? 0 : digests.size();
        expect(rank->engine->take_digests().size() == left, "digests are missing", rank->number);
    }
}

void check_stop_in_the_middle() {
    for (int turn = 0; turn < 10; ++turn) {
        auto ranks = new_ranks(SelectionRule::threshold, WireValues::float16);
        Rank& rank = *ranks[0];
        bool lost = false;
        std::thread waiter([&] {
            try {
                rank.engine->await(rank.tensors, 0, soon());
            } catch (const PeerIsLost&) {
                lost = true;
            }
        });
        for (std::int64_t sync_round = 0; sync_round < 3; ++sync_round) rank.compress(sync_round);
        rank.engine->fail("a peer is gone");
        waiter.join();
        expect(lost, "nobody was woken", 0);
        rank.engine->close();
        rank.engine->close();
    }
}

void check_damaged() {
    std::mt19937 generator(3);
    for (int turn = 0; turn < 300; ++turn) {
        auto ranks = new_ranks(turn % 2 == 0 ? SelectionRule::threshold : SelectionRule::random, WireValues::float16);
        const std::size_t bytes = generator() % 80, count = generator() % 3;
        const std::unique_ptr<unsigned char[]> payload(new unsigned char[bytes]);
        for (std::size_t i = 0; i < bytes; ++i) payload[i] = static_cast<unsigned char>(generator());
        (void)ranks[0]->engine->deliver(MessageKind::sum, 1, 0, 0, count, payload.get(), bytes);
        expect(ranks[0]->engine->idle(soon()), "a damaged message keeps the engine busy", 0);
    }
}

}  // namespace

void check_exchange() {
    check_training(SelectionRule::threshold, WireValues::float16);
    check_training(SelectionRule::topk, WireValues::float32);
    check_training(SelectionRule::random, WireValues::bfloat16);
    check_updates(SelectionRule::threshold, WireValues::float16, false);
    check_updates(SelectionRule::random, WireValues::float32, false);
    check_updates(SelectionRule::threshold, WireValues::int2, true);
    check_updates(SelectionRule::topk, WireValues::int4, true);
    check_stop_in_the_middle();
    check_damaged();
}
