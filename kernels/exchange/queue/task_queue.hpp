#pragma once

#include <sys/types.h>

#include <chrono>
#include <compare>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../parts/parts.hpp"

namespace atoll_kernels {

using Clock = std::chrono::steady_clock;

// Seconds that the calling thread has had of a processor. What a task took of them is the same whoever else wants the
// processors meanwhile; on the wall's clock it would count what training took in between.
double processor_s();

// The order of work, earliest deadline first: the lowest sync round, in it the layer that the next forward pass needs
// first, then what came first.
struct Urgency {
    std::int64_t sync_round;
    std::int64_t order;
    std::uint64_t arrival;

    auto operator<=>(const Urgency&) const = default;
};

// Order of a heap whose top is the most urgent.
struct LessUrgent {
    template <typename Entry>
    bool operator()(const Entry& a, const Entry& b) const {
        return b.urgency < a.urgency;
    }
};

struct QueueStats {
    std::uint64_t tasks = 0;  // begun
    double queue_s = 0;       // waited between push and begin, all of them together
};

// One queue of tasks and the threads that carry them out, the most urgent first. A running task is not interrupted.
class TaskQueue {
  public:
    using Task = std::function<void(Scratch&)>;

    // broken(what): a task threw. Throws std::system_error if the threads cannot be started.
    TaskQueue(int threads, std::function<void(const std::string&)> broken);
    TaskQueue(const TaskQueue&) = delete;
    TaskQueue& operator=(const TaskQueue&) = delete;
    ~TaskQueue() { close(); }

    void push(std::int64_t sync_round, std::int64_t order, Task task);  // does nothing once closed

    // Until resume, no task is begun; true when none runs any more, false if one still does at `until`.
    bool quiesce(Clock::time_point until);
    void resume();
    bool is_quiet() const;

    // True when nothing is queued or runs.
    bool idle(Clock::time_point until);

    // Lets running tasks finish, drops the others and joins the threads.
    void close();

    QueueStats take_stats();

  private:
    struct Entry {
        Urgency urgency;
        Clock::time_point since;
        Task task;
    };

    void start(int threads);
    void serve();
    void run_next(std::unique_lock<std::mutex>& lock, Scratch& scratch);

    const std::function<void(const std::string&)> broken_;

    mutable std::mutex mutex_;  // guards what follows
    std::condition_variable wake_, finished_;
    std::vector<Entry> heap_;
    std::uint64_t arrivals_ = 0;
    int running_ = 0;
    bool quiet_ = false;
    bool closed_ = false;
    QueueStats stats_;

    std::mutex joining_;  // guards threads_
    std::vector<std::thread> threads_;
};

double seconds(Clock::duration duration);

}  // namespace atoll_kernels
