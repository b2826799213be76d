#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "islands.hpp"
#include "parts.hpp"

namespace atoll_kernels {

enum class MessageKind { part = 0, sum = 1 };

// The books of one tensor: what has come for which step, what is missing, how far its weights are. Pure: no thread, no
// clock.
//
// A step is open from the first message for it until it is closed, that is applied or carried. Steps close in order.
class Ledger {
  public:
    // How many steps beyond its own newest one a rank takes messages for. Peers get no further ahead than the staleness;
    // the rest is for what waits in queues.
    static constexpr std::int64_t steps_ahead = 4;

    Ledger(const Islands& islands, std::int64_t first_step)
        : islands_(&islands), version_(first_step - 1), compressed_(first_step - 1) {}

    std::int64_t version() const { return version_; }        // the step closed last
    std::int64_t compressed() const { return compressed_; }  // the newest step that this rank began
    void begin_step() { ++compressed_; }

    // Why a message is not taken, or null. Its origin is a rank (part) or an island (sum).
    const char* refusal(MessageKind kind, std::uint64_t origin, std::uint64_t step) const;

    // Notes a message of which refusal said null; what is in it comes with put.
    void claim(MessageKind kind, std::uint64_t origin, std::int64_t step);

    // What came from this rank's mate in `place` of the island. True when the island's parts are complete.
    bool put_part(std::int64_t step, std::size_t place, SharedPart part);
    bool put_sum(std::int64_t step, std::size_t island, SharedPart sum);

    std::size_t place_of(std::uint64_t rank) const;

    // In rank order; the ledger forgets them.
    std::vector<SharedPart> take_parts(std::int64_t step);

    // The step after the version, if its sums are complete and nobody took them yet; in island order.
    bool next_is_complete() const;
    std::vector<SharedPart> take_next_sums();
    bool next_is_taken() const;

    void close_next();

    // What the step after the version still waits for from others or this rank, one sentence each; empty: nothing.
    std::vector<std::string> missing() const;

  private:
    struct Entry {
        bool claimed = false;
        SharedPart part;
    };
    struct Open {
        std::vector<Entry> parts, sums;
        std::size_t parts_missing, sums_missing;
        bool taken = false;
    };

    Open& open(std::int64_t step);
    const Open* find(std::int64_t step) const;
    void note_missing_parts(const Open* next, std::vector<std::string>& missing) const;

    const Islands* islands_;
    std::int64_t version_, compressed_;
    std::map<std::int64_t, Open> open_;
};

}  // namespace atoll_kernels
