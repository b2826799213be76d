#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace atoll_kernels {

// A tensor's work on one resource takes alpha + beta * bytes * factor seconds.
struct Task {
    std::size_t resource;
    double alpha, beta, factor;
};

struct TensorWork {
    double bytes, backward_s;
};

using Choice = std::vector<std::uint16_t>;

// Simulates one backward pass and the synchronisation of its tensors. Every resource serves one task at a time, to its
// end.
//
// Backward passes run on resource 0, the device, in the order of the tensors. A tensor's tasks run one after the other,
// the first when its backward pass has ended. On the device, tasks before the tensor's first task elsewhere are served
// before any later backward pass, and its other tasks after all of these. Apart from that, every resource serves tasks
// in the order in which they became ready, ties by tensor.
// Source: Espresso (Wang, 2023), Section 4.6, for the resources; the order of service is ours.
class Timeline {
  public:
    static constexpr std::size_t device = 0;
    static constexpr double never = std::numeric_limits<double>::infinity();

    // options: the tasks of each option, for any tensor. resources: their number; every task's resource is below it.
    Timeline(std::vector<TensorWork> tensors, std::vector<std::vector<Task>> options, std::size_t resources);

    std::size_t tensors() const { return tensors_.size(); }
    std::size_t options() const { return first_.size() - 1; }
    const std::vector<TensorWork>& work() const { return tensors_; }

    // Returns the seconds until everything has ended, with option choice[i] for tensor i; `never` if that reaches
    // `limit`.
    double end_s(const Choice& choice, double limit = never);

    // Number of tasks simulated since construction: the cost of a search, the same on every machine.
    std::uint64_t tasks_served() const { return served_; }

  private:
    struct Waiting {
        double ready_s;
        std::size_t tensor, task;
    };
    struct Resource {
        std::vector<Waiting> queue;  // from `head` on, in the order of service
        std::size_t head = 0;
        Waiting serving{};
        double busy_until_s = never;  // `never`: idle
        double total_s = 0, first_s = never;  // of all tasks that it will serve: their time, and the earliest begin
        bool has_waiting() const { return head < queue.size(); }
    };
    struct Entry {
        double ready_s;
        std::size_t task;
    };

    double duration(std::size_t tensor, std::size_t task) const {
        return durations_[tensor * tasks_.size() + task];
    }
    std::size_t last_task(std::size_t tensor) const { return first_[option_[tensor] + 1]; }
    double run_device(const Choice& choice);
    double lower_bound() const;
    void enqueue(double now_s, std::size_t tensor, std::size_t task);
    void finish(Resource& resource, double now_s);
    bool can_begin(std::size_t resource, double now_s) const;
    Resource* instant(double now_s);
    void serve(double now_s);
    double next_event(std::size_t arrived) const;

    std::vector<TensorWork> tensors_;
    std::vector<Task> tasks_;           // of all options, one after the other
    std::vector<std::size_t> first_;    // of each option, its first task; and the end
    std::vector<std::size_t> leading_;  // of each option, how many tasks precede the first elsewhere
    std::vector<double> durations_;     // [tensor][task]

    const std::uint16_t* option_ = nullptr;
    std::vector<Resource> resources_;
    std::vector<Entry> entries_;  // of each tensor: when it leaves the backward pass, and its next task
    double backward_end_s_ = 0, end_s_ = 0;
    std::uint64_t served_ = 0;
};

}  // namespace atoll_kernels
