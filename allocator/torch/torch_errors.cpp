#include "allocator/torch/torch_errors.h"

#include <c10/util/Exception.h>

#include "allocator/errors.h"

namespace lowtide {

void throw_as_torch_error() {
  try {
    throw;
  } catch (const OutOfMemory& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
  } catch (const Error& error) {
    TORCH_CHECK(false, error.what());
  }
  // Unreachable: each handler throws, and an error that is none of Lowtide's leaves the block by itself. The compiler
  // cannot know that a failed check throws.
  throw;
}

const char* reason_of(const std::exception& error) noexcept {
  const auto* const of_torch = dynamic_cast<const c10::Error*>(&error);
  return of_torch != nullptr ? of_torch->what_without_backtrace() : error.what();
}

}  // namespace lowtide
