// What the log says while this lives, as text. It goes to stderr as well.
#pragma once

#include <spdlog/sinks/ostream_sink.h>

#include <memory>
#include <sstream>
#include <string>

#include "allocator/logger.h"

namespace lowtide::testing {

/// Pre: no other thread logs while one is made or destroyed.
class LogCapture {
 public:
  LogCapture() { logger().sinks().push_back(std::make_shared<spdlog::sinks::ostream_sink_mt>(text_)); }
  ~LogCapture() { logger().sinks().pop_back(); }
  LogCapture(const LogCapture&) = delete;
  LogCapture& operator=(const LogCapture&) = delete;

  std::string text() const { return text_.str(); }

 private:
  std::ostringstream text_;
};

}  // namespace lowtide::testing
