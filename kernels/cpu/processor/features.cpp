#include "features.hpp"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <thread>

namespace atoll_kernels {
namespace {

Path detect_path() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") ? Path::avx2 : Path::portable;
#else
    return Path::portable;
#endif
}

int detect_threads() {
    int cores = static_cast<int>(std::thread::hardware_concurrency());
    cpu_set_t allowed;
    // Fails beyond 1,024 cores; hardware_concurrency is right there.
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) cores = CPU_COUNT(&allowed);
    if (const char* text = std::getenv("OMP_NUM_THREADS")) {
        const long limit = std::strtol(text, nullptr, 10);  // "4,2" (nested levels) reads as 4; nonsense as 0: no limit
        if (limit > 0) cores = static_cast<int>(std::min<long>(cores, limit));
    }
    return std::max(cores, 1);
}

}  // namespace

Path best_path() {
    static const Path path = detect_path();
    return path;
}

int default_threads() {
    static const int threads = detect_threads();
    return threads;
}

}  // namespace atoll_kernels
