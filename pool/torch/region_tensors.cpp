#include "pool/torch/region_tensors.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <unordered_map>
#include <utility>

#include "allocator/allocation_scope.h"
#include "allocator/device_registry.h"
#include "allocator/errors.h"
#include "allocator/log_message.h"
#include "allocator/mutex.h"
#include "pool/region_observer.h"
#include "pool/torch/block_marks.h"
#include "pool/torch/in_parallel.h"
#include "pool/torch/known_storages.h"
#include "pool/torch/library_workspaces.h"

namespace lowtide {
namespace {

constexpr std::string_view kDefaultRemedy = "call region.restore() before using it";

// A storage is freed in two steps: first its last reference goes (nobody can find it any more), then its block. A
// thread that is between the two leaves a live block without a storage; it is given so many looks before the block
// counts as untracked.
constexpr int kLooks = 20;
constexpr auto kBetweenLooks = std::chrono::milliseconds(1);

// What a guarded storage itself no longer says.
struct AwayStorage {
  const c10::StorageImpl* storage;
  const void* bytes;
  Bytes size;
};

struct Tenants {
  // Guarded by the mutex. `known` may have readers outside it, who took a share under it: then it is copied before a
  // change. So a transfer can take strong references, for which torch may want the GIL, without the mutex and without a
  // copy.
  std::shared_ptr<KnownStorages> known = std::make_shared<KnownStorages>();
  std::size_t prune_at = 64;
  std::vector<AwayStorage> away;
  bool away_sorted = false;  // by storage; done when the first question comes
  std::size_t changed = 0;
  std::string remedy{kDefaultRemedy};

  // Touched only by transfers of the region, which exclude each other.
  std::vector<GuardedStorage> guarded;
  std::vector<std::unique_ptr<const GuardMessage>> messages;  // what `guarded` points to

  KnownStorages& known_to_change() {
    if (known.use_count() > 1) {
      known = std::make_shared<KnownStorages>(*known);
    } else {
      std::atomic_thread_fence(std::memory_order_acquire);  // after the reads of whoever gave up the last share
    }
    return *known;
  }
};

std::string place(OwnerId home) {
  if (home == kNoOwner) return "ordinary memory";
  for (const Region& region : Region::all()) {
    if (region.id() == home) return c10::str("offload region '", region.name(), "'");
  }
  return "another region";
}

std::string describe(const std::vector<BlockInfo>& blocks) {
  constexpr std::size_t kShown = 8;
  Bytes total = 0;
  std::string sizes;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    total += blocks[i].requested;
    if (i < kShown) sizes += c10::str(i == 0 ? "" : ", ", blocks[i].requested);
  }
  if (blocks.size() > kShown) sizes += ", …";
  return c10::str(blocks.size(), blocks.size() == 1 ? " live block of " : " live blocks of ", total, " bytes in all (",
                  sizes, ")");
}

class RegionTensors final : public RegionObserver {
 public:
  // What is known about storages.

  /// Adds the storage to the region its memory lies in. With `expected`: that region, else throws Misuse.
  void note(const c10::Storage& storage, const Region* expected = nullptr);
  OwnerId region_of(const c10::StorageImpl& storage);
  Bytes full_size_of(const c10::StorageImpl& storage);
  std::vector<BlockInfo> untracked_blocks(const Region& region);
  std::size_t tracked_storages(const Region& region);
  std::size_t table_entries(const Region& region);
  std::size_t take_changed_storages(const Region& region);
  void set_remedy(const Region& region, std::string remedy);

  // RegionObserver.

  void scope_changed() override;
  std::vector<DeviceStream> current_streams() override;
  void before_evict(const Region& region, const EvictOptions& options) override;
  void evict_failed(const Region& region) noexcept override;
  void while_restoring(const Region& region) noexcept override;
  void restore_failed(const Region& region) noexcept override;
  void after_restore(const Region& region) noexcept override;

