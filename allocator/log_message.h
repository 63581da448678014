// The log for files that include torch's headers: those bring a version of fmt of their own, beside which log.h does
// not compile.
#pragma once

#include <string_view>

namespace lowtide {

enum class LogLevel { Debug, Info, Warn, Error };

/// Whether a line of this level would be written.
bool log_enabled(LogLevel level) noexcept;

/// Writes `text` to the log of logger.h. What goes wrong meanwhile is dropped.
void log_message(LogLevel level, std::string_view text) noexcept;

}  // namespace lowtide
