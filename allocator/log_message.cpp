#include "allocator/log_message.h"

#include "allocator/logger.h"

namespace lowtide {
namespace {

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::Debug:
      return spdlog::level::debug;
    case LogLevel::Info:
      return spdlog::level::info;
    case LogLevel::Warn:
      return spdlog::level::warn;
    case LogLevel::Error:
      break;
  }
  return spdlog::level::err;
}

}  // namespace

bool log_enabled(LogLevel level) noexcept { return logger().should_log(to_spdlog(level)); }

void log_message(LogLevel level, std::string_view text) noexcept {
  try {
    logger().log(to_spdlog(level), spdlog::string_view_t(text.data(), text.size()));
  } catch (...) {
  }
}

}  // namespace lowtide
