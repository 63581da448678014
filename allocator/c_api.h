// How C functions report errors: no exception leaves them, the text stays with the thread.
#pragma once

#include <exception>
#include <string>
#include <utility>

#include "allocator/log.h"

namespace lowtide {

std::string& last_error() noexcept;

/// Runs `body` and returns its result; on an exception keeps and logs its text and returns `failed`.
template <class Result, class Body>
Result c_call(const char* function, Result failed, Body&& body) noexcept {
  try {
    last_error().clear();
    return std::forward<Body>(body)();
  } catch (const std::exception& error) {
    try {
      last_error() = error.what();
      log(LogLevel::Error, "{}: {}", function, error.what());
    } catch (...) {
      // Out of memory for the text of an error: the result alone has to tell.
    }
    return failed;
  }
}

}  // namespace lowtide