 private:
  struct Look {
    std::vector<StorageRef> to_guard;
    std::vector<BlockInfo> untracked;
    bool lazily_shared = false;  // some storage is a lazy copy, or was copied lazily: others may use its bytes too
  };

  bool knows_region(OwnerId owner);
  bool knows(OwnerId owner, const c10::StorageImpl* storage, const void* bytes);
  void add(OwnerId owner, const c10::Storage& storage, void* bytes);
  std::optional<std::pair<OwnerId, Bytes>> guarded(const c10::StorageImpl& storage);
  Look look(const Region& region);
  Look look_patiently(const Region& region);
  Tenants& tenants_of(const Region& region);
  void release_all(const Region& region) noexcept;
  void forget_ended_regions();

  Mutex mutex_;
  std::unordered_map<OwnerId, Tenants> tenants_ LOWTIDE_GUARDED_BY(mutex_);
};

RegionTensors& tensors() {
  static auto* const instance =
      new RegionTensors;  // never destroyed: tensors and threads may outlive every static object
  return *instance;
}

/// The same, for a question or an order: refused in a forked child.
RegionTensors& asked() {
  refuse_forked_child();
  return tensors();
}

// Learning storages.

void note_all(const c10::IValue& value) {
  if (value.isTensor()) {
    const c10::TensorImpl* tensor = value.toTensor().unsafeGetTensorImpl();
    if (tensor->has_storage()) tensors().note(tensor->unsafe_storage());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) note_all(element);
  } else if (value.isTuple()) {
    for (const c10::IValue& element : value.toTupleRef().elements()) note_all(element);
  } else if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) note_all(entry.value());
  }
}

// What goes in is noted too: some tensors are made below the operators (a number in an expression, an argument from
// compiled code) and are first seen as an argument, to be kept in an autograd graph where nobody finds them.
std::unique_ptr<at::ObserverContext> operator_begins(const at::RecordFunction& call) {
  if (current_owner() == kNoOwner) return nullptr;
  for (const c10::IValue& input : call.inputs()) note_all(input);
  return nullptr;
}

void operator_ended(const at::RecordFunction& call, at::ObserverContext*) {
  // torch hands thread-local callbacks on to its worker threads; regions are not, so those stop here.
  if (current_owner() == kNoOwner) return;
  for (const c10::IValue& output : call.outputs()) note_all(output);
  if (device_kind() == DeviceKind::Cuda) move_library_workspaces_out();
}

thread_local at::CallbackHandle t_callback = at::INVALID_CALLBACK_HANDLE;

void RegionTensors::scope_changed() {
  const bool wanted = current_owner() != kNoOwner;
  if (wanted == (t_callback != at::INVALID_CALLBACK_HANDLE)) return;
  if (wanted) {
    t_callback = at::addThreadLocalCallback(at::RecordFunctionCallback(&operator_begins, &operator_ended)
                                                .needsInputs(true)
                                                .needsOutputs(true)
                                                .scopes({at::RecordScope::FUNCTION}));
  } else {
    at::removeCallback(std::exchange(t_callback, at::INVALID_CALLBACK_HANDLE));
  }
}

bool RegionTensors::knows_region(OwnerId owner) {
  const MutexLock lock(mutex_);
  return tenants_.contains(owner);
}

bool RegionTensors::knows(OwnerId owner, const c10::StorageImpl* storage, const void* bytes) {
  const MutexLock lock(mutex_);
  const auto tenants = tenants_.find(owner);
  if (tenants == tenants_.end()) return false;
  return tenants->second.known->contains(storage, bytes);
}

void RegionTensors::add(OwnerId owner, const c10::Storage& storage, void* bytes) {
  std::vector<KnownStorage> dead;  // dropped after the lock
  if (!knows_region(owner)) forget_ended_regions();
  const MutexLock lock(mutex_);
  Tenants& tenants = tenants_[owner];
  KnownStorages& known = tenants.known_to_change();
  known.insert(storage.unsafeGetStorageImpl(), storage.getWeakStorageImpl(), bytes);
  if (known.size() < tenants.prune_at) return;
  // Twice what survived: a long run of temporaries costs amortised constant time and keeps the table at twice the live
  // storages.
  dead = known.prune();
  tenants.prune_at = std::max<std::size_t>(64, 2 * known.size());
}

