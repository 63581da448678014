#include "allocator/plugin.h"

#include "allocator/allocation_scope.h"
#include "allocator/c_api.h"
#include "allocator/device_registry.h"
#include "allocator/errors.h"

namespace lowtide {

std::string& last_error() noexcept {
  thread_local std::string text;
  return text;
}

namespace {

CachingAllocator& cuda_allocator_of(int device) {
  // Throws where the process chose another kind: its memory is of no use to a caller that expects CUDA's.
  if (device_kind() != DeviceKind::Cuda) select_devices(DeviceKind::Cuda);
  return allocator_of(device);
}

StreamHandle to_stream(void* stream) { return StreamHandle{reinterpret_cast<std::uintptr_t>(stream)}; }

}  // namespace
}  // namespace lowtide

using namespace lowtide;

extern "C" {

void* lowtide_malloc(ssize_t size, int device, void* stream) {
  return c_call<void*>("lowtide_malloc", nullptr, [&] {
    if (size < 0) throw Misuse("a negative size");
    return to_pointer(cuda_allocator_of(device).allocate(static_cast<Bytes>(size), to_stream(stream), current_owner()));
  });
}

void lowtide_free(void* pointer, ssize_t, int, void*) {
  c_call<int>("lowtide_free", -1, [&] {
    if (pointer == nullptr || in_forked_child()) return 0;
    CachingAllocator* owner = owner_of(to_address(pointer));
    if (owner == nullptr || !owner->free(to_address(pointer)))
      throw Misuse("no block of Lowtide starts at this address");
    return 0;
  });
}

void lowtide_init(int) {
  // torch calls this with 0 when the allocator object is made, which may be before CUDA is up; devices are set up by
  // the first allocation on each.
}

void lowtide_reset(void) {
  c_call<int>("lowtide_reset", -1, [] {
    for (CachingAllocator* allocator : existing_allocators()) allocator->trim();
    return 0;
  });
}

void lowtide_set_memory_fraction(double fraction, int device) {
  c_call<int>("lowtide_set_memory_fraction", -1, [&] {
    cuda_allocator_of(device).set_memory_fraction(fraction);
    return 0;
  });
}

void* lowtide_base_alloc(void* pointer, size_t* size) {
  return c_call<void*>("lowtide_base_alloc", pointer, [&] {
    CachingAllocator* owner = owner_of(to_address(pointer));
    const auto block = owner == nullptr ? std::nullopt : owner->find(to_address(pointer));
    if (!block) throw Misuse("no block of Lowtide is at this address");
    if (size != nullptr) *size = block->size;
    return to_pointer(block->address);
  });
}

void lowtide_record_stream(void* pointer, void* stream) {
  c_call<int>("lowtide_record_stream", -1, [&] {
    // torch also calls this for empty tensors and for memory that is not ours: nothing to do then.
    CachingAllocator* owner = pointer == nullptr ? nullptr : owner_of(to_address(pointer));
    if (owner != nullptr) owner->record_stream(to_address(pointer), to_stream(stream));
    return 0;
  });
}

const char* lowtide_last_error(void) { return last_error().c_str(); }

}  // extern "C"
