#include "pool/copy_plan.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

namespace lowtide {
namespace {

constexpr DeviceAddress kBase{0x10000000};

/// Host addresses that nobody reads.
std::byte* host(Bytes offset) { return reinterpret_cast<std::byte*>(0x20000000 + offset); }

PageImage page(Bytes offset, Bytes size, std::vector<HostPiece> pieces) {
  return {kBase + offset, size, std::move(pieces)};
}

bool operator==(const HostPiece& a, const HostPiece& b) {
  return a.page_offset == b.page_offset && a.host == b.host && a.size == b.size;
}

TEST(HostPacker, PacksSideBySide) {
  HostPacker packer({{host(0), 8_KiB}});
  const auto first = packer.pack({{0, 1_KiB}, {2_KiB, 1_KiB}});
  ASSERT_EQ(first.size(), 2u);
  EXPECT_TRUE(first[0] == (HostPiece{0, host(0), 1_KiB}));
  EXPECT_TRUE(first[1] == (HostPiece{2_KiB, host(1_KiB), 1_KiB}));
  const auto second = packer.pack({{0, 4_KiB}});
  ASSERT_EQ(second.size(), 1u);
  EXPECT_TRUE(second[0] == (HostPiece{0, host(2_KiB), 4_KiB})) << "the next page goes on where the last one ended";
}

TEST(HostPacker, CutsAtTheEndOfARange) {
  HostPacker packer({{host(0), 3_KiB}, {host(64_KiB), 4_KiB}, {host(128_KiB), 4_KiB}});
  const auto pieces = packer.pack({{512, 9_KiB}});
  ASSERT_EQ(pieces.size(), 3u);
  EXPECT_TRUE(pieces[0] == (HostPiece{512, host(0), 3_KiB}));
  EXPECT_TRUE(pieces[1] == (HostPiece{512 + 3_KiB, host(64_KiB), 4_KiB}));
  EXPECT_TRUE(pieces[2] == (HostPiece{512 + 7_KiB, host(128_KiB), 2_KiB}));
}

TEST(HostPacker, NoLiveBytesNeedNoMemory) {
  HostPacker packer({});
  EXPECT_TRUE(packer.pack({}).empty());
}

TEST(HostPacker, MoreThanTheRangesHoldIsRefused) {
  HostPacker packer({{host(0), 1_KiB}});
  EXPECT_THROW(packer.pack({{0, 2_KiB}}), std::out_of_range);
}

TEST(CopyPlanner, NeighboursOnBothSidesAreOneCopyAcrossPages) {
  const CopyPlanner planner({{host(0), 64_KiB}});
  const std::vector<PageImage> pages{page(0, 4_KiB, {{1_KiB, host(0), 3_KiB}}),
                                     page(4_KiB, 4_KiB, {{0, host(3_KiB), 2_KiB}})};
  EXPECT_EQ(planner.plan(pages), (std::vector<CopyOp>{{kBase + 1_KiB, host(0), 5_KiB}}));
}

TEST(CopyPlanner, NeighboursOnOneSideOnlyStayApart) {
  const CopyPlanner planner({{host(0), 64_KiB}});
  const std::vector<PageImage> pages{
      page(0, 8_KiB, {{0, host(0), 1_KiB}, {2_KiB, host(1_KiB), 1_KiB}, {3_KiB, host(16_KiB), 1_KiB}})};
  EXPECT_EQ(planner.plan(pages),
            (std::vector<CopyOp>{
                {kBase, host(0), 1_KiB}, {kBase + 2_KiB, host(1_KiB), 1_KiB}, {kBase + 3_KiB, host(16_KiB), 1_KiB}}));
}

TEST(CopyPlanner, ACopyNeverCrossesTheEndOfAHostRange) {
  // Two ranges that happen to be neighbours in host memory, registered one by one.
  const std::vector<HostRange> ranges{{host(0), 4_KiB}, {host(4_KiB), 4_KiB}};
  HostPacker packer(ranges);
  const std::vector<PageImage> pages{page(0, 8_KiB, packer.pack({{0, 8_KiB}}))};
  EXPECT_EQ(CopyPlanner(ranges).plan(pages),
            (std::vector<CopyOp>{{kBase, host(0), 4_KiB}, {kBase + 4_KiB, host(4_KiB), 4_KiB}}));
}

TEST(CopyPlanner, PagesWithoutLiveBytesNeedNoCopy) {
  const std::vector<PageImage> pages{page(0, 4_KiB, {}), page(4_KiB, 4_KiB, {})};
  EXPECT_TRUE(CopyPlanner({}).plan(pages).empty());
}

TEST(PageGroups, HoldNoMoreThanGroupBytes) {
  const std::vector<Bytes> sizes(5, 4_KiB);
  EXPECT_EQ(group_pages(sizes, 8_KiB), (std::vector<PageGroup>{{0, 2}, {2, 4}, {4, 5}}));
}

TEST(PageGroups, TheFirstAreSmallSoThatThePagesReturnEarly) {
  std::vector<std::size_t> counts;
  for (const PageGroup& group : group_pages(std::vector<Bytes>(40, 2_MiB), 16_MiB)) {
    counts.push_back(group.end_page - group.first_page);
  }
  EXPECT_EQ(counts, (std::vector<std::size_t>{1, 2, 4, 8, 8, 8, 8, 1}));
}

TEST(PageGroups, APageAboveGroupBytesIsAGroupOfItsOwn) {
  EXPECT_EQ(group_pages({4_KiB, 32_KiB, 4_KiB}, 8_KiB), (std::vector<PageGroup>{{0, 1}, {1, 2}, {2, 3}}));
}

TEST(PageGroups, NoPagesNoGroups) { EXPECT_TRUE(group_pages({}, 4_KiB).empty()); }

}  // namespace
}  // namespace lowtide
