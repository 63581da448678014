// What every Device promises, asked of each kind. CUDA is asked where built with LOWTIDE_TEST_CUDA, and skipped, by
// name and with the reason, where there is no CUDA device.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "allocator/cuda_device.h"
#include "allocator/device.h"
#include "allocator/errors.h"
#include "allocator/host_device.h"
#include "tests/support/faulty_device.h"
#include "tests/support/latch.h"
#include "tests/support/patterns.h"
#include "tests/support/pinned_buffer.h"

namespace lowtide {
namespace {

using testing::FaultyDevice;
using testing::has_pattern;
using testing::LiveCounts;
using testing::PinnedBuffer;
using testing::StreamLatch;

constexpr StreamHandle kDefaultStream{0};

struct Kind {
  std::string name;
  std::unique_ptr<Device> (*make)();
  std::string (*missing)();  // empty if there is such a device
};

std::ostream& operator<<(std::ostream& out, const Kind& kind) { return out << kind.name; }

std::vector<Kind> kinds() {
  std::vector<Kind> all;
  all.push_back({"Host", [] { return make_host_device({.index = 0, .memory = 256_MiB, .granularity = 2_MiB}); },
                 [] { return std::string(); }});
#ifdef LOWTIDE_TEST_CUDA
  all.push_back({"Cuda", [] { return make_cuda_device(0); }, [] { return cuda_unavailable_reason(); }});
#endif
  return all;
}

/// Every test leaves nothing alive on the device.
class DeviceContract : public ::testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    const std::string missing = GetParam().missing();
    if (!missing.empty()) GTEST_SKIP() << GetParam().name << ": " << missing;
    device_ = std::make_unique<FaultyDevice>(GetParam().make());
    page_size_ = round_up(2_MiB, device_->granularity());
    stream_ = device_->create_stream();
  }

  void TearDown() override {
    if (device_ == nullptr) return;
    device_->destroy_stream(stream_);
    EXPECT_EQ(device_->live(), LiveCounts{});
    EXPECT_EQ(device_->bad_releases(), 0u);
  }

  /// Pages side by side in one reservation.
  struct Window {
    DeviceAddress address;
    std::vector<PageHandle> pages;
  };
  Window open_window(std::size_t pages) {
    Window window{device_->reserve(pages * page_size_), {}};
    for (std::size_t i = 0; i < pages; ++i) {
      window.pages.push_back(device_->create(page_size_));
      device_->map(window.address + i * page_size_, page_size_, window.pages.back());
    }
    return window;
  }
  void close_window(const Window& window) {
    for (std::size_t i = 0; i < window.pages.size(); ++i) {
      device_->unmap(window.address + i * page_size_, page_size_);
      device_->release(window.pages[i], page_size_);
    }
    device_->release_address(window.address, window.pages.size() * page_size_);
  }

  void write(DeviceAddress target, Bytes size, std::uint64_t cookie) {
    PinnedBuffer buffer(*device_, size);
    testing::fill_pattern(buffer.data(), size, cookie);
    device_->copy_to_device(target, buffer.data(), size, stream_);
    device_->synchronize(stream_);
  }
  bool reads(DeviceAddress source, Bytes size, std::uint64_t cookie) {
    PinnedBuffer buffer(*device_, size);
    device_->copy_to_host(buffer.data(), source, size, stream_);
    device_->synchronize(stream_);
    return has_pattern(buffer.data(), size, cookie);
  }

  std::unique_ptr<FaultyDevice> device_;
  Bytes page_size_ = 0;
  StreamHandle stream_{};
};

TEST_P(DeviceContract, GranularityIsAPowerOfTwo) {
  const Bytes unit = device_->granularity();
  EXPECT_GT(unit, 0u);
  EXPECT_EQ(unit & (unit - 1), 0u);
  EXPECT_FALSE(device_->name().empty());
}

TEST_P(DeviceContract, ReservedAddressesAreAlignedAndDoNotOverlap) {
  std::vector<DeviceAddress> addresses;
  for (int i = 0; i < 4; ++i) {
    addresses.push_back(device_->reserve(3 * page_size_));
    EXPECT_EQ(static_cast<std::uintptr_t>(addresses.back()) % device_->granularity(), 0u);
  }
  std::sort(addresses.begin(), addresses.end());
  for (std::size_t i = 1; i < addresses.size(); ++i) EXPECT_GE(addresses[i] - addresses[i - 1], 3 * page_size_);
  for (const auto address : addresses) device_->release_address(address, 3 * page_size_);
}

