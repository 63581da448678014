#include "allocator/torch/allocator_settings.h"

#include <algorithm>
#include <array>
#include <cctype>

namespace lowtide {
namespace {

/// Settings of how native cuts cudaMalloc's segments, rounds sizes and gives segments back; arenas have no segments and do not
/// round to more than 512 bytes, and no lock is held during cudaMalloc.
constexpr std::array<std::string_view, 6> kWithoutEffect = {
    "max_split_size_mb",          "max_non_split_rounding_mb",
    "roundup_power2_divisions",   "garbage_collection_threshold",
    "release_lock_on_cudamalloc", "large_segment_size_mb"};

bool is_part_of_key(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

bool names(std::string_view settings, std::string_view key) {
  for (auto at = settings.find(key); at != std::string_view::npos; at = settings.find(key, at + 1)) {
    const bool starts = at == 0 || !is_part_of_key(settings[at - 1]);
    const auto end = at + key.size();
    if (starts && (end == settings.size() || !is_part_of_key(settings[end]))) return true;
  }
  return false;
}

}  // namespace

std::string settings_without_effect(std::string_view settings) {
  std::string found;
  for (const std::string_view key : kWithoutEffect) {
    if (!names(settings, key)) continue;
    if (!found.empty()) found += ", ";
    found += key;
  }
  return found;
}

}  // namespace lowtide
