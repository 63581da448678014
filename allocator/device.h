// The seam between Lowtide and a device: what it needs of a driver, and nothing else.
// cuda_device.h implements it on the CUDA driver API, host_device.h on this computer's memory.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "allocator/types.h"

namespace lowtide {

struct DeviceMemory {
  Bytes free;
  Bytes total;
};

/// One device. All calls are safe from any thread and leave the calling thread's current device as it was.
/// Calls marked noexcept are cleanup: a failure is logged and the object leaked, never raised.
/// Others throw DriverError (OutOfMemory where named) and then have changed nothing.
class Device {
 public:
  virtual ~Device() = default;

  virtual int index() const noexcept = 0;
  /// "cuda" or "host".
  virtual std::string_view kind() const noexcept = 0;
  /// The product's name, for people.
  virtual std::string name() const = 0;
  /// Sizes and addresses of reserve, create, map and unmap are multiples of this.
  virtual Bytes granularity() const noexcept = 0;
  /// Free and total memory of the whole device, as the driver sees it.
  virtual DeviceMemory memory() = 0;

  // Virtual memory. A page is mapped whole, at one address at a time.

  /// An address range with nothing behind it. Throws OutOfMemory where the address space is used up.
  virtual DeviceAddress reserve(Bytes size) = 0;
  /// Pre: nothing is mapped in [address, address + size), which one reserve() returned.
  virtual void release_address(DeviceAddress address, Bytes size) noexcept = 0;
  /// Physical memory. Throws OutOfMemory.
  virtual PageHandle create(Bytes size) = 0;
  /// Pre: not mapped.
  virtual void release(PageHandle page, Bytes size) noexcept = 0;
  /// Makes `page` readable and writable at `address`. Pre: nothing is mapped there.
  virtual void map(DeviceAddress address, Bytes size, PageHandle page) = 0;
  /// Pre: one map() call mapped exactly this range, and every stream that used it is past that use:
  /// unmapping waits for nothing (cuMemUnmap under a running kernel is a fault).
  virtual void unmap(DeviceAddress address, Bytes size) = 0;

  // Order.

  virtual StreamHandle create_stream() = 0;
  virtual void destroy_stream(StreamHandle stream) noexcept = 0;
  virtual EventHandle create_event() = 0;
  virtual void destroy_event(EventHandle event) noexcept = 0;
  /// The event passes when all work queued on `stream` so far is done.
  virtual void record(EventHandle event, StreamHandle stream) = 0;
  /// True once the last record() of `event` has passed; an event never recorded has passed.
  virtual bool query(EventHandle event) = 0;
  /// Blocks this thread until `event` has passed.
  virtual void synchronize(EventHandle event) = 0;
  /// Blocks this thread until all work queued on `stream` so far is done.
  virtual void synchronize(StreamHandle stream) = 0;
  /// Work queued on `stream` from here on starts after `event`. Does not block this thread.
  virtual void wait(StreamHandle stream, EventHandle event) = 0;
  /// True while `stream` is being captured into a graph.
  virtual bool is_capturing(StreamHandle stream) = 0;

  // Copies: queued on `stream`, asynchronous towards this thread where the host memory is registered.
  // A copy may cross pages mapped side by side; it may not cross two separately registered host ranges.

  virtual void copy_to_host(void* target, DeviceAddress source, Bytes size, StreamHandle stream) = 0;
  virtual void copy_to_device(DeviceAddress target, const void* source, Bytes size, StreamHandle stream) = 0;
  virtual void copy_on_device(DeviceAddress target, DeviceAddress source, Bytes size, StreamHandle stream) = 0;

  /// Pins host memory, so that copies of it are asynchronous. Pre: page-aligned and touched.
  virtual void register_host(void* memory, Bytes size) = 0;
  virtual void unregister_host(void* memory, Bytes size) noexcept = 0;
};

}  // namespace lowtide
