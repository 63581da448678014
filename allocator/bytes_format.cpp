#include "allocator/bytes_format.h"

#include <fmt/format.h>

namespace lowtide {

std::string format_bytes(Bytes size) {
  const auto in_units_of = [size](Bytes unit) { return static_cast<double>(size) / static_cast<double>(unit); };
  if (size < 1_KiB) return fmt::format("{} bytes", size);
  if (size < 1_MiB) return fmt::format("{:.2f} KiB", in_units_of(1_KiB));
  if (size < 1_GiB) return fmt::format("{:.2f} MiB", in_units_of(1_MiB));
  return fmt::format("{:.2f} GiB", in_units_of(1_GiB));
}

}  // namespace lowtide
