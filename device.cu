// device.cu: host code of device.h. The headers of its set and its mutex would cost each other .cu file a second.
#include "device.h"

#include <mutex>
#include <set>

namespace minimal_attn {

cudaError_t allow_shared_memory(const void *kernel, int bytes) {
    thread_local std::set<std::pair<const void *, int>> allowed;
    int device;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess || allowed.count({kernel, device})) return error;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error == cudaSuccess) allowed.insert({kernel, device});
    return error;
}

namespace {
std::mutex launch_mutex;
}  // namespace

LaunchLock::LaunchLock() { launch_mutex.lock(); }
LaunchLock::~LaunchLock() { launch_mutex.unlock(); }

}  // namespace minimal_attn
