#include "allocator/host_pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>

namespace lowtide {
namespace {

TEST(HostPages, NeighbouringHolesBecomeOne) {
  HostPages pages("lowtide-test");
  const Bytes a = pages.allocate(1_MiB);
  const Bytes b = pages.allocate(1_MiB);
  const Bytes c = pages.allocate(1_MiB);
  const Bytes last = pages.allocate(1_MiB);
  pages.free(a, 1_MiB);
  pages.free(c, 1_MiB);
  pages.free(b, 1_MiB);
  EXPECT_EQ(pages.allocate(3_MiB), a);
  pages.free(a, 3_MiB);
  EXPECT_EQ(pages.allocate(1_MiB), a) << "the rest of a hole stays free";
  EXPECT_EQ(pages.allocate(2_MiB), b);
  pages.free(a, 1_MiB);
  pages.free(b, 2_MiB);
  pages.free(last, 1_MiB);
}

TEST(HostPages, FreeMemoryAtTheEndIsForgotten) {
  HostPages pages("lowtide-test");
  const Bytes a = pages.allocate(1_MiB);
  const Bytes b = pages.allocate(1_MiB);
  pages.free(a, 1_MiB);
  pages.free(b, 1_MiB);
  EXPECT_EQ(pages.allocate(8_MiB), a) << "a larger page may begin where the file ended";
}

TEST(HostPages, WhatWasFreedReadsAsZeroWhenItIsUsedAgain) {
  HostPages pages("lowtide-test");
  const Bytes offset = pages.allocate(64_KiB);
  const auto map = [&] {
    return static_cast<unsigned char*>(
        mmap(nullptr, 64_KiB, PROT_READ | PROT_WRITE, MAP_SHARED, pages.descriptor(), static_cast<off_t>(offset)));
  };
  unsigned char* const first = map();
  std::memset(first, 0xAB, 64_KiB);
  munmap(first, 64_KiB);
  pages.free(offset, 64_KiB);
  ASSERT_EQ(pages.allocate(64_KiB), offset);
  unsigned char* const again = map();
  for (Bytes i = 0; i < 64_KiB; ++i) ASSERT_EQ(again[i], 0);
  munmap(again, 64_KiB);
}

}  // namespace
}  // namespace lowtide
