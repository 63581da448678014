// What only the host device promises. What it shares with CUDA is in contract/device_contract_test.cpp.
#include "allocator/host_device.h"

#include <dirent.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "allocator/errors.h"
#include "tests/support/latch.h"
#include "tests/support/log_capture.h"
#include "tests/support/patterns.h"
#include "tests/support/pinned_buffer.h"

namespace lowtide {
namespace {

using testing::LogCapture;
using testing::PinnedBuffer;
using testing::StreamLatch;

constexpr Bytes kPage = 2_MiB;
constexpr StreamHandle kDefaultStream{0};

/// Bytes that the memfds of a host device with this index really hold.
Bytes memory_in_use(int index) {
  const std::string wanted = "/memfd:lowtide-host-" + std::to_string(index) + " ";
  Bytes used = 0;
  DIR* const folder = opendir("/proc/self/fd");
  while (const dirent* const entry = readdir(folder)) {
    char target[PATH_MAX] = {};
    if (readlinkat(dirfd(folder), entry->d_name, target, sizeof(target) - 1) < 0) continue;
    struct stat status {};
    if (std::string(target).starts_with(wanted) && fstat(std::stoi(entry->d_name), &status) == 0) {
      used += static_cast<Bytes>(status.st_blocks) * 512;
    }
  }
  closedir(folder);
  return used;
}

/// Whether the byte at `address` can be read, found out without a fault.
bool readable(DeviceAddress address) {
  int ends[2] = {};
  if (pipe(ends) != 0) return false;
  const bool result = write(ends[1], to_pointer(address), 1) == 1;
  close(ends[0]);
  close(ends[1]);
  return result;
}

class HostDeviceTest : public ::testing::Test {
 protected:
  std::unique_ptr<Device> device_ = make_host_device({.index = 42, .memory = 64_MiB, .granularity = kPage});

