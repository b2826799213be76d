#include "timeline.hpp"

#include <algorithm>
#include <utility>

namespace atoll_kernels {

Timeline::Timeline(std::vector<TensorWork> tensors, std::vector<std::vector<Task>> options, std::size_t resources)
    : tensors_(std::move(tensors)), resources_(resources), entries_(tensors_.size()) {
    for (const std::vector<Task>& option : options) {
        first_.push_back(tasks_.size());
        const auto elsewhere =
            std::find_if(option.begin(), option.end(), [](const Task& t) { return t.resource != device; });
        leading_.push_back(static_cast<std::size_t>(elsewhere - option.begin()));
        tasks_.insert(tasks_.end(), option.begin(), option.end());
    }
    first_.push_back(tasks_.size());
    for (const TensorWork& tensor : tensors_) {
        for (const Task& task : tasks_) durations_.push_back(task.alpha + task.beta * tensor.bytes * task.factor);
    }
}

double Timeline::end_s(const Choice& choice, double limit) {
    end_s_ = run_device(choice);
    if (lower_bound() >= limit) return never;
    std::size_t arrived = 0;
    for (;;) {
        const double now_s = next_event(arrived);
        if (now_s == never) return end_s_ < limit ? end_s_ : never;
        if (now_s >= limit) return never;
        for (; arrived < entries_.size() && entries_[arrived].ready_s <= now_s; ++arrived) {
            if (entries_[arrived].task < last_task(arrived)) enqueue(now_s, arrived, entries_[arrived].task);
        }
        for (Resource& resource : resources_) {
            if (resource.busy_until_s <= now_s) finish(resource, now_s);
        }
        serve(now_s);
    }
}

// Runs the backward passes and the compression between them. Returns the end of the last.
double Timeline::run_device(const Choice& choice) {
    option_ = choice.data();
    for (Resource& resource : resources_) {
        resource.queue.clear();
        resource.head = 0;
        resource.busy_until_s = resource.first_s = never;
        resource.total_s = 0;
    }
    double now_s = 0;
    for (std::size_t tensor = 0; tensor < tensors_.size(); ++tensor) {
        now_s += tensors_[tensor].backward_s;
        std::size_t task = first_[choice[tensor]];
        const std::size_t elsewhere = task + leading_[choice[tensor]];
        for (; task < elsewhere; ++task) now_s += duration(tensor, task);
        entries_[tensor] = {now_s, task};
        for (; task < last_task(tensor); ++task) {
            Resource& resource = resources_[tasks_[task].resource];
            resource.total_s += duration(tensor, task);
            resource.first_s = std::min(resource.first_s, now_s);
        }
        served_ += 1 + last_task(tensor) - first_[choice[tensor]];
    }
    return backward_end_s_ = now_s;
}

// Returns a lower bound of the end: each resource must serve all of its tasks.
double Timeline::lower_bound() const {
    double bound_s = backward_end_s_ + resources_[device].total_s;
    for (const Resource& resource : resources_) {
        if (resource.total_s > 0) bound_s = std::max(bound_s, resource.first_s + resource.total_s);
    }
    return bound_s;
}

void Timeline::enqueue(double now_s, std::size_t tensor, std::size_t task) {
    Resource& resource = resources_[tasks_[task].resource];
    auto at = resource.queue.end();
    while (at != resource.queue.begin() + static_cast<std::ptrdiff_t>(resource.head)) {
        const Waiting& before = *std::prev(at);
        if (before.ready_s < now_s || before.tensor < tensor) break;
        --at;
    }
    resource.queue.insert(at, {now_s, tensor, task});
}

void Timeline::finish(Resource& resource, double now_s) {
    const Waiting done = resource.serving;
    resource.busy_until_s = never;
    end_s_ = std::max(end_s_, now_s);
    if (done.task + 1 < last_task(done.tensor)) enqueue(now_s, done.tensor, done.task + 1);
}

bool Timeline::can_begin(std::size_t resource, double now_s) const {
    const Resource& own = resources_[resource];
    return own.busy_until_s == never && own.has_waiting() && (resource != device || now_s >= backward_end_s_);
}

// Returns the idle resource whose next task takes no time, of the earliest tensor; null if there is none.
Timeline::Resource* Timeline::instant(double now_s) {
    Resource* found = nullptr;
    for (std::size_t i = 0; i < resources_.size(); ++i) {
        if (!can_begin(i, now_s)) continue;
        const Waiting& head = resources_[i].queue[resources_[i].head];
        if (duration(head.tensor, head.task) > 0) continue;
        if (found == nullptr || head.tensor < found->queue[found->head].tensor) found = &resources_[i];
    }
    return found;
}

// Begins the next task of each idle resource. Tasks that take no time come first: more may be ready after them.
void Timeline::serve(double now_s) {
    while (Resource* const resource = instant(now_s)) {
        resource->serving = resource->queue[resource->head++];
        finish(*resource, now_s);
    }
    for (std::size_t i = 0; i < resources_.size(); ++i) {
        if (!can_begin(i, now_s)) continue;
        Resource& resource = resources_[i];
        resource.serving = resource.queue[resource.head++];
        resource.busy_until_s = now_s + duration(resource.serving.tensor, resource.serving.task);
    }
}

double Timeline::next_event(std::size_t arrived) const {
    double next_s = arrived < entries_.size() ? entries_[arrived].ready_s : never;
    for (const Resource& resource : resources_) next_s = std::min(next_s, resource.busy_until_s);
    const Resource& own = resources_[device];
    if (own.has_waiting() && own.busy_until_s == never) next_s = std::min(next_s, backward_end_s_);
    return next_s;
}

}  // namespace atoll_kernels
