// What differs between the minor releases of torch that this bridge can be built for, and the check that the running
// torch is the one it was built for. Nothing else under allocator/torch/ mentions a version.
//
// torch's allocator classes have no stable ABI: virtual tables and structs passed by value change with nearly every
// minor release, so a bridge built for another minor would corrupt memory without a word. Hence one build per minor.
// Every function is marked `override`: what this table gets wrong does not compile.
#pragma once

#include <torch/headeronly/version.h>

#include <cstdint>
#include <string>

#if TORCH_VERSION_MAJOR != 2 || TORCH_VERSION_MINOR < 11 || TORCH_VERSION_MINOR > 15
#error "Lowtide knows torch 2.11 to 2.15. For another minor, add its line to allocator/torch/version_adapter.h."
#endif

// 2.11  the base of this bridge
// 2.12  taken to be as 2.11
#define LOWTIDE_TORCH_2_13 \
  (TORCH_VERSION_MINOR >= 13)  // mark captures, context of a pointer, rejections, resize in place
#define LOWTIDE_TORCH_2_14 (TORCH_VERSION_MINOR >= 14)  // annotations of live blocks
// 2.15  as 2.14

namespace lowtide {

/// Why this build does not fit the running torch, naming both versions and the remedy; empty if it fits.
std::string torch_mismatch();

/// The same for a running torch that states `running` (0: it states none) as its version, in the layout of
/// TORCH_ABI_VERSION: one byte each of major, minor and patch on top.
std::string torch_mismatch(std::uint64_t running);

}  // namespace lowtide
