#include "tests/support/faulty_device.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "allocator/errors.h"
#include "allocator/host_device.h"
#include "tests/support/latch.h"
#include "tests/support/pinned_buffer.h"

namespace lowtide::testing {
namespace {

constexpr Bytes kPage = 2_MiB;

class FaultyDeviceTest : public ::testing::Test {
 protected:
  FaultyDevice device_{make_host_device({.index = 3, .memory = 16_MiB, .granularity = kPage})};
};

TEST_F(FaultyDeviceTest, PassesIdentityThrough) {
  EXPECT_EQ(device_.index(), 3);
  EXPECT_EQ(device_.kind(), "host");
  EXPECT_EQ(device_.name(), device_.inner().name());
  EXPECT_EQ(device_.granularity(), kPage);
}

TEST_F(FaultyDeviceTest, KnowsWhatIsAlive) {
  EXPECT_EQ(device_.live(), LiveCounts{});
  const auto address = device_.reserve(2 * kPage);
  const auto page = device_.create(kPage);
  device_.map(address, kPage, page);
  const auto stream = device_.create_stream();
  const auto event = device_.create_event();
  const LiveCounts all{.reservations = 1, .pages = 1, .mappings = 1, .streams = 1, .events = 1, .registrations = 1};
  {
    const PinnedBuffer buffer(device_, 64_KiB);
    EXPECT_EQ(device_.live(), all);
  }
  device_.destroy_event(event);
  device_.destroy_stream(stream);
  device_.unmap(address, kPage);
  device_.release(page, kPage);
  device_.release_address(address, 2 * kPage);
  EXPECT_EQ(device_.live(), LiveCounts{});
  EXPECT_EQ(device_.bad_releases(), 0u);
}

TEST_F(FaultyDeviceTest, NoticesBadReleases) {
  const auto address = device_.reserve(kPage);
  const auto page = device_.create(kPage);
  device_.map(address, kPage, page);
  device_.release(page, kPage);
  EXPECT_EQ(device_.bad_releases(), 1u) << "the page was mapped";
  device_.release_address(address, kPage);
  EXPECT_EQ(device_.bad_releases(), 2u) << "a page was mapped there";
  EXPECT_EQ(device_.live(), (LiveCounts{.reservations = 1, .pages = 1, .mappings = 1}));
  device_.unmap(address, kPage);
  device_.release(page, kPage);
  device_.release(page, kPage);
  EXPECT_EQ(device_.bad_releases(), 3u) << "released twice";
  device_.release_address(address, kPage);
  device_.destroy_event(EventHandle{77});
  device_.destroy_stream(StreamHandle{77});
  device_.unregister_host(&device_, 4_KiB);
  EXPECT_EQ(device_.bad_releases(), 6u);
}

TEST_F(FaultyDeviceTest, CountsCallsByName) {
  const auto event = device_.create_event();
  device_.record(event, StreamHandle{0});
  device_.synchronize(event);
  device_.synchronize(StreamHandle{0});
  device_.synchronize(StreamHandle{0});
  device_.destroy_event(event);
  EXPECT_EQ(device_.calls("create_event"), 1u);
  EXPECT_EQ(device_.calls("record"), 1u);
  EXPECT_EQ(device_.calls("synchronize_event"), 1u);
  EXPECT_EQ(device_.calls("synchronize_stream"), 2u);
  EXPECT_EQ(device_.calls("destroy_event"), 1u);
  EXPECT_EQ(device_.calls("map"), 0u);
}

TEST_F(FaultyDeviceTest, FailsTheKthFallibleCallOnceAndChangesNothing) {
  for (std::size_t k = 1; k <= 3; ++k) {
    device_.fail_at(k);
    std::size_t thrown = 0;
    for (std::size_t call = 1; call <= 4; ++call) {
      const auto before = device_.live();
      try {
        device_.release(device_.create(kPage), kPage);  // the noexcept release is not counted
      } catch (const OutOfMemory& error) {
        EXPECT_EQ(call, k);
        EXPECT_EQ(error.requested(), kPage);
        EXPECT_EQ(error.device(), 3);
        ++thrown;
      }
      EXPECT_EQ(device_.live(), before);
      EXPECT_EQ(device_.failed(), call >= k);
      EXPECT_EQ(device_.fallible_calls(), call);
    }
    EXPECT_EQ(thrown, 1u);
  }
  EXPECT_EQ(device_.memory().free, 16_MiB) << "a failed create must not reach the device";
}

TEST_F(FaultyDeviceTest, DisarmedItDoesNotFail) {
  device_.fail_at(1);
  device_.fail_at(0);
  EXPECT_NO_THROW(device_.destroy_event(device_.create_event()));
  EXPECT_FALSE(device_.failed());
}

TEST_F(FaultyDeviceTest, EveryFallibleCallCanFailAsTheRealOneWould) {
  const auto address = device_.reserve(2 * kPage);
  const auto page = device_.create(kPage);
  const auto other = device_.create(kPage);
  device_.map(address, kPage, page);
  const auto event = device_.create_event();
  PinnedBuffer buffer(device_, 4_KiB);
  const StreamHandle stream{0};

  const std::vector<std::pair<std::string, std::function<void()>>> calls = {
      {"memory", [&] { device_.memory(); }},
      {"map", [&] { device_.map(address + kPage, kPage, other); }},
      {"unmap", [&] { device_.unmap(address, kPage); }},
      {"create_stream", [&] { device_.create_stream(); }},
      {"create_event", [&] { device_.create_event(); }},
      {"record", [&] { device_.record(event, stream); }},
      {"query", [&] { device_.query(event); }},
      {"synchronize_event", [&] { device_.synchronize(event); }},
      {"synchronize_stream", [&] { device_.synchronize(stream); }},
      {"wait", [&] { device_.wait(stream, event); }},
      {"is_capturing", [&] { device_.is_capturing(stream); }},
      {"copy_to_host", [&] { device_.copy_to_host(buffer.data(), address, 1, stream); }},
      {"copy_to_device", [&] { device_.copy_to_device(address, buffer.data(), 1, stream); }},
      {"copy_on_device", [&] { device_.copy_on_device(address, address + 8, 1, stream); }},
      {"register_host", [&] { device_.register_host(buffer.data() + 4_KiB, 4_KiB); }},
  };
  const auto before = device_.live();
  for (const auto& [name, call] : calls) {
    const auto made = device_.calls(name);
    device_.fail_at(1);
    EXPECT_THROW(call(), DriverError) << name;
    EXPECT_TRUE(device_.failed()) << name;
    EXPECT_EQ(device_.calls(name), made + 1);
    EXPECT_EQ(device_.live(), before) << name;
  }
  for (const auto& call : {std::function<void()>([&] { device_.reserve(kPage); }),
                           std::function<void()>([&] { device_.create(kPage); })}) {
    device_.fail_at(1);
    EXPECT_THROW(call(), OutOfMemory);
    EXPECT_EQ(device_.live(), before);
  }
  device_.unmap(address, kPage);
}

TEST_F(FaultyDeviceTest, PretendsCapture) {
  const auto stream = device_.create_stream();
  const auto event = device_.create_event();
  EXPECT_FALSE(device_.is_capturing(stream));
  device_.set_capturing(stream, true);
  EXPECT_TRUE(device_.is_capturing(stream));
  EXPECT_FALSE(device_.is_capturing(StreamHandle{0}));
  EXPECT_THROW(device_.query(event), DriverError);
  EXPECT_THROW(device_.synchronize(event), DriverError);
  EXPECT_THROW(device_.synchronize(StreamHandle{0}), DriverError);
  device_.set_capturing(stream, false);
  EXPECT_FALSE(device_.is_capturing(stream));
  EXPECT_TRUE(device_.query(event));
  device_.destroy_event(event);
  device_.destroy_stream(stream);
}

TEST_F(FaultyDeviceTest, ReferringToADeviceLeavesItAlive) {
  const auto inner = make_host_device({.index = 0, .memory = 4_MiB, .granularity = kPage});
  { FaultyDevice decorated(*inner); }
  EXPECT_EQ(inner->memory().total, 4_MiB);
}

TEST_F(FaultyDeviceTest, ALatchLooksThroughIt) {
  FaultyDevice twice(static_cast<Device&>(device_));
  const auto event = twice.create_event();
  {
    StreamLatch latch(twice, StreamHandle{0});
    twice.record(event, StreamHandle{0});
    EXPECT_FALSE(twice.query(event));
  }
  twice.synchronize(event);
  twice.destroy_event(event);
}

}  // namespace
}  // namespace lowtide::testing
