#include "allocator/allocation_scope.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "allocator/errors.h"

namespace lowtide {
namespace {

constexpr OwnerId kAdam{7};
constexpr OwnerId kCache{8};

TEST(AllocationScope, NobodyOwnsWhatIsAllocatedOutside) { EXPECT_EQ(current_owner(), kNoOwner); }

TEST(AllocationScope, TheInnermostWins) {
  enter_scope(kAdam);
  EXPECT_EQ(current_owner(), kAdam);
  enter_scope(kCache);
  EXPECT_EQ(current_owner(), kCache);
  enter_scope(kAdam);
  EXPECT_EQ(current_owner(), kAdam);
  leave_scope(kAdam);
  EXPECT_EQ(current_owner(), kCache);
  leave_scope(kCache);
  EXPECT_EQ(current_owner(), kAdam);
  leave_scope(kAdam);
  EXPECT_EQ(current_owner(), kNoOwner);
}

TEST(AllocationScope, NobodyInsideARegion) {
  enter_scope(kAdam);
  enter_scope(kNoOwner);
  EXPECT_EQ(current_owner(), kNoOwner);
  leave_scope(kNoOwner);
  EXPECT_EQ(current_owner(), kAdam);
  leave_scope(kAdam);
}

TEST(AllocationScope, LeavingInAWrongOrderIsRefusedAndChangesNothing) {
  EXPECT_THROW(leave_scope(kAdam), Misuse);
  EXPECT_THROW(leave_scope(kNoOwner), Misuse);
  enter_scope(kAdam);
  enter_scope(kCache);
  try {
    leave_scope(kAdam);
    FAIL() << "left an outer scope";
  } catch (const Misuse& error) {
    EXPECT_NE(std::string(error.what()).find("nest"), std::string::npos) << error.what();
  }
  EXPECT_EQ(current_owner(), kCache);
  leave_scope(kCache);
  leave_scope(kAdam);
}

TEST(AllocationScope, EachThreadHasItsOwn) {
  enter_scope(kAdam);
  std::thread([] {
    EXPECT_EQ(current_owner(), kNoOwner);
    EXPECT_THROW(leave_scope(kAdam), Misuse);
    enter_scope(kCache);
    EXPECT_EQ(current_owner(), kCache);
    leave_scope(kCache);
  }).join();
  EXPECT_EQ(current_owner(), kAdam);
  leave_scope(kAdam);
}

}  // namespace
}  // namespace lowtide
