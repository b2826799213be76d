#include "task_queue.hpp"

#include <pthread.h>
#include <signal.h>
#include <time.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace atoll_kernels {

double processor_s() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

TaskQueue::TaskQueue(int threads, std::function<void(const std::string&)> broken) : broken_(std::move(broken)) {
    try {
        start(threads);
    } catch (...) {
        close();
        throw;
    }
}

void TaskQueue::start(int threads) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // new threads inherit it: signals belong to Python's main thread
    try {
        for (int k = 0; k < threads; ++k) {
            threads_.emplace_back([this] { serve(); });
            pthread_setname_np(threads_.back().native_handle(), ("atoll-pipe-" + std::to_string(k)).c_str());
        }
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void TaskQueue::push(std::int64_t sync_round, std::int64_t order, Task task) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (closed_) return;
        heap_.push_back({{sync_round, order, arrivals_++}, Clock::now(), std::move(task)});
        std::push_heap(heap_.begin(), heap_.end(), LessUrgent());
    }
    wake_.notify_one();
}

void TaskQueue::serve() {
    Scratch scratch;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        wake_.wait(lock, [this] { return closed_ || (!quiet_ && !heap_.empty()); });
        if (closed_) return;
        run_next(lock, scratch);
    }
}

void TaskQueue::run_next(std::unique_lock<std::mutex>& lock, Scratch& scratch) {
    std::pop_heap(heap_.begin(), heap_.end(), LessUrgent());
    Entry entry = std::move(heap_.back());
    heap_.pop_back();
    ++running_;
    ++stats_.tasks;
    stats_.queue_s += seconds(Clock::now() - entry.since);
    lock.unlock();
    try {
        entry.task(scratch);
    } catch (const std::exception& error) {
        broken_(error.what());
    }
    entry.task = nullptr;  // what it owns goes before anybody hears that it is done
    lock.lock();
    if (--running_ == 0) finished_.notify_all();
}

bool TaskQueue::quiesce(Clock::time_point until) {
    std::unique_lock<std::mutex> lock(mutex_);
    quiet_ = true;
    return finished_.wait_until(lock, until, [this] { return running_ == 0; });
}

void TaskQueue::resume() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        quiet_ = false;
    }
    wake_.notify_all();
}

bool TaskQueue::is_quiet() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return quiet_;
}

bool TaskQueue::idle(Clock::time_point until) {
    std::unique_lock<std::mutex> lock(mutex_);
    return finished_.wait_until(lock, until, [this] { return running_ == 0 && heap_.empty(); });
}

void TaskQueue::close() {
    std::vector<Entry> dropped;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        closed_ = true;
        dropped.swap(heap_);
    }
    wake_.notify_all();
    finished_.notify_all();
    const std::lock_guard<std::mutex> mine(joining_);
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
}

QueueStats TaskQueue::take_stats() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(stats_, QueueStats{});
}

}  // namespace atoll_kernels
