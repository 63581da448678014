#include "allocator/host_stream.h"

#include <pthread.h>
#include <signal.h>

#include <exception>
#include <system_error>
#include <utility>

#include "allocator/errors.h"
#include "allocator/log.h"

namespace lowtide {
namespace {

/// Blocks signals for a scope, so that a thread started in it never runs the application's handlers. Those that a
/// thread raises by its own access stay open: a fault must kill the process with the right thread on the stack.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t blocked;
    sigfillset(&blocked);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP}) sigdelset(&blocked, fault);
    pthread_sigmask(SIG_BLOCK, &blocked, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

void Completion::pass() noexcept {
  MutexLock lock(mutex_);
  passed_ = true;
  changed_.notify_all();
}

bool Completion::passed() {
  MutexLock lock(mutex_);
  return passed_;
}

void Completion::wait() {
  MutexLock lock(mutex_);
  while (!passed_) changed_.wait(mutex_);
}

HostStream::HostStream(std::string name) : name_(std::move(name)) {}

HostStream::~HostStream() {
  close();
  std::thread thread;
  {
    MutexLock lock(mutex_);
    thread = std::move(thread_);
  }
  if (thread.joinable()) thread.join();
}

void HostStream::enqueue(Task task) {
  MutexLock lock(mutex_);
  queue_.push_back(std::move(task));
  if (!thread_.joinable()) {
    try {
      const SignalsBlocked blocked;
      thread_ = std::thread([this] { run(); });
      ended_ = false;
    } catch (const std::system_error& error) {
      queue_.pop_back();
      throw DriverError("starting the thread of a stream", error.what());
    }
  }
  changed_.notify_all();
}

void HostStream::close() noexcept {
  MutexLock lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

bool HostStream::ended() {
  MutexLock lock(mutex_);
  return ended_;
}

void HostStream::run() noexcept {
  pthread_setname_np(pthread_self(), name_.substr(0, 15).c_str());
  for (;;) {
    Task task;
    {
      MutexLock lock(mutex_);
      while (queue_.empty() && !closed_) changed_.wait(mutex_);
      if (queue_.empty()) {
        ended_ = true;
        return;
      }
      task = std::move(queue_.front());
      queue_.pop_front();
    }
    try {
      task();
    } catch (const std::exception& error) {
      log(LogLevel::Error, "a task on stream {} threw: {}", name_, error.what());
    } catch (...) {
      log(LogLevel::Error, "a task on stream {} threw", name_);
    }
  }
}

}  // namespace lowtide
