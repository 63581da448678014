#include <c10/util/StringUtil.h>

#include "allocator/torch/version_adapter.h"

// Exported by libtorch_cpu. Weak, so that a torch without it is refused by name instead of failing to load.
extern "C" __attribute__((weak)) std::uint64_t aoti_torch_abi_version();

namespace lowtide {
namespace {

constexpr unsigned byte_of(std::uint64_t version, int shift) { return static_cast<unsigned>(version >> shift) & 0xffU; }

}  // namespace

std::string torch_mismatch() {
  return torch_mismatch(aoti_torch_abi_version != nullptr ? aoti_torch_abi_version() : 0);
}

std::string torch_mismatch(std::uint64_t running) {
  const unsigned major = byte_of(running, 56);
  const unsigned minor = byte_of(running, 48);
  if (major == TORCH_VERSION_MAJOR && minor == TORCH_VERSION_MINOR) return {};
  const std::string found = running == 0 ? "x.y.z" : c10::str(major, ".", minor, ".", byte_of(running, 40));
  return c10::str("Lowtide was built for torch " TORCH_VERSION " and the running torch ",
                  running == 0 ? "does not state its version" : "is " + found,
                  "; torch's allocator interface differs between versions. Rebuild Lowtide against the running torch: "
                  "`pip install --no-build-isolation --force-reinstall .` in its source tree, or `make build TORCH=",
                  found, "` there");
}

}  // namespace lowtide
