// The project's log. Formats first and logs text: spdlog's own templates take a compiler four seconds per file.
#pragma once

#include <fmt/core.h>

#include <utility>

#include "allocator/log_message.h"

namespace lowtide {

/// Writes one line to the log of logger.h. What goes wrong meanwhile is dropped.
template <class... Args>
void log(LogLevel level, fmt::format_string<Args...> format, Args&&... args) noexcept {
  if (!log_enabled(level)) return;
  try {
    log_message(level, fmt::format(format, std::forward<Args>(args)...));
  } catch (...) {
  }
}

}  // namespace lowtide