void RegionTensors::note(const c10::Storage& storage, const Region* expected) {
  const c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  if (impl == nullptr) return;
  if (in_forked_child()) {
    if (expected != nullptr) refuse_forked_child();
    return;  // an operator of the child, in a scope that was open when the parent forked
  }
  void* const bytes = bytes_of(*impl);
  const OwnerId likely = expected != nullptr ? expected->id() : current_owner();
  if (bytes != nullptr && likely != kNoOwner && knows(likely, impl, bytes)) return;

  const OwnerId home = region_of(*impl);
  const bool fits = expected == nullptr || home == expected->id();
  if (bytes != nullptr && home != kNoOwner && fits) add(home, storage, bytes);
  const bool empty = bytes == nullptr && home == kNoOwner;
  if (fits || empty) return;
  throw Misuse(c10::str("cannot track a tensor of ", full_size_of(*impl), " bytes in offload region '",
                        expected->name(), "': its memory is in ", place(home),
                        ". Allocate it inside `with OffloadRegion(\"", expected->name(),
                        "\"):`, or give it to a CPUOffloadPool, which moves tensors into a region of its own"));
}

// Questions.

OwnerId RegionTensors::region_of(const c10::StorageImpl& storage) {
  if (const void* bytes = bytes_of(storage)) {
    const auto block = block_at(bytes);
    return block ? block->owner : kNoOwner;
  }
  const auto found = guarded(storage);
  return found ? found->first : kNoOwner;
}

Bytes RegionTensors::full_size_of(const c10::StorageImpl& storage) {
  if (bytes_of(storage) != nullptr) return size_of(storage);
  const auto found = guarded(storage);
  return found ? found->second : size_of(storage);
}

std::optional<std::pair<OwnerId, Bytes>> RegionTensors::guarded(const c10::StorageImpl& storage) {
  const MutexLock lock(mutex_);
  for (auto& [owner, tenants] : tenants_) {
    auto& away = tenants.away;
    if (!std::exchange(tenants.away_sorted, true)) std::ranges::sort(away, {}, &AwayStorage::storage);
    const auto found = std::ranges::lower_bound(away, &storage, {}, &AwayStorage::storage);
    if (found != away.end() && found->storage == &storage) return std::pair(owner, found->size);
  }
  return std::nullopt;
}

std::size_t RegionTensors::tracked_storages(const Region& region) {
  const MutexLock lock(mutex_);
  const auto tenants = tenants_.find(region.id());
  if (tenants == tenants_.end()) return 0;
  return static_cast<std::size_t>(
      std::ranges::count_if(tenants->second.known->entries(), [](auto& entry) { return !entry.storage.expired(); }));
}

std::size_t RegionTensors::table_entries(const Region& region) {
  const MutexLock lock(mutex_);
  const auto tenants = tenants_.find(region.id());
  return tenants == tenants_.end() ? 0 : tenants->second.known->size();
}

std::size_t RegionTensors::take_changed_storages(const Region& region) {
  const MutexLock lock(mutex_);
  const auto tenants = tenants_.find(region.id());
  return tenants == tenants_.end() ? 0 : std::exchange(tenants->second.changed, 0);
}

void RegionTensors::set_remedy(const Region& region, std::string remedy) {
  const MutexLock lock(mutex_);
  tenants_[region.id()].remedy = std::move(remedy);
}

std::vector<BlockInfo> RegionTensors::untracked_blocks(const Region& region) { return look(region).untracked; }

std::vector<DeviceStream> RegionTensors::current_streams() {
  if (device_kind() == DeviceKind::Host) return {{0, StreamHandle{}}};
  std::vector<DeviceStream> streams;
  if (device_kind() != DeviceKind::Cuda) return streams;
  const c10::impl::VirtualGuardImpl cuda(c10::DeviceType::CUDA);
  for (CachingAllocator* allocator : existing_allocators()) {
    const int index = allocator->device().index();
    const c10::Stream stream = cuda.getStream(c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)));
    streams.push_back({index, StreamHandle{reinterpret_cast<std::uintptr_t>(stream.native_handle())}});
  }
  return streams;
}

