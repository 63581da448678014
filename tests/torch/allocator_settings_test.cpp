#include "allocator/torch/allocator_settings.h"

#include <gtest/gtest.h>

namespace lowtide {
namespace {

TEST(AllocatorSettings, WhatIsFollowedIsNotNamed) {
  EXPECT_EQ(settings_without_effect(""), "");
  EXPECT_EQ(settings_without_effect("expandable_segments:True,per_process_memory_fraction:0.5"), "");
  EXPECT_EQ(settings_without_effect("pinned_use_background_threads:True,backend:native"), "");
}

TEST(AllocatorSettings, WhatIsNotFollowedIsNamed) {
  EXPECT_EQ(settings_without_effect("expandable_segments:True, max_split_size_mb:128"), "max_split_size_mb");
  EXPECT_EQ(settings_without_effect("garbage_collection_threshold:0.6,roundup_power2_divisions:[256:1,512:2,>:4]"),
            "roundup_power2_divisions, garbage_collection_threshold");
}

TEST(AllocatorSettings, OnlyWholeKeysCount) {
  EXPECT_EQ(settings_without_effect("not_max_split_size_mb_either:1"), "");
}

}  // namespace
}  // namespace lowtide
