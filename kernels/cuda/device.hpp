#pragma once

#include <stdexcept>

namespace atoll_kernels {

class CudaError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// 0 without a driver, without a device, or if the driver is too old for this build.
int cuda_device_count();

}  // namespace atoll_kernels
