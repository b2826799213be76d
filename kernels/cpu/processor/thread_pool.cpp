#include "thread_pool.hpp"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "features.hpp"

namespace atoll_kernels {
namespace {

struct Job {
    std::size_t chunks = 0;
    std::size_t threads = 0;
    Work work = nullptr;
    void* context = nullptr;
};

class Pool {
  public:
    // False when another caller has the pool.
    bool try_run(const Job& job) {
        const std::unique_lock<std::mutex> mine(callers_, std::try_to_lock);
        if (!mine.owns_lock()) return false;
        start_up_to(job.threads - 1);
        next_chunk_.store(0, std::memory_order_relaxed);
        {
            const std::lock_guard<std::mutex> lock(state_);
            job_ = job;
            open_ = true;
            ++round_;
        }
        wake_.notify_all();
        take_chunks(job);
        std::unique_lock<std::mutex> lock(state_);
        open_ = false;  // whoever has not woken up yet stays out: all chunks are taken
        idle_.wait(lock, [this] { return busy_ == 0; });
        return true;
    }

    void stop() {
        const std::lock_guard<std::mutex> mine(callers_);
        {
            const std::lock_guard<std::mutex> lock(state_);
            stopping_ = true;
        }
        wake_.notify_all();
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
        stopping_ = false;
    }

  private:
    void start_up_to(std::size_t count) {
        if (threads_.size() >= count) return;
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // new threads inherit it: signals belong to Python's main thread
        try {
            while (threads_.size() < count) {
                threads_.emplace_back([this, index = threads_.size(), seen = round_] { serve(index, seen); });
                pthread_setname_np(threads_.back().native_handle(), "atoll-kernel");
            }
        } catch (const std::system_error&) {
            // The limit on threads is reached: those that run share the chunks, with the same result.
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void serve(std::size_t index, unsigned long seen) {
        std::unique_lock<std::mutex> lock(state_);
        while (true) {
            wake_.wait(lock, [&] { return stopping_ || round_ != seen; });
            if (stopping_) return;
            seen = round_;
            if (!open_ || index + 1 >= job_.threads) continue;
            const Job job = job_;
            ++busy_;
            lock.unlock();
            take_chunks(job);
            lock.lock();
            if (--busy_ == 0) idle_.notify_one();
        }
    }

    void take_chunks(const Job& job) {
        while (true) {
            const std::size_t chunk = next_chunk_.fetch_add(1, std::memory_order_relaxed);
            if (chunk >= job.chunks) return;
            job.work(job.context, chunk);
        }
    }

    std::mutex callers_;  // held over one try_run: the pool works for one caller at a time
    std::vector<std::thread> threads_;
    std::atomic<std::size_t> next_chunk_{0};

    std::mutex state_;  // guards what follows
    std::condition_variable wake_, idle_;
    Job job_;
    int busy_ = 0;
    bool open_ = false;
    bool stopping_ = false;
    unsigned long round_ = 0;
};

// Never destroyed: a thread may still sleep in it while the process runs its last destructors.
alignas(Pool) unsigned char pool_storage[sizeof(Pool)];
Pool* pool() { return std::launder(reinterpret_cast<Pool*>(pool_storage)); }

// In a forked child the threads are gone and the mutexes may be held by nobody: begin anew over the old object, whose
// members own nothing that a child could free safely (its threads never ran here).
void begin_anew() { new (pool_storage) Pool; }

const int pool_made = [] {
    begin_anew();
    return pthread_atfork(nullptr, nullptr, begin_anew);
}();

}  // namespace

void for_each_chunk(std::size_t chunks, int threads, Work work, void* context) {
    if (threads == 0) threads = std::min(default_threads(), max_threads);
    const std::size_t useful = std::min(chunks, static_cast<std::size_t>(threads));
    if (useful > 1 && pool()->try_run({chunks, useful, work, context})) return;
    for (std::size_t chunk = 0; chunk < chunks; ++chunk) work(context, chunk);
}

void stop_threads() { pool()->stop(); }

}  // namespace atoll_kernels
