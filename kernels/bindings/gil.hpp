#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

#include <cstddef>

namespace atoll_kernels {

// Lets other Python threads run for as long as it lives, unless the work is too short to be worth it.
//
// Unlike nanobind's: a daemon thread that asks for the GIL while the interpreter exits is ended by Python (before 3.14)
// with pthread_exit, whose unwinding must not leave a destructor, so the process would abort. Such a thread sleeps here
// until the process is gone, as Python 3.14 does it.
class GilReleased {
  public:
    explicit GilReleased(std::size_t entries) : state_(entries > short_entries ? PyEval_SaveThread() : nullptr) {}
    GilReleased(const GilReleased&) = delete;
    GilReleased& operator=(const GilReleased&) = delete;
    ~GilReleased() {
        if (state_ == nullptr) return;
        try {
            PyEval_RestoreThread(state_);
        } catch (abi::__forced_unwind&) {
            while (true) pause();
        }
    }

  private:
    static constexpr std::size_t short_entries = std::size_t{1} << 13;  // a few microseconds
    PyThreadState* state_;
};

// Returns what `work` returns, with the GIL released meanwhile.
template <typename Work>
auto without_gil(std::size_t entries, const Work& work) {
    const GilReleased released(entries);
    return work();
}

}  // namespace atoll_kernels
