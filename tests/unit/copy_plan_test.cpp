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

TEST(CopyPlan, NeighboursOnBothSidesAreOneCopyAcrossPages) {
  const auto groups =
      plan_copies({page(0, 4_KiB, {{1_KiB, host(0), 3_KiB}}), page(4_KiB, 4_KiB, {{0, host(3_KiB), 2_KiB}})},
                  {{host(0), 64_KiB}}, 64_KiB);
  ASSERT_EQ(groups.size(), 1u);
  EXPECT_EQ(groups[0].first_page, 0u);
  EXPECT_EQ(groups[0].end_page, 2u);
  EXPECT_EQ(groups[0].copies, (std::vector<CopyOp>{{kBase + 1_KiB, host(0), 5_KiB}}));
}

TEST(CopyPlan, NeighboursOnOneSideOnlyStayApart) {
  const auto groups =
      plan_copies({page(0, 8_KiB, {{0, host(0), 1_KiB}, {2_KiB, host(1_KiB), 1_KiB}, {3_KiB, host(16_KiB), 1_KiB}})},
                  {{host(0), 64_KiB}}, 64_KiB);
  ASSERT_EQ(groups.size(), 1u);
  EXPECT_EQ(groups[0].copies,
            (std::vector<CopyOp>{
                {kBase, host(0), 1_KiB}, {kBase + 2_KiB, host(1_KiB), 1_KiB}, {kBase + 3_KiB, host(16_KiB), 1_KiB}}));
}

TEST(CopyPlan, ACopyNeverCrossesTheEndOfAHostRange) {
  // Two ranges that happen to be neighbours in host memory, registered one by one.
  const std::vector<HostRange> ranges{{host(0), 4_KiB}, {host(4_KiB), 4_KiB}};
  HostPacker packer(ranges);
  const auto groups = plan_copies({page(0, 8_KiB, packer.pack({{0, 8_KiB}}))}, ranges, 64_KiB);
  ASSERT_EQ(groups.size(), 1u);
  EXPECT_EQ(groups[0].copies, (std::vector<CopyOp>{{kBase, host(0), 4_KiB}, {kBase + 4_KiB, host(4_KiB), 4_KiB}}));
}

TEST(CopyPlan, GroupsHoldAboutGroupBytesOfPages) {
  std::vector<PageImage> pages;
  for (Bytes i = 0; i < 5; ++i) pages.push_back(page(i * 4_KiB, 4_KiB, {{0, host(i * 4_KiB), 4_KiB}}));
  const auto groups = plan_copies(pages, {{host(0), 64_KiB}}, 8_KiB);
  ASSERT_EQ(groups.size(), 3u);
  std::size_t next = 0;
  for (const CopyGroup& group : groups) {
    EXPECT_EQ(group.first_page, next) << "every page is in one group";
    next = group.end_page;
    Bytes bytes = 0;
    for (const CopyOp& copy : group.copies) bytes += copy.size;
    EXPECT_LE(bytes, 8_KiB);
    EXPECT_EQ(group.copies.size(), 1u);
  }
  EXPECT_EQ(next, pages.size());
}

TEST(CopyPlan, TheFirstGroupsAreSmallSoThatThePagesReturnEarly) {
  std::vector<PageImage> pages;
  for (Bytes i = 0; i < 40; ++i) pages.push_back(page(i * 2_MiB, 2_MiB, {{0, host(i * 2_MiB), 2_MiB}}));
  std::vector<std::size_t> sizes;
  for (const CopyGroup& group : plan_copies(pages, {{host(0), 80_MiB}}, 16_MiB)) {
    sizes.push_back(group.end_page - group.first_page);
  }
  EXPECT_EQ(sizes, (std::vector<std::size_t>{1, 2, 4, 8, 8, 8, 8, 1}));
}

TEST(CopyPlan, APageAboveGroupBytesIsAGroupOfItsOwn) {
  const auto groups =
      plan_copies({page(0, 4_KiB, {{0, host(0), 1_KiB}}), page(4_KiB, 32_KiB, {{0, host(1_KiB), 32_KiB}}),
                   page(36_KiB, 4_KiB, {{0, host(33_KiB), 1_KiB}})},
                  {{host(0), 64_KiB}}, 8_KiB);
  ASSERT_EQ(groups.size(), 3u);
  EXPECT_EQ(groups[1].first_page, 1u);
  EXPECT_EQ(groups[1].end_page, 2u);
}

TEST(CopyPlan, PagesWithoutLiveBytesAreDoneWithTheirGroup) {
  const auto groups = plan_copies({page(0, 4_KiB, {}), page(4_KiB, 4_KiB, {})}, {}, 4_KiB);
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_TRUE(groups[0].copies.empty());
  EXPECT_EQ(groups[1].first_page, 1u);
  EXPECT_EQ(groups[1].end_page, 2u);
}

TEST(CopyPlan, NoPagesNoGroups) { EXPECT_TRUE(plan_copies({}, {}, 4_KiB).empty()); }

}  // namespace
}  // namespace lowtide
