#include "pool/offload_region.h"

#include <fmt/format.h>

#include <algorithm>
#include <cwchar>
#include <locale>
#include <string>

#include "allocator/allocation_scope.h"
#include "allocator/device_registry.h"
#include "allocator/errors.h"
#include "allocator/log.h"
#include "allocator/mutex.h"
#include "pool/region_core.h"
#include "pool/region_observer.h"

namespace lowtide {
namespace {

/// Names are shown in Python, which takes no other text.
bool is_utf8(std::string_view text) {
  const std::u8string bytes(text.begin(), text.end());
  std::u32string decoded(bytes.size(), U'\0');
  std::mbstate_t state{};
  const char8_t* bytes_end = nullptr;
  char32_t* decoded_end = nullptr;
  const auto& decoder = std::use_facet<std::codecvt<char32_t, char8_t, std::mbstate_t>>(std::locale::classic());
  const auto result = decoder.in(state, bytes.data(), bytes.data() + bytes.size(), bytes_end, decoded.data(),
                                 decoded.data() + decoded.size(), decoded_end);
  // Older decoders let halves of UTF-16 pairs through.
  const bool has_halves = std::ranges::any_of(decoded, [](char32_t c) { return c >= 0xd800 && c < 0xe000; });
  return result == std::codecvt_base::ok && bytes_end == bytes.data() + bytes.size() && !has_halves;
}

/// All regions. A core lives while a handle or a live block does; regions without both are dropped when a handle ends
/// and whenever somebody looks.
class Registry {
 public:
  std::shared_ptr<RegionCore> open(std::string_view name) {
    const MutexLock lock(mutex_);
    sweep();
    for (Entry& entry : entries_) {
      if (entry.core->name() == name) return handle_to(entry);
    }
    const OwnerId id{++last_id_};
    entries_.push_back({std::make_shared<RegionCore>(std::string(name), id), {}});
    return handle_to(entries_.back());
  }

  std::shared_ptr<RegionCore> find(std::string_view name) {
    const MutexLock lock(mutex_);
    sweep();
    std::string names;
    for (Entry& entry : entries_) {
      if (entry.core->name() == name) return handle_to(entry);
      names += fmt::format("{}'{}'", names.empty() ? "" : ", ", entry.core->name());
    }
    throw Misuse(fmt::format("there is no region '{}'; there are: {}", name, names.empty() ? "none" : names));
  }

  std::vector<std::shared_ptr<RegionCore>> all() {
    // Before the lock, so that handles that a failure drops here end after it is let go.
    std::vector<std::shared_ptr<RegionCore>> handles;
    const MutexLock lock(mutex_);
    sweep();
    for (Entry& entry : entries_) handles.push_back(handle_to(entry));
    return handles;
  }

  void handle_ended() noexcept {
    if (in_forked_child()) return;
    try {
      const MutexLock lock(mutex_);
      sweep();
    } catch (const std::exception& error) {
      log(LogLevel::Error, "a region that ended keeps its memory for now: {}", error.what());
    }
  }

 private:
  struct Entry {
    std::shared_ptr<RegionCore> core;
    std::weak_ptr<RegionCore> handles;  // one control block for all handles, so that their end is noticed
  };

  std::shared_ptr<RegionCore> handle_to(Entry& entry) LOWTIDE_REQUIRES(mutex_) {
    if (auto existing = entry.handles.lock()) return existing;
    std::shared_ptr<RegionCore> handle(entry.core.get(), [this, core = entry.core](RegionCore*) mutable {
      core.reset();
      handle_ended();
    });
    entry.handles = handle;
    return handle;
  }

  void sweep() LOWTIDE_REQUIRES(mutex_) {
    std::erase_if(entries_,
                  [](const Entry& entry) { return entry.handles.expired() && entry.core->release_what_is_unused(); });
  }

  Mutex mutex_;
  std::vector<Entry> entries_ LOWTIDE_GUARDED_BY(mutex_);
  std::uint32_t last_id_ LOWTIDE_GUARDED_BY(mutex_) = 0;
};

/// Leaked: handles may end while the process exits.
Registry& registry() {
  static Registry* const instance = new Registry;
  return *instance;
}

void scope_changed() {
  if (RegionObserver* observer = region_observer()) observer->scope_changed();
}

void leave(OwnerId owner) noexcept {
  try {
    leave_scope(owner);
    scope_changed();
  } catch (const std::exception& error) {
    log(LogLevel::Error, "{}", error.what());
  }
}

}  // namespace

std::string_view to_string(RegionState state) noexcept {
  switch (state) {
    case RegionState::Resident:
      return "resident";
    case RegionState::Evicting:
      return "evicting";
    case RegionState::Evicted:
      return "evicted";
    case RegionState::Restoring:
      return "restoring";
  }
  return "unknown";
}

Region::Region(std::string_view name) {
  refuse_forked_child();
  if (name.empty()) throw Misuse("a region needs a name");
  if (!is_utf8(name)) throw Misuse("a region's name is UTF-8 text");
  core_ = registry().open(name);
}

Region Region::find(std::string_view name) {
  refuse_forked_child();
  return Region(registry().find(name));
}

std::vector<Region> Region::all() {
  refuse_forked_child();
  std::vector<Region> regions;
  for (auto& core : registry().all()) regions.push_back(Region(std::move(core)));
  return regions;
}

const std::string& Region::name() const noexcept { return core_->name(); }
OwnerId Region::id() const noexcept { return core_->id(); }
void Region::evict(const EvictOptions& options) { core_->evict(*this, options); }
void Region::restore() { core_->restore(*this); }

RegionState Region::state() const {
  const auto usage = core_->usage();
  if (usage.evicting) return RegionState::Evicting;
  if (usage.restoring) return RegionState::Restoring;
  return usage.evicted > 0 ? RegionState::Evicted : RegionState::Resident;
}

Bytes Region::allocated_bytes() const { return core_->usage().allocated; }
Bytes Region::evicted_bytes() const { return core_->usage().evicted; }
Bytes Region::pinned_bytes() const { return core_->pinned_bytes(); }

Bytes Region::resident_bytes() const {
  const auto usage = core_->usage();
  return usage.allocated - usage.evicted;
}

std::vector<BlockInfo> Region::live_blocks() const {
  refuse_forked_child();
  std::vector<BlockInfo> blocks;
  for (CachingAllocator* allocator : existing_allocators()) {
    const auto on_device = allocator->live_blocks(id());
    blocks.insert(blocks.end(), on_device.begin(), on_device.end());
  }
  return blocks;
}

OffloadRegion::OffloadRegion(Region region) : region_(std::move(region)) {
  enter_scope(region_.id());
  scope_changed();
}

OffloadRegion::~OffloadRegion() { leave(region_.id()); }

NoRegion::NoRegion() {
  enter_scope(kNoOwner);
  scope_changed();
}

NoRegion::~NoRegion() { leave(kNoOwner); }

}  // namespace lowtide
