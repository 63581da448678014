#include "allocator/logger.h"

#include <spdlog/sinks/stdout_sinks.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <string_view>

namespace lowtide {
namespace {

constexpr spdlog::level::level_enum kDefaultLevel = spdlog::level::warn;

std::optional<spdlog::level::level_enum> parse_level(std::string_view word) {
  if (word == "trace") return spdlog::level::trace;
  if (word == "debug") return spdlog::level::debug;
  if (word == "info") return spdlog::level::info;
  if (word == "warn") return spdlog::level::warn;
  if (word == "error") return spdlog::level::err;
  if (word == "off") return spdlog::level::off;
  return std::nullopt;
}

spdlog::logger* make_logger() {
  // Not in spdlog's registry: that one is destroyed at exit, and an application may call spdlog::shutdown().
  auto* logger = new spdlog::logger("lowtide", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_pattern("%Y-%m-%d %H:%M:%S.%e [%n %P] %l: %v");
  logger->set_level(kDefaultLevel);
  const char* word = std::getenv("LOWTIDE_LOG");
  if (word == nullptr || *word == '\0') return logger;
  if (const auto level = parse_level(word)) {
    logger->set_level(*level);
  } else {
    logger->warn("LOWTIDE_LOG={} is none of trace, debug, info, warn, error, off; using warn", word);
  }
  return logger;
}

}  // namespace

spdlog::logger& logger() noexcept {
  static spdlog::logger* const instance = make_logger();
  return *instance;
}

}  // namespace lowtide
