#include "device.cuh"

#include <map>
#include <mutex>

namespace atoll_kernels {

cudaMemPool_t scratch_pool(int device) {
    static std::mutex mutex;
    static std::map<int, cudaMemPool_t> pools;
    const std::lock_guard<std::mutex> lock(mutex);
    const auto known = pools.find(device);
    if (known != pools.end()) return known->second;
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    properties.location.id = device;
    cudaMemPool_t pool = nullptr;
    check(cudaMemPoolCreate(&pool, &properties), "making the pool for scratch memory");
    // Enough for the scores of 2^30 entries and more; what a larger call takes is given back.
    std::uint64_t kept_bytes = std::uint64_t{1} << 28;
    check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &kept_bytes), "sizing the scratch pool");
    return pools.emplace(device, pool).first->second;
}

int cuda_device_count() {
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
    cudaGetLastError();  // forget it: it would be reported again by an unrelated later call
    return 0;
}

}  // namespace atoll_kernels
