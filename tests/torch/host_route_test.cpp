// The parts of the bridge that no GPU has a share in: CPU tensors of regions, errors, texts, the version check.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <optional>

#include "allocator/allocation_scope.h"
#include "allocator/device_registry.h"
#include "allocator/errors.h"
#include "allocator/torch/install.h"
#include "allocator/torch/oom_message.h"
#include "allocator/torch/torch_errors.h"
#include "allocator/torch/version_adapter.h"

namespace lowtide {
namespace {

using ::testing::HasSubstr;

constexpr OwnerId kRegion{5};

class Scope {
 public:
  Scope() { enter_scope(kRegion); }
  ~Scope() { leave_scope(kRegion); }
};

class HostRouteTest : public ::testing::Test {
 protected:
  HostRouteTest() { install_allocator(InstallDevice::Host, {.devices = 1, .memory = 256_MiB}); }
  static bool is_ours(const at::Tensor& tensor) { return owner_of(to_address(tensor.data_ptr())) != nullptr; }
};

TEST_F(HostRouteTest, TensorsOfARegionAreOursAndNoOthers) {
  EXPECT_EQ(installed_device(), "host");
  EXPECT_FALSE(is_ours(at::ones({1000})));
  std::optional<at::Tensor> inside;
  {
    const Scope scope;
    inside = at::full({1000}, 3.0F);
  }
  EXPECT_TRUE(is_ours(*inside));
  EXPECT_EQ(allocator_of(0).live_blocks(kRegion).size(), 1U);
  EXPECT_EQ((*inside + 1).sum().item<float>(), 4000.0F);
  inside.reset();
  EXPECT_TRUE(allocator_of(0).live_blocks(kRegion).empty());
}

TEST_F(HostRouteTest, StoragesGrowWhereTheyAreAsked) {
  at::Tensor outside = at::ones({10});
  at::Tensor inside = at::ones({10});
  const Scope scope;
  inside.resize_({100'000});
  EXPECT_TRUE(is_ours(inside));
  EXPECT_FALSE(is_ours(outside));
  EXPECT_EQ(inside[9].item<float>(), 1.0F);
}

TEST_F(HostRouteTest, RawBlocksOfBothKindsAreFreed) {
  c10::Allocator* const allocator = c10::GetAllocator(c10::DeviceType::CPU);
  void* const plain = allocator->raw_allocate(100);
  void* const ours = [&] {
    const Scope scope;
    return allocator->raw_allocate(100);
  }();
  EXPECT_NE(owner_of(to_address(ours)), nullptr);
  allocator->raw_deallocate(plain);
  allocator->raw_deallocate(ours);
  EXPECT_TRUE(allocator_of(0).live_blocks(kRegion).empty());
}

TEST_F(HostRouteTest, OutOfMemoryIsTorchs) {
  const Scope scope;
  EXPECT_THROW(at::empty({1 << 30}), c10::OutOfMemoryError);
  EXPECT_NO_THROW(at::empty({10}));
}

TEST_F(HostRouteTest, InstallingAgainDoesNothingAndNoOtherDevice) {
  EXPECT_NO_THROW(install_allocator(InstallDevice::Host));
  EXPECT_NO_THROW(install_allocator(InstallDevice::Auto));
  EXPECT_THROW(install_allocator(InstallDevice::Cuda), Misuse);
  EXPECT_THROW(cuda_allocator(), Misuse);
}

TEST_F(HostRouteTest, AForkedChildLeavesOurBlocksAlone) {
  std::optional<at::Tensor> inside;
  {
    const Scope scope;
    inside = at::ones({1000});
  }
  const pid_t child = fork();
  if (child == 0) {
    inside.reset();
    const Scope scope;
    const at::Tensor here = at::ones({1000});
    // Asking whose it is would take locks: that it can be used says enough.
    _exit(here.sum().item<float>() == 1000.0F ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(inside->sum().item<float>(), 1000.0F);
  EXPECT_EQ(allocator_of(0).live_blocks(kRegion).size(), 1U);
}

TEST(Version, TheRunningTorchIsTheOneBuiltFor) { EXPECT_EQ(torch_mismatch(), ""); }

TEST(Version, AnotherMinorIsRefusedByName) {
  const std::string text = torch_mismatch(std::uint64_t{2} << 56 | std::uint64_t{6} << 48 | std::uint64_t{1} << 40);
  EXPECT_THAT(text, HasSubstr("built for torch " TORCH_VERSION));
  EXPECT_THAT(text, HasSubstr("the running torch is 2.6.1"));
  EXPECT_THAT(text, HasSubstr("`pip install --no-build-isolation --force-reinstall .`"));
  EXPECT_THAT(text, HasSubstr("`make build TORCH=2.6.1`"));
  EXPECT_THAT(torch_mismatch(0), HasSubstr("does not state its version"));
}

TEST(Version, AnotherPatchReleaseFits) { EXPECT_EQ(torch_mismatch(TORCH_ABI_VERSION + (std::uint64_t{3} << 40)), ""); }

TEST(TorchErrors, OurErrorsBecomeTorchs) {
  EXPECT_THROW(with_torch_errors([]() -> int { throw OutOfMemory(0, 1, "none left"); }), c10::OutOfMemoryError);
  EXPECT_THROW(with_torch_errors([]() -> int { throw Misuse("do this instead"); }), c10::Error);
  EXPECT_THROW(with_torch_errors([]() -> int { throw DriverError("cuMemMap", "no"); }), c10::Error);
  EXPECT_THROW(with_torch_errors([]() -> int { throw std::out_of_range("other"); }), std::out_of_range);
  EXPECT_EQ(with_torch_errors([] { return 3; }), 3);
}

TEST(OutOfMemoryMessage, SaysWhoHoldsWhat) {
  EXPECT_EQ(out_of_memory_message({.device = 1,
                                   .requested = 20_GiB,
                                   .total = 140_GiB,
                                   .free = 1_GiB,
                                   .allowed = 70_GiB,
                                   .allocated = 60_GiB,
                                   .private_pools = 2_GiB,
                                   .unallocated = 512_MiB,
                                   .evictable = 10_GiB}),
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 1 has a total capacity of 140.00 GiB of which 1.00 "
            "GiB is free. 70.00 GiB allowed; Of the allocated memory 60.00 GiB is allocated by PyTorch, with 2.00 GiB "
            "allocated in private pools (e.g., CUDA Graphs), and 512.00 MiB is reserved by PyTorch but unallocated. "
            "Offload regions hold 10.00 GiB that could still be evicted.");
}

}  // namespace
}  // namespace lowtide
