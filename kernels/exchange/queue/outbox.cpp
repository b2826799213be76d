#include "outbox.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

namespace atoll_kernels {
namespace {

int new_event() {
    const int event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (event < 0) throw std::system_error(errno, std::generic_category(), "no eventfd for the exchange engine");
    return event;
}

}  // namespace

Outbox::Outbox() : event_(new_event()) {}

Outbox::~Outbox() { close(event_); }

void Outbox::put(Outgoing message) {
    message.urgency.arrival = arrivals_++;
    heap_.push_back(std::move(message));
    std::push_heap(heap_.begin(), heap_.end(), LessUrgent());
    wake();
}

std::vector<Outgoing> Outbox::take(std::size_t limit) {
    std::vector<Outgoing> taken;
    while (!heap_.empty() && taken.size() < limit) {
        std::pop_heap(heap_.begin(), heap_.end(), LessUrgent());
        taken.push_back(std::move(heap_.back()));
        heap_.pop_back();
    }
    if (heap_.empty()) calm();
    return taken;
}

void Outbox::wake() {
    // Never full: it is written once between two reads.
    if (!std::exchange(awake_, true)) eventfd_write(event_, 1);
}

void Outbox::calm() {
    eventfd_t ignored;
    if (std::exchange(awake_, false)) eventfd_read(event_, &ignored);
}

}  // namespace atoll_kernels
