// Sizes as people read them in messages.
#pragma once

#include <string>

#include "allocator/types.h"

namespace lowtide {

/// "512 bytes", "1.00 KiB", "3.50 MiB", "2.00 GiB": the wording of torch's out-of-memory messages.
std::string format_bytes(Bytes size);

}  // namespace lowtide
