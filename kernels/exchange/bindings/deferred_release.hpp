#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>

#include "../../bindings/loaded.hpp"

namespace atoll_kernels {

// Python objects lent to threads that must not touch Python: a thread that is done with one leaves it here, and whoever
// comes from Python next, with the GIL, releases it.
class DeferredRelease {
  public:
    DeferredRelease() = default;
    DeferredRelease(const DeferredRelease&) = delete;
    DeferredRelease& operator=(const DeferredRelease&) = delete;
    ~DeferredRelease() { release_all(); }

    // The result may be dropped on any thread, while this object lives.
    std::shared_ptr<const void> lend(Loaded buffer) {
        return {new Lent{std::move(buffer), nullptr}, [this](Lent* lent) { defer(lent); }};
    }

    // With the GIL; an object's end may run Python code and let other threads run, also into here.
    void release_all() {
        Lent* lent;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (newest_ == nullptr) return;
            lent = std::exchange(newest_, nullptr);
            ++releasing_;
        }
        while (lent != nullptr) {
            Lent* const next = lent->next;
            delete lent;
            lent = next;
        }
        const std::lock_guard<std::mutex> lock(mutex_);
        if (--releasing_ == 0) done_.notify_all();
    }

    // Without the GIL: until no thread is inside release_all. A torch tensor's end gives the GIL away for a moment, and
    // a daemon thread that wants it back when the interpreter has ended would take the process down.
    void wait_for_others() {
        constexpr auto at_most = std::chrono::seconds(5);
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait_for(lock, at_most, [this] { return releasing_ == 0; });
    }

  private:
    struct Lent {
        Loaded buffer;
        Lent* next;
    };

    void defer(Lent* lent) {
        const std::lock_guard<std::mutex> lock(mutex_);
        lent->next = newest_;
        newest_ = lent;
    }

    std::mutex mutex_;  // guards what follows
    std::condition_variable done_;
    Lent* newest_ = nullptr;
    int releasing_ = 0;  // threads inside release_all
};

}  // namespace atoll_kernels
