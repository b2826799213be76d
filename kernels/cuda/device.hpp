#pragma once

#include <stdexcept>

namespace atoll_kernels {

class CudaError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

struct Queue {  // where the buffers are, and the stream (a cudaStream_t) that the work goes to
    int device;
    void* stream;
};

// 0 without a driver, without a device, or if the driver is too old for this build.
int cuda_device_count();

}  // namespace atoll_kernels
