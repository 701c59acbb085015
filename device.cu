// device.cu: host code of device.h. The headers of its set and its mutex would cost each other .cu file a second.
#include "device.h"

#include <map>
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

cudaError_t allow_all_shared_memory(const void *kernel, int &ptx_version) {
    thread_local std::map<std::pair<const void *, int>, int> allowed;  // the PTX versions
    int device;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    const auto found = allowed.find({kernel, device});
    if (found != allowed.end()) return ptx_version = found->second, cudaSuccess;
    cudaFuncAttributes attributes;
    int most;
    error = cudaFuncGetAttributes(&attributes, kernel);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     most - (int)attributes.sharedSizeBytes);
    if (error == cudaSuccess) allowed[{kernel, device}] = ptx_version = attributes.ptxVersion;
    return error;
}

namespace {
std::mutex launch_mutex;
}  // namespace

LaunchLock::LaunchLock() { launch_mutex.lock(); }
LaunchLock::~LaunchLock() { launch_mutex.unlock(); }

namespace {
constexpr int64_t kZeros = 256 << 10, kMostZeros = kZeros / 16;  // bytes: of all, of a launch
__device__ unsigned char array_of_zeros[kZeros];

// A device's array. It belongs to the first default stream that asks: a green context has another one.
struct ArrayOfZeros {
    unsigned char *begin = nullptr;
    int64_t used = kZeros;
    unsigned long long stream_id;
};
std::mutex zeros_mutex;
std::map<int, ArrayOfZeros> zeros_of_device;

// Null if the launch needs a memset of its own.
unsigned char *take_zeros(int64_t bytes, cudaStream_t stream) {
    int device;
    unsigned long long stream_id;
    if (cudaGetDevice(&device) != cudaSuccess || cudaStreamGetId(stream, &stream_id) != cudaSuccess) return nullptr;
    ArrayOfZeros &zeros = zeros_of_device[device];
    if (!zeros.begin) {
        if (cudaGetSymbolAddress((void **)&zeros.begin, array_of_zeros) != cudaSuccess) return nullptr;
        zeros.stream_id = stream_id;
    }
    if (stream_id != zeros.stream_id) return nullptr;
    if (zeros.used + bytes > kZeros) {  // the stream's order keeps it behind the launches that use it
        if (cudaMemsetAsync(zeros.begin, 0, kZeros, stream) != cudaSuccess) return nullptr;
        zeros.used = 0;
    }
    unsigned char *const part = zeros.begin + zeros.used;
    zeros.used += (bytes + 127) / 128 * 128;
    return part;
}
}  // namespace

Zeros::Zeros(void *workspace, int64_t bytes, cudaStream_t stream) : memory(nullptr) {
    if (bytes == 0) return;
    if (stream == nullptr && bytes <= kMostZeros) {
        zeros_mutex.lock();
        memory = take_zeros(bytes, stream);
        if (memory) return;
        zeros_mutex.unlock();
    }
    memory = workspace, by_memset = true;
    error = cudaMemsetAsync(workspace, 0, bytes, stream);
}

Zeros::~Zeros() {
    if (memory && !by_memset) zeros_mutex.unlock();
}

}  // namespace minimal_attn
