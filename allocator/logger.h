// The logger behind log.h: "lowtide", on stderr. Its level comes from the environment variable LOWTIDE_LOG: trace,
// debug, info, warn (the default), error or off. Only the logger itself is included here, no sinks and no registry.
#pragma once

#include <spdlog/logger.h>

namespace lowtide {

/// Never destroyed, so it may be used by threads and destructors that run while the process exits.
spdlog::logger& logger() noexcept;

}  // namespace lowtide
