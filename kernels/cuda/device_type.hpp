#pragma once

#include <nanobind/ndarray.h>

#include <cstdint>

namespace atoll_kernels {

// The device that the buffers of the CUDA binding must lie on. The CPU only where tests/kernels runs the kernels
// without a GPU.
#if defined(ATOLL_CUDA_ON_CPU)
constexpr int cuda = nanobind::device::cpu::value;
#else
constexpr int cuda = nanobind::device::cuda::value;
#endif

// Queueing may block for as long as the device is behind, however short the buffer is.
constexpr std::size_t always = SIZE_MAX;

inline void* stream_of(std::uintptr_t handle) { return reinterpret_cast<void*>(handle); }

}  // namespace atoll_kernels
