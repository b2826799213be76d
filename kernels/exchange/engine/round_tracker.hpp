#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "../parts/parts.hpp"
#include "islands.hpp"

namespace atoll_kernels {

// The rounds in which a tensor is exchanged, from round `from` on: those after `turn` by a multiple of `every`. The
// others are only counted.
struct Turns {
    std::int64_t from, every = 1, turn = 0;
};

// The sync rounds of one tensor: what has come for which, what is missing, how far its weights are. Pure: no thread, no
// clock.
//
// A round is open from the first message for it until it is closed, that is applied or accumulated. Rounds close in
// order.
class RoundTracker {
  public:
    // The number of rounds beyond its own newest one that a rank takes messages for. Peers get no further ahead than
    // the staleness; the rest is for what waits in queues.
    static constexpr std::int64_t rounds_ahead = 16;

    // With an aggregator, that island's leader alone takes the islands' sums, and everybody its total.
    RoundTracker(const Islands& islands, Turns turns, std::optional<std::size_t> aggregator)
        : islands_(&islands),
          aggregator_(aggregator),
          turns_{turns},
          version_(turns.from - 1),
          compressed_(turns.from - 1),
          taken_(turns.from - 1) {}

    std::optional<std::size_t> aggregator() const { return aggregator_; }
    bool owns() const { return aggregator_ == islands_->mine && islands_->leads(); }
    bool is_due(std::int64_t sync_round) const;

    // From a round that was not begun yet, on all ranks alike. Earlier ones go on as they were.
    void change(Turns turns);

    std::int64_t version() const { return version_; }        // the round closed last
    std::int64_t compressed() const { return compressed_; }  // the newest round that this rank began
    void begin_round() { ++compressed_; }

    // The reason why a message is not taken, or null. Its origin is a rank (part) or an island (sum).
    const char* refusal(MessageKind kind, std::uint64_t origin, std::uint64_t sync_round) const;

    // Notes a message of which refusal said null; what is in it comes with put.
    void claim(MessageKind kind, std::uint64_t origin, std::int64_t sync_round);

    // Notes what came from this rank's mate in `place` of the island. True when the island's parts are complete.
    bool put_part(std::int64_t sync_round, std::size_t place, SharedPart part);
    bool put_sum(std::int64_t sync_round, std::size_t island, SharedPart sum);
    void put_total(std::int64_t sync_round, SharedPart total);

    std::size_t place_of(std::uint64_t rank) const;

    // In rank order; they are forgotten here.
    std::vector<SharedPart> take_parts(std::int64_t sync_round);

    // Whether this rank owns the tensor, the sums of the round after the version are complete, and nobody took them
    // yet; in island order.
    bool aggregator_may_total() const;
    std::vector<SharedPart> take_owned_sums();

    // The same of what the shared parameters take in that round: its sums in island order, its aggregator's total, or,
    // where it is not due, nothing.
    bool next_is_complete() const;
    std::vector<SharedPart> take_next_sums();

    void close_next();

    // The things that the round after the version still waits for from others or this rank, one sentence each; empty:
    // nothing.
    std::vector<std::string> missing() const;

  private:
    struct Entry {
        bool claimed = false;
        SharedPart part;
    };
    struct Open {
        std::vector<Entry> parts, sums;
        std::size_t parts_missing, sums_missing;
        Entry total;
        bool sums_taken = false;
    };

    Open& open(std::int64_t sync_round);
    const Open* find(std::int64_t sync_round) const;
    void note_missing_parts(const Open* next, std::vector<std::string>& missing) const;

    static auto& entry(auto& of, MessageKind kind, std::size_t place) {
        if (kind == MessageKind::from_aggregator) return of.total;
        return (kind == MessageKind::part ? of.parts : of.sums)[place];
    }
    std::vector<SharedPart> take_sums(Open& next);

    const Islands* islands_;
    std::optional<std::size_t> aggregator_;
    std::vector<Turns> turns_;  // by their first round; those of rounds that are all closed are forgotten
    std::int64_t version_, compressed_;
    std::int64_t taken_;  // the newest round that was taken
    std::map<std::int64_t, Open> open_;
};

}  // namespace atoll_kernels
