#include "allocator/address_owners.h"

#include <gtest/gtest.h>

#include <thread>

#include "allocator/errors.h"

namespace lowtide {
namespace {

constexpr Bytes kSlot = AddressOwners::kLeastRange;

TEST(AddressOwners, NobodyOwnsWhatNobodyClaimed) {
  const AddressOwners owners;
  EXPECT_EQ(owners.owner(DeviceAddress{0}), std::nullopt);
  EXPECT_EQ(owners.owner(DeviceAddress{0x7fff'ffff'f000}), std::nullopt);
  EXPECT_EQ(owners.owner(DeviceAddress{~std::uintptr_t{0}}), std::nullopt);
}

TEST(AddressOwners, EveryByteOfARangeIsItsOwners) {
  AddressOwners owners;
  for (const Bytes begin : {3 * kSlot, 3 * kSlot + 512, 4 * kSlot - 512}) {
    for (const Bytes size : {kSlot, kSlot + 512, 5 * kSlot, 5 * kSlot - 512}) {
      const DeviceAddress base{begin};
      owners.claim(base, size, 7);
      EXPECT_EQ(owners.owner(DeviceAddress{begin - 1}), std::nullopt);
      for (Bytes at = 0; at < size; at += kSlot / 4) EXPECT_EQ(owners.owner(base + at), 7) << begin << " " << size;
      EXPECT_EQ(owners.owner(base + (size - 1)), 7);
      EXPECT_EQ(owners.owner(base + size), std::nullopt);
      owners.disown(base, size);
      for (Bytes at = 0; at < size; at += kSlot / 4) EXPECT_EQ(owners.owner(base + at), std::nullopt);
    }
  }
}

TEST(AddressOwners, AddressesThatDoNotFitAreRefused) {
  AddressOwners owners;
  const DeviceAddress last{(std::uintptr_t{1} << 48) - kSlot};
  owners.claim(last, kSlot, 1);
  EXPECT_EQ(owners.owner(last + (kSlot - 1)), 1);
  EXPECT_THROW(owners.claim(last + 512, kSlot, 2), DriverError);
  EXPECT_EQ(owners.owner(last + 512), 1);
}

TEST(AddressOwners, NeighboursMeetInASlot) {
  AddressOwners owners;
  const DeviceAddress first{10 * kSlot + 4096};
  const DeviceAddress second = first + 2 * kSlot;
  const DeviceAddress third = second + kSlot;
  owners.claim(first, 2 * kSlot, 0);
  owners.claim(second, kSlot, 1);
  owners.claim(third, 3 * kSlot, 2);
  EXPECT_EQ(owners.owner(second + (kSlot - 1)), 1);
  EXPECT_EQ(owners.owner(third), 2);
  owners.disown(second, kSlot);
  EXPECT_EQ(owners.owner(first + (2 * kSlot - 1)), 0);
  EXPECT_EQ(owners.owner(second), std::nullopt);
  EXPECT_EQ(owners.owner(second + (kSlot - 1)), std::nullopt);
  EXPECT_EQ(owners.owner(third), 2);
}

TEST(AddressOwners, QuestionsRunBesideClaimsOfNeighbours) {
  AddressOwners owners;
  const DeviceAddress mine{10 * kSlot + 4096};
  owners.claim(mine, 2 * kSlot, 3);
  std::thread neighbour([&] {
    for (int i = 0; i < 10'000; ++i) {
      owners.claim(mine + 2 * kSlot, kSlot, 4);
      owners.disown(mine + 2 * kSlot, kSlot);
    }
  });
  for (int i = 0; i < 10'000; ++i) ASSERT_EQ(owners.owner(mine + (2 * kSlot - 1)), 3);
  neighbour.join();
}

}  // namespace
}  // namespace lowtide
