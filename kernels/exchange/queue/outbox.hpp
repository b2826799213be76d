#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../parts/parts.hpp"
#include "task_queue.hpp"

namespace atoll_kernels {

struct Outgoing {
    static constexpr int everyone = -1;  // whom messages of this kind are for

    MessageKind kind;
    std::size_t tensor;
    std::size_t count;
    SharedPayload payload;
    Urgency urgency;
    int to = everyone;  // or one rank
};

// The messages that wait to be sent, and an eventfd that can be polled for it. One caller at a time.
class Outbox {
  public:
    Outbox();  // throws std::system_error
    Outbox(const Outbox&) = delete;
    Outbox& operator=(const Outbox&) = delete;
    ~Outbox();

    int event() const { return event_; }
    void put(Outgoing message);  // its urgency.arrival is set here
    std::vector<Outgoing> take(std::size_t limit);

    // Makes the eventfd readable until the next take, though there may be nothing.
    void wake();

  private:
    void calm();

    const int event_;
    bool awake_ = false;
    std::uint64_t arrivals_ = 0;
    std::vector<Outgoing> heap_;
};

}  // namespace atoll_kernels
