#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>

#include "../loaded.hpp"

namespace atoll_kernels {

// Python objects lent to threads that must not touch Python: a thread that is done with one leaves it here, and whoever
// comes from Python next, with the GIL, lets it go.
class Graveyard {
  public:
    Graveyard() = default;
    Graveyard(const Graveyard&) = delete;
    Graveyard& operator=(const Graveyard&) = delete;
    ~Graveyard() { empty(); }

    // The result may be dropped on any thread, while this graveyard lives.
    std::shared_ptr<const void> lend(Loaded buffer) {
        return {new Grave{std::move(buffer), nullptr}, [this](Grave* grave) { bury(grave); }};
    }

    // With the GIL; an object's end may run Python code and let other threads run, also into here.
    void empty() {
        Grave* grave;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (newest_ == nullptr) return;
            grave = std::exchange(newest_, nullptr);
            ++diggers_;
        }
        while (grave != nullptr) {
            Grave* const next = grave->next;
            delete grave;
            grave = next;
        }
        const std::lock_guard<std::mutex> lock(mutex_);
        if (--diggers_ == 0) done_.notify_all();
    }

    // Without the GIL: until no thread is inside empty. A torch tensor's end gives the GIL away for a moment, and a
    // daemon thread that wants it back when the interpreter has ended would take the process down.
    void wait_for_others() {
        constexpr auto at_most = std::chrono::seconds(5);
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait_for(lock, at_most, [this] { return diggers_ == 0; });
    }

  private:
    struct Grave {
        Loaded buffer;
        Grave* next;
    };

    void bury(Grave* grave) {
        const std::lock_guard<std::mutex> lock(mutex_);
        grave->next = newest_;
        newest_ = grave;
    }

    std::mutex mutex_;  // guards what follows
    std::condition_variable done_;
    Grave* newest_ = nullptr;
    int diggers_ = 0;
};

}  // namespace atoll_kernels
