// Bytes that say where they belong: each depends on its position and on a cookie, so a shifted, swapped, stale or
// missing piece shows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

#include "allocator/types.h"

namespace lowtide::testing {

/// Bytes 8 * index to 8 * index + 7 of pattern `cookie`.
inline std::uint64_t pattern_word(std::uint64_t cookie, Bytes index) {
  std::uint64_t x = ((index + 1) * 0x9E3779B97F4A7C15u) ^ (cookie * 0xD6E8FEB86659FD93u);
  x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93u;
  return x ^ (x >> 29);
}

/// Calls `piece(offset, word, size)` for runs of up to 8 bytes, of which `word` holds those of the pattern, until it
/// returns false.
template <typename Piece>
void for_each_pattern_piece(Bytes size, std::uint64_t cookie, Bytes position, Piece piece) {
  for (Bytes offset = 0; offset < size;) {
    const Bytes skipped = (position + offset) % 8;
    const Bytes length = std::min(8 - skipped, size - offset);
    if (!piece(offset, pattern_word(cookie, (position + offset) / 8) >> (skipped * 8), length)) return;
    offset += length;
  }
}

/// Writes `size` bytes of the pattern, of which the first has position `position`.
inline void fill_pattern(void* memory, Bytes size, std::uint64_t cookie, Bytes position = 0) {
  for_each_pattern_piece(size, cookie, position, [memory](Bytes offset, std::uint64_t word, Bytes length) {
    std::memcpy(static_cast<std::uint8_t*>(memory) + offset, &word, length);
    return true;
  });
}

/// Offset of the first byte that is not of the pattern; nothing if all are.
inline std::optional<Bytes> pattern_mismatch(const void* memory, Bytes size, std::uint64_t cookie, Bytes position = 0) {
  std::optional<Bytes> wrong;
  for_each_pattern_piece(size, cookie, position, [&](Bytes offset, std::uint64_t word, Bytes length) {
    const auto* bytes = static_cast<const std::uint8_t*>(memory) + offset;
    if (std::memcmp(bytes, &word, length) == 0) return true;
    Bytes i = 0;
    while (bytes[i] == static_cast<std::uint8_t>(word >> (i * 8))) ++i;
    wrong = offset + i;
    return false;
  });
  return wrong;
}

inline bool has_pattern(const void* memory, Bytes size, std::uint64_t cookie, Bytes position = 0) {
  return !pattern_mismatch(memory, size, cookie, position).has_value();
}

}  // namespace lowtide::testing
