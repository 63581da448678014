#include "allocator/fork_guard.h"

#include <pthread.h>

#include <atomic>

#include "allocator/errors.h"

namespace lowtide {
namespace {

/// Forks between the process that loaded this library and this one.
std::atomic<unsigned> forks_so_far{0};

void count_fork() { forks_so_far.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

ForkGuard::ForkGuard() {
  // A counter that the child's handler moves is cheaper to compare than getpid(), which is a system call.
  static const int registered = pthread_atfork(nullptr, nullptr, &count_fork);
  if (registered != 0) throw DriverError("pthread_atfork", "no memory for the handler");
  forks_ = forks_so_far.load(std::memory_order_relaxed);
}

bool ForkGuard::in_child() const noexcept { return forks_so_far.load(std::memory_order_relaxed) != forks_; }

void ForkGuard::check() const {
  if (!in_child()) return;
  throw Misuse(
      "the process was forked; device memory, streams and offload regions belong to the parent. "
      "Start workers with the \"spawn\" method, or allocate only after the fork");
}

}  // namespace lowtide