  /// A page mapped alone in a reservation of its own.
  struct Mapped {
    DeviceAddress address;
    PageHandle page;
  };
  Mapped mapped(Bytes size = kPage) {
    const Mapped result{device_->reserve(size), device_->create(size)};
    device_->map(result.address, size, result.page);
    return result;
  }
  void drop(const Mapped& memory, Bytes size = kPage) {
    device_->unmap(memory.address, size);
    device_->release(memory.page, size);
    device_->release_address(memory.address, size);
  }
};

TEST_F(HostDeviceTest, SaysWhatItIs) {
  EXPECT_EQ(device_->kind(), "host");
  EXPECT_EQ(device_->index(), 42);
  EXPECT_EQ(device_->granularity(), kPage);
  EXPECT_EQ(device_->memory().total, 64_MiB);
  EXPECT_FALSE(device_->is_capturing(kDefaultStream));
}

TEST_F(HostDeviceTest, RefusesAGranularityThatPagesCannotHave) {
  EXPECT_THROW(make_host_device({.index = 0, .memory = 1_GiB, .granularity = 3_MiB}), Misuse);
  EXPECT_THROW(make_host_device({.index = 0, .memory = 1_GiB, .granularity = 512}), Misuse);
  EXPECT_THROW(make_host_device({.index = 0, .memory = 1_GiB, .granularity = 0}), Misuse);
}

TEST_F(HostDeviceTest, ReleaseReturnsTheMemoryToTheSystem) {
  const auto first = mapped(8_MiB);
  const auto second = mapped(8_MiB);
  const Bytes untouched = memory_in_use(42);
  EXPECT_LT(untouched, 1_MiB) << "pages cost nothing before they are touched";
  testing::fill_pattern(to_pointer(first.address), 8_MiB, 1);
  testing::fill_pattern(to_pointer(second.address), 8_MiB, 2);
  EXPECT_GE(memory_in_use(42), 16_MiB);

  device_->unmap(first.address, 8_MiB);
  EXPECT_GE(memory_in_use(42), 16_MiB) << "an unmapped page keeps its bytes";
  device_->release(first.page, 8_MiB);
  EXPECT_LE(memory_in_use(42), 8_MiB + untouched);
  EXPECT_TRUE(testing::has_pattern(to_pointer(second.address), 8_MiB, 2));
  device_->release_address(first.address, 8_MiB);
  drop(second, 8_MiB);
  EXPECT_LE(memory_in_use(42), untouched);
}

TEST_F(HostDeviceTest, NothingIsReadableWhereNothingIsMapped) {
  const auto address = device_->reserve(2 * kPage);
  const auto page = device_->create(kPage);
  EXPECT_FALSE(readable(address));
  device_->map(address, kPage, page);
  EXPECT_TRUE(readable(address + (kPage - 1)));
  EXPECT_FALSE(readable(address + kPage));
  device_->unmap(address, kPage);
  EXPECT_FALSE(readable(address));
  device_->release(page, kPage);
  device_->release_address(address, 2 * kPage);
}

TEST_F(HostDeviceTest, MemoryFragmentsNoMoreThanACudaDevicesDoes) {
  std::vector<PageHandle> pages;
  for (int i = 0; i < 32; ++i) pages.push_back(device_->create(kPage));
  EXPECT_THROW(device_->create(kPage), OutOfMemory);
  for (int i = 0; i < 32; i += 2) device_->release(pages[static_cast<std::size_t>(i)], kPage);
  EXPECT_EQ(device_->memory().free, 32_MiB);
  const auto whole = device_->create(32_MiB);  // no hole holds it, but the bytes are free
  EXPECT_EQ(device_->memory().free, 0u);
  device_->release(whole, 32_MiB);
  for (int i = 1; i < 32; i += 2) device_->release(pages[static_cast<std::size_t>(i)], kPage);
  EXPECT_EQ(device_->memory().free, 64_MiB);
}

TEST_F(HostDeviceTest, HolesAreUsedAgainAndPagesNeverOverlap) {
  std::vector<PageHandle> pages(8);
  const auto window = device_->reserve(8 * kPage);
  const auto at = [&](std::size_t i) { return window + i * kPage; };
  for (std::size_t round = 0; round < 6; ++round) {
    for (std::size_t i = 0; i < pages.size(); ++i) {
      if (round > 0 && (i * 7 + round) % 3 != 0) continue;
      if (round > 0) {
        device_->unmap(at(i), kPage);
        device_->release(pages[i], kPage);
      }
      pages[i] = device_->create(kPage);
      device_->map(at(i), kPage, pages[i]);
      testing::fill_pattern(to_pointer(at(i)), 64_KiB, i);
    }
    for (std::size_t i = 0; i < pages.size(); ++i) {
      EXPECT_TRUE(testing::has_pattern(to_pointer(at(i)), 64_KiB, i)) << "page " << i << " in round " << round;
    }
  }
  for (std::size_t i = 0; i < pages.size(); ++i) {
    device_->unmap(at(i), kPage);
    device_->release(pages[i], kPage);
  }
  device_->release_address(window, 8 * kPage);
}

TEST_F(HostDeviceTest, RefusesWhatIsMisaligned) {
  EXPECT_THROW(device_->reserve(kPage + 1), DriverError);
  EXPECT_THROW(device_->reserve(0), DriverError);
  EXPECT_THROW(device_->create(kPage / 2), DriverError);
  EXPECT_THROW(device_->create(0), DriverError);
  const auto address = device_->reserve(2 * kPage);
  EXPECT_EQ(static_cast<std::uintptr_t>(address) % kPage, 0u);
  const auto page = device_->create(kPage);
  EXPECT_THROW(device_->map(address + 4_KiB, kPage, page), DriverError);
  device_->map(address, kPage, page);
  EXPECT_THROW(device_->unmap(address, kPage / 2), DriverError);
  device_->unmap(address, kPage);
  device_->release(page, kPage);
  device_->release_address(address, 2 * kPage);
}

TEST(HostDevice, AlignsAddressesToWhateverTheGranularityIs) {
  // Larger than what the kernel aligns large mappings to by itself, and with mappings in between that do not fit into
  // the gaps: without those all reservations would be aligned, or none, by the chance of where the first one fell.
  const auto device = make_host_device({.index = 0, .memory = 1_GiB, .granularity = 64_MiB});
  std::vector<DeviceAddress> addresses;
  const auto other = make_host_device({.index = 1, .memory = 4_MiB, .granularity = kPage});
  for (int i = 0; i < 4; ++i) {
    other->reserve(66_MiB);  // given back with the device
    addresses.push_back(device->reserve(64_MiB));
    EXPECT_EQ(static_cast<std::uintptr_t>(addresses.back()) % 64_MiB, 0u);
  }
  for (const auto address : addresses) device->release_address(address, 64_MiB);
}

TEST_F(HostDeviceTest, RefusesMappingsThatAreNotWholeAndDisjoint) {
  const auto address = device_->reserve(4 * kPage);
  const auto page = device_->create(2 * kPage);
  const auto other = device_->create(kPage);
  EXPECT_THROW(device_->map(address, kPage, page), DriverError) << "half a page";
  EXPECT_THROW(device_->map(address + 3 * kPage, 2 * kPage, page), DriverError) << "past the reservation";
  EXPECT_THROW(device_->map(DeviceAddress{kPage}, kPage, other), DriverError) << "not reserved";
  EXPECT_THROW(device_->map(address, kPage, PageHandle{99}), DriverError) << "no such page";
  device_->map(address, 2 * kPage, page);
  EXPECT_THROW(device_->map(address + kPage, kPage, other), DriverError) << "over another";
  EXPECT_THROW(device_->map(address + 2 * kPage, 2 * kPage, page), DriverError) << "the same page twice";
  EXPECT_THROW(device_->unmap(address, kPage), DriverError) << "half a mapping";
  EXPECT_THROW(device_->unmap(address + 2 * kPage, kPage), DriverError) << "nothing there";
  device_->map(address + 2 * kPage, kPage, other);
  EXPECT_THROW(device_->unmap(address, 3 * kPage), DriverError) << "two mappings in one call";
  device_->unmap(address, 2 * kPage);
  EXPECT_THROW(device_->unmap(address, 2 * kPage), DriverError) << "twice";
  device_->unmap(address + 2 * kPage, kPage);
  device_->release(page, 2 * kPage);
  device_->release(other, kPage);
  device_->release_address(address, 4 * kPage);
}

TEST_F(HostDeviceTest, LogsBadCleanupAndLeaksInsteadOfDangling) {
  const auto memory = mapped();
  const LogCapture heard;
  device_->release(memory.page, kPage);
  EXPECT_NE(heard.text().find("release(page"), std::string::npos);
  device_->release_address(memory.address, kPage);
  EXPECT_NE(heard.text().find("release_address("), std::string::npos);
  testing::fill_pattern(to_pointer(memory.address), kPage, 5);  // still there
  device_->destroy_event(EventHandle{99});
  EXPECT_NE(heard.text().find("destroy_event(99)"), std::string::npos);
  device_->destroy_stream(kDefaultStream);
  EXPECT_NE(heard.text().find("destroy_stream(0)"), std::string::npos);
  device_->unregister_host(device_.get(), 4_KiB);
  EXPECT_NE(heard.text().find("unregister_host("), std::string::npos);
  device_->synchronize(kDefaultStream);
  drop(memory);
  EXPECT_EQ(device_->memory().free, 64_MiB);
}

TEST_F(HostDeviceTest, RefusesStreamsAndEventsItDidNotMake) {
  const auto memory = mapped();
  const auto event = device_->create_event();
  const auto gone = device_->create_stream();
  device_->destroy_stream(gone);
  for (const auto stream : {gone, StreamHandle{12345}}) {
    EXPECT_THROW(device_->record(event, stream), DriverError);
    EXPECT_THROW(device_->wait(stream, event), DriverError);
    EXPECT_THROW(device_->synchronize(stream), DriverError);
    EXPECT_THROW(device_->is_capturing(stream), DriverError);
    char byte = 0;
    EXPECT_THROW(device_->copy_to_host(&byte, memory.address, 1, stream), DriverError);
    EXPECT_THROW(device_->copy_to_device(memory.address, &byte, 1, stream), DriverError);
    EXPECT_THROW(device_->copy_on_device(memory.address, memory.address, 1, stream), DriverError);
    EXPECT_THROW(enqueue_host_function(*device_, stream, [] {}), DriverError);
  }
  device_->destroy_event(event);
  EXPECT_THROW(device_->query(event), DriverError);
  EXPECT_THROW(device_->record(event, kDefaultStream), DriverError);
  EXPECT_THROW(device_->synchronize(event), DriverError);
  EXPECT_THROW(device_->wait(kDefaultStream, event), DriverError);
  drop(memory);
}

TEST_F(HostDeviceTest, RefusesCopiesOfWhatIsNotMapped) {
  const auto address = device_->reserve(2 * kPage);
  const auto page = device_->create(kPage);
  std::vector<char> bytes(2 * kPage);
  EXPECT_THROW(device_->copy_to_device(address, bytes.data(), 1, kDefaultStream), DriverError);
  device_->map(address, kPage, page);
  EXPECT_NO_THROW(device_->copy_to_device(address, bytes.data(), kPage, kDefaultStream));
  EXPECT_THROW(device_->copy_to_device(address, bytes.data(), kPage + 1, kDefaultStream), DriverError);
  EXPECT_THROW(device_->copy_to_host(bytes.data(), address + kPage, 1, kDefaultStream), DriverError);
  EXPECT_THROW(device_->copy_on_device(address, address + kPage, 1, kDefaultStream), DriverError);
  device_->synchronize(kDefaultStream);
  device_->unmap(address, kPage);
  device_->release(page, kPage);
  device_->release_address(address, 2 * kPage);
}

TEST_F(HostDeviceTest, RefusesHostRangesThatOverlapOrAreNotPages) {
  alignas(4096) static char memory[64_KiB];
  EXPECT_THROW(device_->register_host(memory + 1, 4_KiB), DriverError);
  EXPECT_THROW(device_->register_host(memory, 100), DriverError);
  EXPECT_THROW(device_->register_host(memory, 0), DriverError);
  EXPECT_THROW(device_->register_host(nullptr, 4_KiB), DriverError);
  device_->register_host(memory + 16_KiB, 16_KiB);
  EXPECT_THROW(device_->register_host(memory, 32_KiB), DriverError);
  EXPECT_THROW(device_->register_host(memory + 28_KiB, 16_KiB), DriverError);
  device_->register_host(memory, 16_KiB);
  device_->unregister_host(memory + 16_KiB, 16_KiB);
  device_->register_host(memory + 16_KiB, 32_KiB);
  device_->unregister_host(memory, 16_KiB);
  device_->unregister_host(memory + 16_KiB, 32_KiB);
}

TEST_F(HostDeviceTest, AHostFunctionThatThrowsIsLoggedAndTheStreamGoesOn) {
  const LogCapture heard;
  enqueue_host_function(*device_, kDefaultStream, [] { throw Misuse("on purpose"); });
  std::atomic<bool> ran = false;
  enqueue_host_function(*device_, kDefaultStream, [&] { ran = true; });
  device_->synchronize(kDefaultStream);
  EXPECT_TRUE(ran);
  EXPECT_NE(heard.text().find("on purpose"), std::string::npos);
}

TEST_F(HostDeviceTest, ADestroyedStreamStillDoesItsWork) {
  const auto stream = device_->create_stream();
  const auto event = device_->create_event();
  std::atomic<bool> ran = false;
  StreamLatch latch(*device_, stream);
  enqueue_host_function(*device_, stream, [&] { ran = true; });
  device_->record(event, stream);
  device_->destroy_stream(stream);  // would hang here if it waited
  EXPECT_FALSE(ran);
  latch.release();
  device_->synchronize(event);
  EXPECT_TRUE(ran);
  device_->destroy_event(event);
}

TEST_F(HostDeviceTest, DestructionFinishesWorkThatWaitsAcrossStreams) {
  std::atomic<int> ran = 0;
  std::vector<StreamHandle> streams;
  for (int i = 0; i < 4; ++i) streams.push_back(device_->create_stream());
  enqueue_host_function(*device_, streams[3], [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
  for (std::size_t i = 4; i-- > 0;) {
    const auto event = device_->create_event();
    device_->record(event, streams[i]);
    if (i > 0) device_->wait(streams[i - 1], event);
    enqueue_host_function(*device_, streams[i], [&] { ++ran; });
    device_->destroy_event(event);
  }
  device_->destroy_stream(streams[1]);
  device_.reset();
  EXPECT_EQ(ran, 4);
}

TEST_F(HostDeviceTest, ThreadsMayMapCopyAndUnmapAtOnce) {
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (std::uint64_t cookie = 1; cookie <= 4; ++cookie) {
    threads.emplace_back([this, cookie, &wrong] {
      const auto address = device_->reserve(kPage);
      const auto event = device_->create_event();
      std::vector<unsigned char> out(64_KiB);
      std::vector<unsigned char> in(64_KiB);
      testing::fill_pattern(out.data(), out.size(), cookie);
      for (int round = 0; round < 20; ++round) {
        const auto stream = device_->create_stream();
        const auto page = device_->create(kPage);
        device_->map(address, kPage, page);
        device_->copy_to_device(address, out.data(), out.size(), stream);
        device_->copy_on_device(address + 1_MiB, address, out.size(), stream);
        device_->record(event, stream);
        device_->wait(kDefaultStream, event);
        device_->copy_to_host(in.data(), address + 1_MiB, in.size(), kDefaultStream);
        device_->record(event, kDefaultStream);
        device_->synchronize(event);
        if (!testing::has_pattern(in.data(), in.size(), cookie)) ++wrong;
        device_->unmap(address, kPage);
        device_->release(page, kPage);
        device_->destroy_stream(stream);
      }
      device_->destroy_event(event);
      device_->release_address(address, kPage);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(device_->memory().free, 64_MiB);
}

/// Exit status of a forked child that runs `body`; -1 if it hung or died.
template <typename Body>
int status_in_child(Body body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    _exit(body());
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST_F(HostDeviceTest, AForkedChildIsRefusedInsteadOfHanging) {
  const auto stream = device_->create_stream();
  const auto event = device_->create_event();
  device_->synchronize(kDefaultStream);  // its thread now waits for work, and is missing in the child
  StreamLatch latch(*device_, stream);
  device_->record(event, stream);
  const auto refused = [](auto call) {
    try {
      call();
    } catch (const Misuse& error) {
      return std::string(error.what()).find("forked") != std::string::npos;
    }
    return false;
  };
  EXPECT_EQ(status_in_child([&] {
              if (!refused([&] { device_->synchronize(event); })) return 1;
              if (!refused([&] { device_->synchronize(stream); })) return 2;
              if (!refused([&] { device_->create(kPage); })) return 3;
              device_->destroy_event(event);
              device_->destroy_stream(stream);
              device_.reset();
              return 0;
            }),
            0);
  latch.release();
  device_->synchronize(event);
  device_->destroy_event(event);
  device_->destroy_stream(stream);
}

TEST_F(HostDeviceTest, AForkFreesNothingOfTheParent) {
  const auto memory = mapped();
  testing::fill_pattern(to_pointer(memory.address), kPage, 3);
  device_->unmap(memory.address, kPage);
  EXPECT_EQ(status_in_child([&] {
              device_->release(memory.page, kPage);
              device_->release_address(memory.address, kPage);
              device_.reset();
              return 0;
            }),
            0);
  device_->map(memory.address, kPage, memory.page);
  EXPECT_TRUE(testing::has_pattern(to_pointer(memory.address), kPage, 3));
  drop(memory);
}

TEST_F(HostDeviceTest, ADeviceMadeInTheChildWorks) {
  EXPECT_EQ(status_in_child([] {
              const auto own = make_host_device({.index = 7, .memory = 4_MiB, .granularity = kPage});
              own->synchronize(kDefaultStream);
              return 0;
            }),
            0);
}

// Reachable, so that LeakSanitizer takes them for what they are: kept on purpose.
Device* leaked_device = nullptr;
StreamLatch* leaked_latch = nullptr;

[[noreturn]] void exit_with_a_leaked_device() {
  leaked_device = make_host_device({.index = 8, .memory = 4_MiB, .granularity = kPage}).release();
  leaked_latch = new StreamLatch(*leaked_device, leaked_device->create_stream());
  leaked_device->synchronize(kDefaultStream);
  std::exit(0);
}

TEST(HostDeviceDeathTest, ALeakedDeviceWithHeldStreamsDoesNotHinderExit) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(exit_with_a_leaked_device(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace lowtide
