// What Lowtide throws. After any of these the call has changed nothing, unless its own comment says otherwise.
#pragma once

#include <stdexcept>
#include <string>

#include "allocator/types.h"

namespace lowtide {

/// Base of all errors of Lowtide.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The device cannot supply `requested` bytes. The call may be retried once memory was given back.
class OutOfMemory : public Error {
 public:
  OutOfMemory(int device, Bytes requested, const std::string& message)
      : Error(message), device_(device), requested_(requested) {}
  int device() const noexcept { return device_; }
  Bytes requested() const noexcept { return requested_; }

 private:
  int device_;
  Bytes requested_;
};

/// The machine, or the budget the user set, does not allow the host memory an eviction needs.
class HostMemoryError : public Error {
 public:
  using Error::Error;
};

/// A call of the device's driver failed: which call, with what arguments, and the driver's name of the error.
class DriverError : public Error {
 public:
  DriverError(const std::string& call, const std::string& reason) : Error(call + " failed: " + reason) {}
};

/// The caller asked for something that makes no sense here; the message says what to do instead.
class Misuse : public Error {
 public:
  using Error::Error;
};

}  // namespace lowtide
