// The kernels without Python, for the sanitizers: scripts/sanitize builds and runs this. Buffers come from malloc with
// no slack, at every misalignment, so that a read or write outside is seen. Exits with 0 if all is well.
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "../../../kernels/cpu/processor/thread_pool.hpp"
#include "../../../kernels/cpu/reduce/squared_norm.hpp"

using namespace atoll_kernels;

void check_sparse();    // sparse.cpp
void check_exchange();  // exchange.cpp
void check_planning();  // planning.cpp
void check_units();     // units.cpp

namespace {

void expect(bool holds, const char* what, std::size_t n, int threads) {
    if (holds) return;
    std::fprintf(stderr, "FAILED: %s (n = %zu, threads = %d)\n", what, n, threads);
    std::_Exit(1);
}

// n floats that begin `shift` entries into an allocation of exactly shift + n.
class Floats {
  public:
    Floats(std::size_t n, std::size_t shift, float first) : memory_(new float[shift + n]), at_(memory_.get() + shift) {
        for (std::size_t i = 0; i < n; ++i) at_[i] = first + 0.25F * static_cast<float>(i % 1000);
    }
    float* get() const { return at_; }

  private:
    std::unique_ptr<float[]> memory_;
    float* at_;
};

bool same(double a, double b) { return std::memcmp(&a, &b, sizeof a) == 0; }

void check_squared_norm(std::size_t n, std::size_t shift) {
    const Floats x(n, shift, -3);
    const double expected = squared_norm(x.get(), n, 1, Path::portable);
    double slow = 0;
    for (std::size_t i = 0; i < n; ++i) slow += static_cast<double>(x.get()[i]) * x.get()[i];
    expect(std::fabs(expected - slow) <= 1e-12 * slow, "squared_norm is far from the plain sum", n, 1);
    for (const int threads : {1, 2, 5}) {
        expect(same(squared_norm(x.get(), n, threads, best_path()), expected), "squared_norm's bits differ", n,
               threads);
    }
}

// Several callers at once, the pool stopped under them and started again.
void check_many_callers() {
    constexpr std::size_t n = 5 * chunk_entries + 17;
    const Floats x(n, 1, 2);
    const double expected = squared_norm(x.get(), n, 1, best_path());
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 4; ++caller) {
        callers.emplace_back([&, caller] {
            for (int turn = 0; turn < 20; ++turn) {
                expect(same(squared_norm(x.get(), n, 4, best_path()), expected), "a caller's sum differs", n, 4);
                if (caller == 0 && turn % 5 == 0) stop_threads();
            }
        });
    }
    for (std::thread& caller : callers) caller.join();
}

void check_fork() {
    constexpr std::size_t n = 4 * chunk_entries;
    const Floats x(n, 0, 1);
    const double expected = squared_norm(x.get(), n, 3, best_path());
    const pid_t child = fork();
    if (child == 0) {
        alarm(20);
        const bool good = same(squared_norm(x.get(), n, 3, best_path()), expected);
        stop_threads();
        std::_Exit(good ? 0 : 1);
    }
    int status = -1;
    expect(waitpid(child, &status, 0) == child && status == 0, "the forked child failed", n, 3);
}

}  // namespace

int main(int argc, char** argv) {
    for (const std::size_t n : {0, 1, 7, 31, 32, 33, 1023, 1025}) {
        for (std::size_t shift = 0; shift < 8; ++shift) {
            check_squared_norm(n, shift);
        }
    }
    for (const std::size_t n : {chunk_entries - 1, chunk_entries + 1, 3 * chunk_entries + 33}) {
        check_squared_norm(n, 3);
    }
    check_sparse();
    check_units();
    check_exchange();
    check_planning();
    check_many_callers();
    const bool may_fork = argc < 2 || std::strcmp(argv[1], "--no-fork") != 0;
    if (may_fork) check_fork();
    stop_threads();
    std::puts("ok");
}