TEST_P(DeviceContract, ReservingFarMoreThanTheMemoryWorks) {
  const auto address = device_->reserve(64_GiB);
  device_->release_address(address, 64_GiB);
}

TEST_P(DeviceContract, BytesSurviveUnmapAndMapAtTheSameAddress) {
  const auto window = open_window(1);
  write(window.address, page_size_, 11);
  device_->unmap(window.address, page_size_);
  device_->map(window.address, page_size_, window.pages[0]);
  EXPECT_TRUE(reads(window.address, page_size_, 11));
  close_window(window);
}

TEST_P(DeviceContract, AnotherPageAtTheSameAddressHasItsOwnBytes) {
  const auto window = open_window(1);
  write(window.address, page_size_, 12);
  device_->unmap(window.address, page_size_);
  const auto other = device_->create(page_size_);
  device_->map(window.address, page_size_, other);
  write(window.address, page_size_, 13);
  EXPECT_TRUE(reads(window.address, page_size_, 13));
  device_->unmap(window.address, page_size_);
  device_->map(window.address, page_size_, window.pages[0]);
  EXPECT_TRUE(reads(window.address, page_size_, 12));
  device_->release(other, page_size_);
  close_window(window);
}

TEST_P(DeviceContract, MappingElsewhereMovesTheBytes) {
  auto window = open_window(1);
  write(window.address, page_size_, 14);
  device_->unmap(window.address, page_size_);
  const auto elsewhere = device_->reserve(2 * page_size_);
  device_->map(elsewhere + page_size_, page_size_, window.pages[0]);
  EXPECT_TRUE(reads(elsewhere + page_size_, page_size_, 14));
  device_->unmap(elsewhere + page_size_, page_size_);
  device_->release_address(elsewhere, 2 * page_size_);
  device_->map(window.address, page_size_, window.pages[0]);
  close_window(window);
}

TEST_P(DeviceContract, ACopyMayCrossPagesMappedSideBySide) {
  const auto window = open_window(3);
  write(window.address, 3 * page_size_, 15);
  EXPECT_TRUE(reads(window.address, 3 * page_size_, 15));
  const auto target = open_window(3);
  device_->copy_on_device(target.address, window.address, 3 * page_size_, stream_);
  EXPECT_TRUE(reads(target.address, 3 * page_size_, 15));
  close_window(target);
  close_window(window);
}

TEST_P(DeviceContract, CopiesOfAnySizeAndOffsetTouchOnlyTheirBytes) {
  const auto window = open_window(1);
  write(window.address, 64_KiB, 16);
  PinnedBuffer buffer(*device_, 64_KiB);
  testing::fill_pattern(buffer.data(), 64_KiB, 17);
  device_->copy_to_device(window.address + 1001, buffer.data() + 1001, 777, stream_);
  device_->copy_to_device(window.address, buffer.data(), 0, stream_);
  device_->copy_to_host(buffer.data(), window.address, 64_KiB, stream_);
  device_->synchronize(stream_);
  EXPECT_TRUE(has_pattern(buffer.data(), 1001, 16));
  EXPECT_TRUE(has_pattern(buffer.data() + 1001, 777, 17, 1001));
  EXPECT_TRUE(has_pattern(buffer.data() + 1778, 64_KiB - 1778, 16, 1778));
  close_window(window);
}

TEST_P(DeviceContract, MisusedMappingsAreRefusedAndChangeNothing) {
  const auto window = open_window(2);
  const auto other = device_->create(page_size_);
  write(window.address, 2 * page_size_, 18);
  EXPECT_THROW(device_->map(window.address, page_size_, other), DriverError) << "something is mapped there";
  EXPECT_THROW(device_->unmap(window.address, page_size_ / 2), DriverError) << "half a mapping";
  EXPECT_THROW(device_->create(page_size_ - 1), DriverError);
  EXPECT_TRUE(reads(window.address, 2 * page_size_, 18));
  device_->release(other, page_size_);
  close_window(window);
}

TEST_P(DeviceContract, MoreThanTheTotalIsOutOfMemoryAndLeavesTheDeviceAsItWas) {
  const auto window = open_window(1);
  write(window.address, page_size_, 19);
  const auto total = device_->memory().total;
  const Bytes too_much = round_up(total + 1, device_->granularity());
  try {
    device_->create(too_much);
    ADD_FAILURE() << "created more than there is";
  } catch (const OutOfMemory& error) {
    EXPECT_EQ(error.requested(), too_much);
    EXPECT_EQ(error.device(), device_->index());
  }
  EXPECT_TRUE(reads(window.address, page_size_, 19));
  EXPECT_EQ(device_->memory().total, total);
  device_->release(device_->create(page_size_), page_size_);
  close_window(window);
}

