// cpu/threads.h: how a call's threads begin: with the caller's modes, and so that fork() stays possible.
#pragma once

#include <atomic>
#include <cfenv>

#include <omp.h>
#include <pthread.h>

#include <ATen/Parallel.h>

namespace minimal_attn::cpu {

// After fork() the child has one thread, which would wait forever for the OpenMP threads of its parent. Told to use one
// thread, OpenMP waits for none, neither here nor in PyTorch's operators.
inline std::atomic<bool> has_used_threads{false};
[[maybe_unused]] inline const int registered = pthread_atfork(nullptr, nullptr, [] {
    if (has_used_threads) omp_set_num_threads(1);
});

// Rounding and the treatment of subnormal numbers are modes of a thread. While this lives, the thread has those given.
class Modes {
public:
    explicit Modes(const std::fenv_t &modes) { std::fegetenv(&own), std::fesetenv(&modes); }
    ~Modes() { std::fesetenv(&own); }

private:
    std::fenv_t own;
};

// Calls compute() `threads` times, in as many threads. OpenMP may run several of these calls one after the other.
template <class Compute>
void in_threads(int64_t threads, const Compute &compute) {
    std::fenv_t modes;  // of the calling thread, in which all threads compute
    std::fegetenv(&modes);
    if (threads > 1) has_used_threads = true;
    at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
        const Modes callers_modes(modes);
        compute();
    });
}

}  // namespace minimal_attn::cpu
