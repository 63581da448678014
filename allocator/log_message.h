// The log for files that include torch's headers: those bring a version of fmt of their own, beside which log.h does
// not compile. Also for code that must not throw.
#pragma once

#include <string_view>

namespace lowtide {

enum class LogLevel { Debug, Info, Warn, Error };

/// Writes `text` to the log of log.h. What goes wrong meanwhile is dropped.
void log_message(LogLevel level, std::string_view text) noexcept;

}  // namespace lowtide