TEST_P(DeviceContract, FreeMemoryMovesWithCreateAndRelease) {
  const Bytes size = 64_MiB;
  const auto before = device_->memory();
  const auto page = device_->create(size);
  const auto during = device_->memory();
  device_->release(page, size);
  const auto after = device_->memory();
  EXPECT_EQ(before.total, during.total);
  EXPECT_LE(during.free + size, before.free);
  EXPECT_GE(after.free, during.free + size);
}

TEST_P(DeviceContract, CopiesAreAsynchronous) {
  const auto window = open_window(1);
  write(window.address, 1_MiB, 20);
  PinnedBuffer out(*device_, 1_MiB);
  PinnedBuffer in(*device_, 1_MiB);
  testing::fill_pattern(in.data(), 1_MiB, 21);
  const auto event = device_->create_event();
  StreamLatch latch(*device_, stream_);
  device_->copy_to_host(out.data(), window.address, 1_MiB, stream_);
  device_->copy_to_device(window.address, in.data(), 1_MiB, stream_);
  device_->copy_on_device(window.address + 1_MiB, window.address, 1_MiB, stream_);
  device_->record(event, stream_);
  // All calls returned although the stream is held, so nothing was copied.
  EXPECT_FALSE(device_->query(event));
  for (Bytes i = 0; i < 1_MiB; ++i) ASSERT_EQ(out.data()[i], 0) << "copied before the latch was released";
  latch.release();
  device_->synchronize(event);
  EXPECT_TRUE(has_pattern(out.data(), 1_MiB, 20)) << "in the order they were queued";
  EXPECT_TRUE(reads(window.address, 1_MiB, 21));
  EXPECT_TRUE(reads(window.address + 1_MiB, 1_MiB, 21));
  device_->destroy_event(event);
  close_window(window);
}

TEST_P(DeviceContract, AnEventPassesWithTheWorkBeforeIt) {
  const auto event = device_->create_event();
  StreamLatch latch(*device_, stream_);
  device_->record(event, stream_);
  EXPECT_FALSE(device_->query(event));
  latch.release();
  device_->synchronize(event);
  EXPECT_TRUE(device_->query(event));
  device_->destroy_event(event);
}

TEST_P(DeviceContract, AnEventDoesNotWaitForTheWorkAfterIt) {
  const auto event = device_->create_event();
  device_->record(event, stream_);
  StreamLatch latch(*device_, stream_);
  device_->synchronize(event);
  EXPECT_TRUE(device_->query(event));
  latch.release();
  device_->synchronize(stream_);
  device_->destroy_event(event);
}

TEST_P(DeviceContract, AnEventNeverRecordedHoldsNobody) {
  const auto event = device_->create_event();
  EXPECT_TRUE(device_->query(event));
  device_->synchronize(event);
  device_->wait(stream_, event);
  device_->synchronize(stream_);
  device_->destroy_event(event);
}

TEST_P(DeviceContract, AWaitOrdersStreams) {
  const auto window = open_window(1);
  write(window.address, 1_MiB, 22);
  PinnedBuffer in(*device_, 1_MiB);
  PinnedBuffer out(*device_, 1_MiB);
  testing::fill_pattern(in.data(), 1_MiB, 23);
  const auto other = device_->create_stream();
  const auto written = device_->create_event();
  const auto read = device_->create_event();
  StreamLatch latch(*device_, stream_);
  device_->copy_to_device(window.address, in.data(), 1_MiB, stream_);
  device_->record(written, stream_);
  device_->wait(other, written);
  device_->copy_to_host(out.data(), window.address, 1_MiB, other);
  device_->record(read, other);
  EXPECT_FALSE(device_->query(read));
  latch.release();
  device_->synchronize(read);
  EXPECT_TRUE(has_pattern(out.data(), 1_MiB, 23));
  device_->destroy_event(read);
  device_->destroy_event(written);
  device_->destroy_stream(other);
  close_window(window);
}

TEST_P(DeviceContract, StreamsAreHeldOneByOne) {
  const auto other = device_->create_stream();
  StreamLatch latch(*device_, stream_);
  device_->synchronize(other);
  device_->synchronize(kDefaultStream);
  latch.release();
  device_->synchronize(stream_);
  device_->destroy_stream(other);
}