// Evict and restore.

RegionTensors::Look RegionTensors::look(const Region& region) {
  std::shared_ptr<const KnownStorages> known;
  std::vector<AwayStorage> away;
  {
    const MutexLock lock(mutex_);
    const Tenants& tenants = tenants_[region.id()];
    known = tenants.known;
    away = tenants.away;
  }
  // Strong references come before the list of blocks: a storage that is alive now keeps its block in it.
  const std::span<const KnownStorage> entries = known->entries();
  Look result;
  result.to_guard.resize(entries.size());
  in_parallel(entries.size(), [&](std::size_t i) { result.to_guard[i] = entries[i].storage.lock(); });
  BlockMarks blocks(region);
  for (const AwayStorage& storage : away) blocks.mark(storage.bytes);
  std::atomic<bool> lazily_shared = false;
  // A known storage may be dead, or may have moved out of the region since (resized elsewhere): only those inside are
  // guarded.
  in_parallel(entries.size(), [&](std::size_t i) {
    StorageRef& storage = result.to_guard[i];
    if (!storage) return;
    const void* bytes = bytes_of(*storage);
    if (bytes == nullptr || !blocks.mark(bytes)) {
      storage.reset();
      return;
    }
    if (is_lazy_copy(*storage)) lazily_shared = true;
  });
  result.lazily_shared = lazily_shared;
  std::erase(result.to_guard, StorageRef());
  result.untracked = blocks.unmarked();
  return result;
}

RegionTensors::Look RegionTensors::look_patiently(const Region& region) {
  for (int looks = 1;; ++looks) {
    Look result = look(region);
    if (result.untracked.empty() || looks == kLooks) return result;
    std::this_thread::sleep_for(kBetweenLooks);
  }
}

void RegionTensors::before_evict(const Region& region, const EvictOptions& options) {
  Look found = options.untracked == Untracked::Unmap ? look(region) : look_patiently(region);
  if (options.untracked == Untracked::Refuse && !found.untracked.empty()) {
    throw Misuse(c10::str(
        "offload region '", region.name(), "' holds ", describe(found.untracked),
        " that no known tensor uses; using such a block while it is evicted would be a fault. Name the tensors with "
        "region.track(tensor), free them, or evict(untracked=\"unmap\") if nothing uses them before restore"));
  }

  if (options.untracked == Untracked::Refuse && found.lazily_shared) {
    throw Misuse(
        c10::str("offload region '", region.name(),
                 "' holds a tensor that shares its bytes with a lazy copy, which Lowtide cannot see; write to the "
                 "tensor and to the copy (x.add_(0)), which parts them, or evict(untracked=\"unmap\") if nothing "
                 "uses the copy before restore"));
  }

  Tenants& tenants = tenants_of(region);
  std::string remedy;
  {
    const MutexLock lock(mutex_);
    remedy = tenants.remedy;
    tenants.away.reserve(tenants.away.size() + found.to_guard.size());
  }
  auto message = std::make_unique<const GuardMessage>(
      c10::str("tensor of offload region '", region.name(), "' is evicted; ", remedy), found.to_guard.size());
  const std::size_t before = tenants.guarded.size();
  const std::size_t count = found.to_guard.size();
  tenants.messages.reserve(tenants.messages.size() + 1);
  tenants.guarded.resize(before + count);
  GuardedStorage* const guards = tenants.guarded.data() + before;
  try {
    in_parallel(count, [&](std::size_t i) {
      guards[i].engage(found.to_guard[i], *message, i);
      found.to_guard[i].reset();  // here, where the storage is at hand
    });
  } catch (...) {
    in_parallel(count, [&](std::size_t i) { guards[i].release(); });
    tenants.guarded.resize(before);
    throw;
  }
  tenants.messages.push_back(std::move(message));

  const MutexLock lock(mutex_);
  tenants.away_sorted = false;
  for (std::size_t i = before; i < tenants.guarded.size(); ++i) {
    const GuardedStorage& guarded = tenants.guarded[i];
    tenants.away.push_back({guarded.storage(), guarded.bytes(), guarded.size()});
  }
}

