// device.cu: host code of device.h. The headers of its maps and mutexes would cost each other .cu file a second.
#include "device.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

namespace minimal_attn {

// ------------------------------------------------------------------------------ shared memory

cudaError_t allow_shared_memory(const void *kernel, int *ptx_version) {
    thread_local std::map<std::pair<const void *, int>, int> allowed;  // the PTX versions
    int device;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    auto found = allowed.find({kernel, device});
    if (found == allowed.end()) {
        cudaFuncAttributes attributes;
        int most;
        error = cudaFuncGetAttributes(&attributes, kernel);
        if (error == cudaSuccess)
            error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
        if (error == cudaSuccess)
            error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         most - (int)attributes.sharedSizeBytes);
        // A multiprocessor changes its split of L1 and shared memory only when idle, so all kernels ask for one split.
        if (error == cudaSuccess)
            error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                         cudaSharedmemCarveoutMaxShared);
        if (error != cudaSuccess) return error;
        found = allowed.emplace(std::pair(kernel, device), attributes.ptxVersion).first;
    }
    if (ptx_version) *ptx_version = found->second;
    return cudaSuccess;
}

// ------------------------------------------------------------------------------ zeros

constexpr int kArrays = 8;                                      // a device's: for the first streams that ask
constexpr int64_t kZeros = 256 << 10, kMostZeros = kZeros / 4;  // bytes: of an array; of a launch

// A stream's array. In no unnamed namespace, since device.h declares it.
struct ZerosOfStream {
    std::mutex mutex;  // one a stream: a launch blocks while its stream's queue is full
    unsigned char *begin = nullptr;
    int64_t used = kZeros;  // bytes; so the first launch clears the array
};

namespace {
__device__ unsigned char zeros[kArrays][kZeros];

std::mutex zeros_mutex;  // of the map below
// By device and the stream's id, which is unique in a process. A handle may be that of an earlier stream.
std::map<std::pair<int, unsigned long long>, ZerosOfStream> zeros_of_streams;

// The stream's array, or null if the launch needs a memset of its own.
ZerosOfStream *find_zeros(cudaStream_t stream) {
    int device;
    unsigned long long id;  // asked last: CUDA refuses it while the stream is captured
    cudaStreamCaptureStatus status;
    if (cudaGetDevice(&device) != cudaSuccess || cudaStreamIsCapturing(stream, &status) != cudaSuccess ||
        status != cudaStreamCaptureStatusNone || cudaStreamGetId(stream, &id) != cudaSuccess)
        return nullptr;
    const std::lock_guard lock(zeros_mutex);
    const auto found = zeros_of_streams.find({device, id});
    if (found != zeros_of_streams.end()) return &found->second;
    const auto is_of_device = [&](const auto &entry) { return entry.first.first == device; };
    const auto n = std::count_if(zeros_of_streams.begin(), zeros_of_streams.end(), is_of_device);
    void *address;
    if (n == kArrays) return nullptr;
    if (cudaGetSymbolAddress(&address, zeros) != cudaSuccess) return cudaGetLastError(), nullptr;  // memory is short
    ZerosOfStream &array = zeros_of_streams[{device, id}];
    array.begin = (unsigned char *)address + n * kZeros;
    return &array;
}

// The next part of the array, which must be locked; null if the memset fails.
unsigned char *take_zeros(ZerosOfStream &array, int64_t bytes, cudaStream_t stream) {
    if (array.used + bytes > kZeros) {  // by the stream's order the memset follows the kernels that use the array
        if (cudaMemsetAsync(array.begin, 0, kZeros, stream) != cudaSuccess) return nullptr;
        array.used = 0;
    }
    unsigned char *const part = array.begin + array.used;
    array.used += (bytes + 127) / 128 * 128;
    return part;
}
}  // namespace

Zeros::Zeros(void *workspace, int64_t bytes, cudaStream_t stream) : memory(nullptr), array(nullptr) {
    if (bytes == 0) return;
    // Relaxed, or these questions to CUDA could end another thread's capture of a graph.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (bytes <= kMostZeros) array = find_zeros(stream);
    if (array) {
        array->mutex.lock();
        memory = take_zeros(*array, bytes, stream);
    }
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (memory) return;
    memory = workspace;
    error = cudaMemsetAsync(workspace, 0, bytes, stream);
}

Zeros::~Zeros() {
    if (array) array->mutex.unlock();
}

}  // namespace minimal_attn
