// Turns Lowtide's errors into torch's. The only place that does.
#pragma once

#include <exception>

namespace lowtide {

/// Throws the error being handled as torch's: OutOfMemory becomes c10::OutOfMemoryError (torch.OutOfMemoryError in
/// Python), other errors of Lowtide become c10::Error (RuntimeError); anything else passes as it is.
/// Pre: called inside a catch block.
[[noreturn]] void throw_as_torch_error();

/// What `error` says, without the backtrace that torch's errors carry. Lives as long as the error.
const char* reason_of(const std::exception& error) noexcept;

/// The result of `call`, its errors as torch's.
template <class Call>
auto with_torch_errors(Call&& call) -> decltype(call()) {
  try {
    return call();
  } catch (...) {
    throw_as_torch_error();
  }
}

}  // namespace lowtide
