// PYTORCH_CUDA_ALLOC_CONF: what of it Lowtide's memory does not follow. torch parses it, and refuses keys that it does not know.
// per_process_memory_fraction is followed; expandable_segments asks for what every arena is; the pinned_ settings are those of
// torch's allocator of host memory, and backend is looked at by install.h.
#pragma once

#include <string>
#include <string_view>

namespace lowtide {

/// The keys in `settings` ("key:value,...") that Lowtide's memory does not follow, as "a, b"; empty if there are none.
std::string settings_without_effect(std::string_view settings);

}  // namespace lowtide