TEST_P(DeviceContract, AWaitIsForTheRecordBeforeItEvenIfTheEventIsRecordedAgain) {
  const auto other = device_->create_stream();
  const auto event = device_->create_event();
  const auto behind = device_->create_event();
  StreamLatch latch(*device_, stream_);
  device_->record(event, stream_);
  device_->wait(other, event);
  device_->record(behind, other);
  device_->record(event, kDefaultStream);
  device_->synchronize(event);
  EXPECT_TRUE(device_->query(event)) << "the last record has passed";
  EXPECT_FALSE(device_->query(behind)) << "the first has not";
  latch.release();
  device_->synchronize(behind);
  device_->destroy_event(behind);
  device_->destroy_event(event);
  device_->destroy_stream(other);
}

TEST_P(DeviceContract, AnEventMayBeDestroyedWhileAStreamWaitsForIt) {
  const auto other = device_->create_stream();
  const auto event = device_->create_event();
  const auto behind = device_->create_event();
  StreamLatch latch(*device_, stream_);
  device_->record(event, stream_);
  device_->wait(other, event);
  device_->destroy_event(event);
  device_->record(behind, other);
  EXPECT_FALSE(device_->query(behind));
  latch.release();
  device_->synchronize(behind);
  device_->destroy_event(behind);
  device_->destroy_stream(other);
}

TEST_P(DeviceContract, TheDefaultStreamWorks) {
  const auto window = open_window(1);
  PinnedBuffer buffer(*device_, 64_KiB);
  testing::fill_pattern(buffer.data(), 64_KiB, 24);
  const auto event = device_->create_event();
  device_->copy_to_device(window.address, buffer.data(), 64_KiB, kDefaultStream);
  device_->record(event, kDefaultStream);
  device_->wait(stream_, event);
  EXPECT_TRUE(reads(window.address, 64_KiB, 24));
  EXPECT_FALSE(device_->is_capturing(kDefaultStream));
  EXPECT_FALSE(device_->is_capturing(stream_));
  device_->synchronize(kDefaultStream);
  device_->destroy_event(event);
  close_window(window);
}

TEST_P(DeviceContract, ACopyAcrossTwoRegisteredRangesIsRefused) {
  const auto window = open_window(1);
  write(window.address, 128_KiB, 25);
  PinnedBuffer whole(*device_, 128_KiB);
  device_->unregister_host(whole.data(), 128_KiB);
  device_->register_host(whole.data(), 64_KiB);
  device_->register_host(whole.data() + 64_KiB, 64_KiB);
  EXPECT_THROW(device_->copy_to_host(whole.data(), window.address, 128_KiB, stream_), DriverError);
  EXPECT_THROW(device_->copy_to_device(window.address, whole.data() + 1_KiB, 64_KiB, stream_), DriverError);
  device_->copy_to_host(whole.data(), window.address, 64_KiB, stream_);
  device_->copy_to_host(whole.data() + 64_KiB, window.address + 64_KiB, 64_KiB, stream_);
  device_->synchronize(stream_);
  EXPECT_TRUE(has_pattern(whole.data(), 128_KiB, 25));
  device_->unregister_host(whole.data(), 64_KiB);
  device_->unregister_host(whole.data() + 64_KiB, 64_KiB);
  device_->register_host(whole.data(), 128_KiB);
  close_window(window);
}

TEST_P(DeviceContract, UnregisteredHostMemoryIsAllowed) {
  const auto window = open_window(1);
  std::vector<unsigned char> out(100'000);
  std::vector<unsigned char> in(100'000);
  testing::fill_pattern(out.data(), out.size(), 26);
  device_->copy_to_device(window.address, out.data(), out.size(), stream_);
  device_->copy_to_host(in.data(), window.address, in.size(), stream_);
  device_->synchronize(stream_);
  EXPECT_TRUE(has_pattern(in.data(), in.size(), 26));
  close_window(window);
}

TEST_P(DeviceContract, HostMemoryIsRegisteredOnce) {
  PinnedBuffer buffer(*device_, 64_KiB);
  EXPECT_THROW(device_->register_host(buffer.data(), 64_KiB), DriverError);
}

INSTANTIATE_TEST_SUITE_P(Device, DeviceContract, ::testing::ValuesIn(kinds()),
                         [](const auto& test) { return test.param.name; });

TEST(CudaDevices, WithoutADeviceTheReasonIsSaid) {
  EXPECT_EQ(cuda_device_count() == 0, !cuda_unavailable_reason().empty());
  EXPECT_THROW(make_cuda_device(cuda_device_count()), Misuse);
  EXPECT_THROW(make_cuda_device(-1), Misuse);
}

}  // namespace
}  // namespace lowtide
