// A stream of the host device: a thread that runs tasks in the order they were queued.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <string>
#include <thread>

#include "allocator/mutex.h"

namespace lowtide {

/// Passes once. What one record() of an event stands for. Safe from any thread.
class Completion {
 public:
  void pass() noexcept LOWTIDE_EXCLUDES(mutex_);
  bool passed() LOWTIDE_EXCLUDES(mutex_);
  /// Blocks this thread until pass().
  void wait() LOWTIDE_EXCLUDES(mutex_);

 private:
  Mutex mutex_;
  std::condition_variable_any changed_;
  bool passed_ LOWTIDE_GUARDED_BY(mutex_) = false;
};

/// Safe from any thread, but for destruction. Tasks run without any lock of the stream, so they may queue more work.
/// The thread starts with the first task: a stream that nobody uses costs nothing.
class HostStream {
 public:
  using Task = std::function<void()>;

  /// `name` is the thread's, of which the system shows 15 characters.
  explicit HostStream(std::string name);
  /// Runs what is queued, then ends the thread.
  ~HostStream();
  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;

  /// Throws DriverError if the thread cannot be started. Pre: not closed.
  void enqueue(Task task) LOWTIDE_EXCLUDES(mutex_);
  /// Nothing more will be queued: the thread ends when the queue is empty. Does not wait.
  void close() noexcept LOWTIDE_EXCLUDES(mutex_);
  /// True once destruction does not block.
  bool ended() LOWTIDE_EXCLUDES(mutex_);

 private:
  void run() noexcept LOWTIDE_EXCLUDES(mutex_);

  const std::string name_;
  Mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<Task> queue_ LOWTIDE_GUARDED_BY(mutex_);
  bool closed_ LOWTIDE_GUARDED_BY(mutex_) = false;
  bool ended_ LOWTIDE_GUARDED_BY(mutex_) = true;
  std::thread thread_ LOWTIDE_GUARDED_BY(mutex_);
};

}  // namespace lowtide
