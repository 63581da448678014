#include "pool/torch/known_storages.h"

#include <gtest/gtest.h>

#include <vector>

namespace lowtide {
namespace {

StorageRef make_storage() {
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0, c10::DataPtr(), nullptr, false);
}

class KnownStoragesTest : public ::testing::Test {
 protected:
  void insert(const StorageRef& storage, void* bytes) { known_.insert(storage.get(), WeakStorageRef(storage), bytes); }

  KnownStorages known_;
  char memory_[2] = {};
  void* const here_ = &memory_[0];
  void* const there_ = &memory_[1];
};

TEST_F(KnownStoragesTest, KnowsAStorageByWhereItsBytesAre) {
  const StorageRef storage = make_storage();
  EXPECT_FALSE(known_.contains(storage.get(), here_));
  insert(storage, here_);
  EXPECT_TRUE(known_.contains(storage.get(), here_));
  EXPECT_FALSE(known_.contains(storage.get(), there_));
}

TEST_F(KnownStoragesTest, HoldsAStorageOnceWhenItsBytesMove) {
  const StorageRef storage = make_storage();
  insert(storage, here_);
  insert(storage, there_);
  EXPECT_EQ(known_.size(), 1U);
  EXPECT_TRUE(known_.contains(storage.get(), there_));
}

TEST_F(KnownStoragesTest, PruneTakesOutTheDeadAndFindsTheRest) {
  std::vector<StorageRef> storages;
  for (int i = 0; i < 100; ++i) {
    storages.push_back(make_storage());
    insert(storages.back(), i % 2 == 0 ? here_ : there_);
  }
  const StorageRef kept_alive[] = {storages[3], storages[40], storages[99]};
  storages.clear();
  const auto dead = known_.prune();
  EXPECT_EQ(dead.size(), 97U);
  EXPECT_EQ(known_.size(), 3U);
  EXPECT_TRUE(known_.contains(kept_alive[0].get(), there_));
  EXPECT_TRUE(known_.contains(kept_alive[1].get(), here_));
  EXPECT_TRUE(known_.contains(kept_alive[2].get(), there_));
  EXPECT_FALSE(known_.contains(dead[0].storage._unsafe_get_target(), here_));
  insert(kept_alive[0], here_);
  EXPECT_EQ(known_.size(), 3U);
}

TEST_F(KnownStoragesTest, PruneOfLivingStoragesKeepsThem) {
  const StorageRef storage = make_storage();
  insert(storage, here_);
  EXPECT_TRUE(known_.prune().empty());
  EXPECT_TRUE(known_.contains(storage.get(), here_));
}

}  // namespace
}  // namespace lowtide
