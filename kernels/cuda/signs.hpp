#pragma once

#include <cstddef>

#include "../cpu/codec/signs.hpp"
#include "device.hpp"

// The CUDA twins of kernels/cpu/codec/signs.hpp, with the same bits. They return when the
// work is queued.
namespace atoll_kernels {

void sign_encode_cuda(float* values, std::size_t n, const SignCode& code, const Queue& queue);

void sign_add_cuda(const SignCode& code, float* out, std::size_t n, const Queue& queue);

}  // namespace atoll_kernels
