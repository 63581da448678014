#include "pool/region_api.h"

#include <map>
#include <string>

#include "allocator/allocation_scope.h"
#include "allocator/c_api.h"
#include "allocator/errors.h"
#include "allocator/mutex.h"
#include "pool/offload_region.h"
#include "pool/region_observer.h"

namespace lowtide {
namespace {

/// Regions that C callers keep alive by name.
struct NamedRegions {
  Mutex mutex;
  std::map<std::string, Region, std::less<>> regions LOWTIDE_GUARDED_BY(mutex);
};

NamedRegions& named() {
  static NamedRegions* const instance = new NamedRegions;
  return *instance;
}

std::string_view checked(const char* name) {
  if (name == nullptr) throw Misuse("a region needs a name");
  return name;
}

Region keep(const char* name) {
  NamedRegions& all = named();
  const MutexLock lock(all.mutex);
  auto found = all.regions.find(checked(name));
  if (found == all.regions.end()) found = all.regions.emplace(name, Region(name)).first;
  return found->second;
}

void scope_changed() {
  if (RegionObserver* observer = region_observer()) observer->scope_changed();
}

}  // namespace
}  // namespace lowtide

using namespace lowtide;

extern "C" {

int lowtide_region_enter(const char* name) {
  return c_call("lowtide_region_enter", -1, [&] {
    enter_scope(keep(name).id());
    scope_changed();
    return 0;
  });
}

int lowtide_region_leave(const char* name) {
  return c_call("lowtide_region_leave", -1, [&] {
    leave_scope(Region::find(checked(name)).id());
    scope_changed();
    return 0;
  });
}

int lowtide_region_evict(const char* name, int device, void* stream) {
  return c_call("lowtide_region_evict", -1, [&] {
    EvictOptions options;
    options.after.push_back({device, StreamHandle{reinterpret_cast<std::uintptr_t>(stream)}});
    // Nobody here tracks tensors: the caller answers for the blocks.
    options.untracked = Untracked::Unmap;
    Region::find(checked(name)).evict(options);
    return 0;
  });
}

int lowtide_region_restore(const char* name) {
  return c_call("lowtide_region_restore", -1, [&] {
    Region::find(checked(name)).restore();
    return 0;
  });
}

size_t lowtide_region_resident_bytes(const char* name) {
  return c_call<size_t>("lowtide_region_resident_bytes", 0,
                        [&] { return Region::find(checked(name)).resident_bytes(); });
}

size_t lowtide_region_evicted_bytes(const char* name) {
  return c_call<size_t>("lowtide_region_evicted_bytes", 0, [&] { return Region::find(checked(name)).evicted_bytes(); });
}

int lowtide_region_release(const char* name) {
  return c_call("lowtide_region_release", -1, [&] {
    NamedRegions& all = named();
    // The handle ends outside the lock: its end may free memory.
    std::map<std::string, Region, std::less<>>::node_type ended;
    const MutexLock lock(all.mutex);
    const auto found = all.regions.find(checked(name));
    if (found == all.regions.end()) throw Misuse(std::string("there is no region '") + name + "'");
    if (in_scope_of(found->second.id())) {
      throw Misuse(std::string("region '") + name + "' is open on this thread: lowtide_region_leave() it first");
    }
    ended = all.regions.extract(found);
    return 0;
  });
}

}  // extern "C"
