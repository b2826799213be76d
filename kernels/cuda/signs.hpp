#pragma once

#include <cstddef>

#include "../cpu/codec/signs.hpp"

// The CUDA twins of kernels/cpu/codec/signs.hpp, with the same bits. Pointers are to the memory of device `device`;
// `stream` is one of its cudaStream_t. They return when the work is queued.
namespace atoll_kernels {

void sign_encode_cuda(float* values, std::size_t n, const SignCode& code, int device, void* stream);

void sign_add_cuda(const SignCode& code, float* out, std::size_t n, int device, void* stream);

}  // namespace atoll_kernels
