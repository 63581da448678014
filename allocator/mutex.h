// Mutexes that clang's thread-safety analysis understands (-Wthread-safety); elsewhere the annotations vanish.
// Lock order of the whole project: docs/concurrency.md.
#pragma once

#include <mutex>

#if defined(__clang__)
#define LOWTIDE_ANNOTATE(x) __attribute__((x))
#else
#define LOWTIDE_ANNOTATE(x)
#endif

#define LOWTIDE_GUARDED_BY(mutex) LOWTIDE_ANNOTATE(guarded_by(mutex))
#define LOWTIDE_REQUIRES(...) LOWTIDE_ANNOTATE(requires_capability(__VA_ARGS__))
#define LOWTIDE_EXCLUDES(...) LOWTIDE_ANNOTATE(locks_excluded(__VA_ARGS__))

namespace lowtide {

class LOWTIDE_ANNOTATE(capability("mutex")) Mutex {
 public:
  void lock() LOWTIDE_ANNOTATE(acquire_capability()) {
    // Most are held for less time than it takes to put a thread to sleep and wake it.
    for (int tries = 0; tries < kSpins; ++tries) {
      if (mutex_.try_lock()) return;
      relax();
    }
    mutex_.lock();
  }
  void unlock() LOWTIDE_ANNOTATE(release_capability()) { mutex_.unlock(); }
  /// For clang's analysis, where it cannot see that the caller holds this.
  void assert_held() const LOWTIDE_ANNOTATE(assert_capability(this)) {}

 private:
  static constexpr int kSpins = 100;

  static void relax() noexcept {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  std::mutex mutex_;
};

/// Holds a Mutex for a scope.
class LOWTIDE_ANNOTATE(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) LOWTIDE_ANNOTATE(acquire_capability(mutex)) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() LOWTIDE_ANNOTATE(release_capability()) { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

}  // namespace lowtide
