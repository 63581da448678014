// The C functions. What kind of devices a process uses is decided once, so each case runs in a process of its own.
#include "allocator/plugin.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <iostream>

#include "allocator/allocation_scope.h"
#include "allocator/cuda_device.h"
#include "allocator/device_registry.h"

namespace lowtide {
namespace {

class PluginDeathTest : public ::testing::Test {
 protected:
  PluginDeathTest() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

/// Ends the process with `status`, saying which expectation failed.
void require(bool holds, const char* what) {
  if (holds) return;
  std::cerr << "not so: " << what << " (last error: " << lowtide_last_error() << ")\n";
  std::exit(1);
}

bool last_error_has(const char* part) { return std::strstr(lowtide_last_error(), part) != nullptr; }

[[noreturn]] void use_without_cuda() {
  require(std::strlen(lowtide_last_error()) == 0, "no error at first");
  lowtide_init(0);
  require(lowtide_malloc(1000, 0, nullptr) == nullptr, "null where there is no CUDA");
  require(last_error_has("no CUDA device"), "the reason is said");
  lowtide_free(nullptr, 0, 0, nullptr);
  require(std::strlen(lowtide_last_error()) == 0, "a call that works clears the error");
  int local = 0;
  lowtide_free(&local, 4, 0, nullptr);
  require(last_error_has("no block"), "a foreign pointer is refused");
  lowtide_record_stream(nullptr, nullptr);
  lowtide_record_stream(&local, nullptr);
  require(std::strlen(lowtide_last_error()) == 0, "foreign memory is ignored by record_stream");
  std::size_t size = 7;
  require(lowtide_base_alloc(&local, &size) == &local, "a foreign pointer is its own base");
  require(size == 7 && last_error_has("no block"), "and its size is not known");
  lowtide_set_memory_fraction(0.5, 0);
  require(last_error_has("no CUDA device"), "no allocator to limit");
  lowtide_reset();
  require(lowtide_malloc(-1, 0, nullptr) == nullptr && last_error_has("negative"), "a negative size");
  require(device_kind() == DeviceKind::None, "nothing was chosen");
  std::exit(0);
}

[[noreturn]] void use_with_cuda() {
  require(lowtide_malloc(0, 0, nullptr) == nullptr, "no bytes, no memory");
  require(std::strlen(lowtide_last_error()) == 0, "which is no error");
  auto* block = static_cast<char*>(lowtide_malloc(1000, 0, nullptr));
  require(block != nullptr, "a block");
  std::size_t size = 0;
  require(lowtide_base_alloc(block + 10, &size) == block && size == 1024, "its base");
  require(lowtide_malloc(1, 1000, nullptr) == nullptr && last_error_has("no device 1000"), "an unknown device");
  lowtide_set_memory_fraction(2.0, 0);
  require(last_error_has("between 0 and 1"), "an absurd fraction");
  lowtide_free(block + 512, 1, 0, nullptr);
  require(last_error_has("no block"), "the middle of a block");
  enter_scope(OwnerId{12});
  void* mine = lowtide_malloc(1000, 0, nullptr);
  leave_scope(OwnerId{12});
  require(allocator_of(0).find(to_address(mine))->owner == OwnerId{12}, "the open region owns it");
  lowtide_free(mine, 1000, 0, nullptr);
  lowtide_free(block, 1000, 0, nullptr);
  require(std::strlen(lowtide_last_error()) == 0, "freed");
  lowtide_reset();
  std::exit(0);
}

[[noreturn]] void use_beside_the_host_device() {
  select_devices(DeviceKind::Host, {.devices = 1, .memory = 16_MiB});
  require(lowtide_malloc(1000, 0, nullptr) == nullptr, "no host memory for who expects CUDA's");
  require(last_error_has("already uses the host device"), "the reason is said");
  std::exit(0);
}

TEST_F(PluginDeathTest, WorksOrSaysWhyNot) {
  if (cuda_device_count() == 0) {
    EXPECT_EXIT(use_without_cuda(), ::testing::ExitedWithCode(0), "");
  } else {
    EXPECT_EXIT(use_with_cuda(), ::testing::ExitedWithCode(0), "");
  }
}

TEST_F(PluginDeathTest, RefusesBesideTheHostDevice) {
  EXPECT_EXIT(use_beside_the_host_device(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace lowtide