void RegionTensors::evict_failed(const Region& region) noexcept {
  // Where bytes went out and could not be brought back at once, the region is still evicted in part: its tensors stay
  // guarded until it is restored, rather than read what is not there.
  try {
    if (region.evicted_bytes() > 0) return;
  } catch (const std::exception& error) {
    log_message(LogLevel::Error, c10::str("offload region '", region.name(),
                                          "': its tensors stay guarded after a failed eviction: ", error.what()));
    return;
  }
  release_all(region);
}

void RegionTensors::while_restoring(const Region& region) noexcept {
  auto& guards = tenants_of(region).guarded;
  in_parallel(guards.size(), [&](std::size_t i) { guards[i].prepare_release(); });
}

void RegionTensors::restore_failed(const Region& region) noexcept {
  for (GuardedStorage& guard : tenants_of(region).guarded) guard.forget_preparation();
}

void RegionTensors::after_restore(const Region& region) noexcept { release_all(region); }

void RegionTensors::release_all(const Region& region) noexcept {
  Tenants& tenants = tenants_of(region);
  std::atomic<std::size_t> changed = 0;
  in_parallel(tenants.guarded.size(), [&](std::size_t i) {
    if (tenants.guarded[i].release() == GuardedStorage::Outcome::Changed) ++changed;
    tenants.guarded[i] = GuardedStorage();  // here, where the storage is at hand
  });
  tenants.guarded.clear();
  tenants.messages.clear();
  {
    const MutexLock lock(mutex_);
    tenants.away.clear();
    tenants.changed += changed;
  }
  if (changed == 0) return;
  log_message(LogLevel::Warn, c10::str("offload region '", region.name(), "': ", changed.load(),
                                       " storage(s) were given other memory while evicted; they were left as found"));
}

// Stays where it is while the region lives: map nodes do not move, and only regions that ended are erased.
Tenants& RegionTensors::tenants_of(const Region& region) {
  const MutexLock lock(mutex_);
  return tenants_[region.id()];
}

// Region ids are never used again, so what is not among the regions that exist is gone for good; ids above the newest
// one seen belong to regions made since.
void RegionTensors::forget_ended_regions() {
  const std::vector<Region> existing = Region::all();
  std::vector<Tenants> ended;  // dropped after the lock
  const MutexLock lock(mutex_);
  for (auto entry = tenants_.begin(); entry != tenants_.end();) {
    const auto here = entry++;
    const bool lives =
        std::any_of(existing.begin(), existing.end(), [&](auto& region) { return region.id() == here->first; });
    if (lives || existing.empty() || here->first > existing.back().id()) continue;
    ended.push_back(std::move(here->second));
    tenants_.erase(here);
  }
}

}  // namespace

void install_region_tensors() { set_region_observer(&tensors()); }

void track(const Region& region, const c10::Storage& storage) { tensors().note(storage, &region); }
void track_where_it_is(const c10::Storage& storage) { tensors().note(storage); }
OwnerId region_of(const c10::StorageImpl& storage) { return asked().region_of(storage); }
Bytes full_size_of(const c10::StorageImpl& storage) { return asked().full_size_of(storage); }
std::vector<BlockInfo> untracked_blocks(const Region& region) { return asked().untracked_blocks(region); }
std::size_t tracked_storages(const Region& region) { return asked().tracked_storages(region); }
std::size_t table_entries(const Region& region) { return asked().table_entries(region); }
std::size_t take_changed_storages(const Region& region) { return asked().take_changed_storages(region); }
void set_remedy(const Region& region, std::string remedy) { asked().set_remedy(region, std::move(remedy)); }

}  // namespace lowtide
