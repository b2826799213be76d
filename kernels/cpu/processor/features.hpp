#pragma once

// Not "atoll": the C library has a function of that name.
namespace atoll_kernels {

// The body of a kernel that runs. Both give the same bits; the portable one is what a processor without AVX2 gets.
enum class Path { portable, avx2 };

Path best_path();

// Threads to use when the caller leaves it open: the cores this process may run on, at most OMP_NUM_THREADS.
int default_threads();

}  // namespace atoll_kernels

// The body of a kernel is written once, as an always_inline function, and compiled into a plain function and into one
// for AVX2 by run_on, below. A separate file with -mavx2 would be wrong: the linker might keep its copy of a shared inline
// function, and an older processor would then meet AVX2 instructions outside the kernels.
#if defined(__x86_64__)
#define ATOLL_TARGET_AVX2 __attribute__((target("avx2")))
#else
#define ATOLL_TARGET_AVX2
#endif
#if defined(__CUDACC__)
#define ATOLL_INLINE __host__ __device__ inline
#else
#define ATOLL_INLINE inline __attribute__((always_inline))
#endif

namespace atoll_kernels {

template <auto body, typename... Arguments>
ATOLL_TARGET_AVX2 auto run_avx2(const Arguments&... arguments) {
    return body(arguments...);
}

// Returns what `body` returns, by the code for this path.
template <auto body, typename... Arguments>
auto run_on(Path path, const Arguments&... arguments) {
    return path == Path::avx2 ? run_avx2<body>(arguments...) : body(arguments...);
}

}  // namespace atoll_kernels
