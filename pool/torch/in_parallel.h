// A loop over many independent, small pieces of work, on a few threads.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <exception>
#include <mutex>
#include <thread>

namespace lowtide {

/// Calls `body(i)` for every i below `count`, on as many threads as the process has cores, up to eight, where there is
/// enough to do to be worth starting them (a thread takes about 30 µs). Each thread takes neighbours, in order. Returns
/// when all ran; throws the first exception that one threw, after the others ended.
template <typename Body>
void in_parallel(std::size_t count, const Body& body) {
  constexpr std::size_t kWorthAThread = 2048;
  constexpr std::size_t kMostThreads = 8;
  static const std::size_t cores = std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, kMostThreads);
  const std::size_t parts = std::clamp<std::size_t>(count / kWorthAThread, 1, cores);
  std::mutex mutex;
  std::exception_ptr failure;  // mutex
  const auto run = [&](std::size_t part) {
    try {
      for (std::size_t i = count * part / parts; i < count * (part + 1) / parts; ++i) body(i);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!failure) failure = std::current_exception();
    }
  };
  std::array<std::thread, kMostThreads> threads;  // without an allocation: callers may be noexcept
  std::size_t started = 1;                        // part 0 is this thread's
  try {
    for (; started < parts; ++started) threads[started] = std::thread(run, started);
  } catch (const std::exception&) {
    // No more threads to be had: the parts without one run here.
  }
  run(0);
  for (std::size_t part = started; part < parts; ++part) run(part);
  for (std::size_t part = 1; part < started; ++part) threads[part].join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace lowtide
