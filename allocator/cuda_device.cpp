#include "allocator/cuda_device.h"

#include <fmt/format.h>

#include <exception>
#include <string_view>
#include <utility>

#include "allocator/bytes_format.h"
#include "allocator/cuda_driver.h"
#include "allocator/errors.h"
#include "allocator/fork_guard.h"
#include "allocator/log.h"

namespace lowtide {
namespace {

/// What a page is: memory of this device alone. Exportable or RDMA-capable handles cost twice as much to create.
CUmemAllocationProp page_properties(CUdevice device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  return properties;
}

/// At process exit the driver may be gone before the last tensor. Everything was freed with it.
bool gone(CUresult result) { return result == CUDA_ERROR_DEINITIALIZED || result == CUDA_ERROR_CONTEXT_IS_DESTROYED; }

CUdeviceptr raw(DeviceAddress address) { return static_cast<CUdeviceptr>(address); }
CUmemGenericAllocationHandle raw(PageHandle page) { return static_cast<CUmemGenericAllocationHandle>(page); }
CUstream raw(StreamHandle stream) { return reinterpret_cast<CUstream>(stream); }
CUevent raw(EventHandle event) { return reinterpret_cast<CUevent>(event); }
std::uintptr_t number(DeviceAddress address) { return static_cast<std::uintptr_t>(address); }
std::uintptr_t number(StreamHandle stream) { return static_cast<std::uintptr_t>(stream); }
std::uintptr_t number(EventHandle event) { return static_cast<std::uintptr_t>(event); }
std::uintptr_t number(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

/// Immutable after construction; the driver's calls are thread-safe, so there is no lock.
class CudaDevice final : public Device {
 public:
  CudaDevice(const CudaDriver& driver, int index);
  ~CudaDevice() override;

  int index() const noexcept override { return index_; }
  std::string_view kind() const noexcept override { return "cuda"; }
  std::string name() const override { return name_; }
  Bytes granularity() const noexcept override { return granularity_; }
  DeviceMemory memory() override;

  DeviceAddress reserve(Bytes size) override;
  void release_address(DeviceAddress address, Bytes size) noexcept override;
  PageHandle create(Bytes size) override;
  void release(PageHandle page, Bytes size) noexcept override;
  void map(DeviceAddress address, Bytes size, PageHandle page) override;
  void unmap(DeviceAddress address, Bytes size) override;

  StreamHandle create_stream() override;
  void destroy_stream(StreamHandle stream) noexcept override;
  EventHandle create_event() override;
  void destroy_event(EventHandle event) noexcept override;
  void record(EventHandle event, StreamHandle stream) override;
  bool query(EventHandle event) override;
  void synchronize(EventHandle event) override;
  void synchronize(StreamHandle stream) override;
  void wait(StreamHandle stream, EventHandle event) override;
  bool is_capturing(StreamHandle stream) override;

  void copy_to_host(void* target, DeviceAddress source, Bytes size, StreamHandle stream) override;
  void copy_to_device(DeviceAddress target, const void* source, Bytes size, StreamHandle stream) override;
  void copy_on_device(DeviceAddress target, DeviceAddress source, Bytes size, StreamHandle stream) override;

  void register_host(void* memory, Bytes size) override;
  void unregister_host(void* memory, Bytes size) noexcept override;

 private:
  /// Runs `call` with this device's context current, and puts the thread's own back.
  /// Returns the call's result, or why the context could not be made current.
  template <typename Call>
  CUresult in_context(Call call) const noexcept {
    if (const CUresult pushed = driver_.ctx_push_current(context_); pushed != CUDA_SUCCESS) return pushed;
    const CUresult result = call();
    CUcontext popped = nullptr;
    if (const CUresult pop = driver_.ctx_pop_current(&popped); pop != CUDA_SUCCESS && !gone(pop)) {
      log(LogLevel::Error, "cuCtxPopCurrent() failed: {}", cuda_error_text(driver_, pop));
    }
    return result;
  }

  /// `format` and `args` name the call, for the message.
  template <typename... Args>
  void check(CUresult result, fmt::format_string<Args...> format, Args&&... args) const {
    if (result == CUDA_SUCCESS) return;
    throw DriverError(fmt::format(format, std::forward<Args>(args)...), cuda_error_text(driver_, result));
  }

  template <typename... Args>
  void report(CUresult result, fmt::format_string<Args...> format, Args&&... args) const noexcept {
    if (result == CUDA_SUCCESS || gone(result)) return;
    try {
      log(LogLevel::Error, "{} failed: {}; leaked", fmt::format(format, std::forward<Args>(args)...),
          cuda_error_text(driver_, result));
    } catch (const std::exception&) {
      log(LogLevel::Error, "a cleanup call failed, and so did its message");
    }
  }

  CUresult set_access(DeviceAddress address, Bytes size) const noexcept;

  const CudaDriver& driver_;
  const int index_;
  const ForkGuard fork_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  std::string name_;
  Bytes granularity_ = 0;
};

CudaDevice::CudaDevice(const CudaDriver& driver, int index) : driver_(driver), index_(index) {
  check(driver_.device_get(&device_, index), "cuDeviceGet({})", index);
  int supported = 0;
  check(driver_.device_get_attribute(&supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device_),
        "cuDeviceGetAttribute(VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, {})", index);
  if (supported == 0) {
    throw DriverError(fmt::format("opening CUDA device {}", index), "it has no virtual memory management");
  }
  char name[256] = {};
  check(driver_.device_get_name(name, sizeof(name) - 1, device_), "cuDeviceGetName({})", index);
  name_ = name;
  const CUmemAllocationProp properties = page_properties(device_);
  check(driver_.mem_get_allocation_granularity(&granularity_, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
        "cuMemGetAllocationGranularity({}, MINIMUM)", index);
  // Last, for what throws after it would have to give it back.
  check(driver_.primary_ctx_retain(&context_, device_), "cuDevicePrimaryCtxRetain({})", index);
}

CudaDevice::~CudaDevice() {
  if (fork_.in_child()) return;
  report(driver_.primary_ctx_release(device_), "cuDevicePrimaryCtxRelease({})", index_);
}

DeviceMemory CudaDevice::memory() {
  fork_.check();
  DeviceMemory memory{};
  check(in_context([&] { return driver_.mem_get_info(&memory.free, &memory.total); }), "cuMemGetInfo()");
  return memory;
}

DeviceAddress CudaDevice::reserve(Bytes size) {
  fork_.check();
  CUdeviceptr address = 0;
  const CUresult result = in_context([&] { return driver_.mem_address_reserve(&address, size, granularity_, 0, 0); });
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    throw OutOfMemory(index_, size,
                      fmt::format("cuMemAddressReserve({}) failed: CUDA device {} has no {} of address space left",
                                  size, index_, format_bytes(size)));
  }
  check(result, "cuMemAddressReserve({})", size);
  return DeviceAddress{static_cast<std::uintptr_t>(address)};
}

void CudaDevice::release_address(DeviceAddress address, Bytes size) noexcept {
  if (fork_.in_child()) return;
  report(in_context([&] { return driver_.mem_address_free(raw(address), size); }), "cuMemAddressFree({:#x}, {})",
         number(address), size);
}

PageHandle CudaDevice::create(Bytes size) {
  fork_.check();
  const CUmemAllocationProp properties = page_properties(device_);
  CUmemGenericAllocationHandle page = 0;
  const CUresult result = in_context([&] { return driver_.mem_create(&page, size, &properties, 0); });
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    throw OutOfMemory(
        index_, size,
        fmt::format("cuMemCreate({}) failed: CUDA device {} cannot supply {}", size, index_, format_bytes(size)));
  }
  check(result, "cuMemCreate({}, device {})", size, index_);
  return PageHandle{page};
}

void CudaDevice::release(PageHandle page, Bytes size) noexcept {
  if (fork_.in_child()) return;
  report(in_context([&] { return driver_.mem_release(raw(page)); }), "cuMemRelease({:#x}) of {}", raw(page),
         format_bytes(size));
}

CUresult CudaDevice::set_access(DeviceAddress address, Bytes size) const noexcept {
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device_;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return driver_.mem_set_access(raw(address), size, &access, 1);
}

void CudaDevice::map(DeviceAddress address, Bytes size, PageHandle page) {
  fork_.check();
  check(in_context([&] { return driver_.mem_map(raw(address), size, 0, raw(page), 0); }),
        "cuMemMap({:#x}, {}, page {:#x})", number(address), size, raw(page));
  const CUresult result = in_context([&] { return set_access(address, size); });
  if (result == CUDA_SUCCESS) return;
  report(in_context([&] { return driver_.mem_unmap(raw(address), size); }), "cuMemUnmap({:#x}, {})", number(address),
         size);
  check(result, "cuMemSetAccess({:#x}, {}, device {}, read and write)", number(address), size, index_);
}

void CudaDevice::unmap(DeviceAddress address, Bytes size) {
  fork_.check();
  const CUresult result = in_context([&] { return driver_.mem_unmap(raw(address), size); });
  // Without a driver nothing is mapped any more, which is what was asked for.
  if (!gone(result)) check(result, "cuMemUnmap({:#x}, {})", number(address), size);
}

StreamHandle CudaDevice::create_stream() {
  fork_.check();
  CUstream stream = nullptr;
  // Non-blocking: a blocking one would order itself with stream 0, where torch works by default.
  check(in_context([&] { return driver_.stream_create(&stream, CU_STREAM_NON_BLOCKING); }),
        "cuStreamCreate(NON_BLOCKING)");
  return StreamHandle{reinterpret_cast<std::uintptr_t>(stream)};
}

void CudaDevice::destroy_stream(StreamHandle stream) noexcept {
  if (fork_.in_child()) return;
  report(in_context([&] { return driver_.stream_destroy(raw(stream)); }), "cuStreamDestroy({:#x})", number(stream));
}

EventHandle CudaDevice::create_event() {
  fork_.check();
  CUevent event = nullptr;
  check(in_context([&] { return driver_.event_create(&event, CU_EVENT_DISABLE_TIMING); }),
        "cuEventCreate(DISABLE_TIMING)");
  return EventHandle{reinterpret_cast<std::uintptr_t>(event)};
}

void CudaDevice::destroy_event(EventHandle event) noexcept {
  if (fork_.in_child()) return;
  report(in_context([&] { return driver_.event_destroy(raw(event)); }), "cuEventDestroy({:#x})", number(event));
}

void CudaDevice::record(EventHandle event, StreamHandle stream) {
  fork_.check();
  check(in_context([&] { return driver_.event_record(raw(event), raw(stream)); }), "cuEventRecord({:#x}, stream {:#x})",
        number(event), number(stream));
}

bool CudaDevice::query(EventHandle event) {
  fork_.check();
  const CUresult result = in_context([&] { return driver_.event_query(raw(event)); });
  if (result == CUDA_ERROR_NOT_READY) return false;
  check(result, "cuEventQuery({:#x})", number(event));
  return true;
}

void CudaDevice::synchronize(EventHandle event) {
  fork_.check();
  check(in_context([&] { return driver_.event_synchronize(raw(event)); }), "cuEventSynchronize({:#x})", number(event));
}

void CudaDevice::synchronize(StreamHandle stream) {
  fork_.check();
  check(in_context([&] { return driver_.stream_synchronize(raw(stream)); }), "cuStreamSynchronize({:#x})",
        number(stream));
}

void CudaDevice::wait(StreamHandle stream, EventHandle event) {
  fork_.check();
  check(in_context([&] { return driver_.stream_wait_event(raw(stream), raw(event), CU_EVENT_WAIT_DEFAULT); }),
        "cuStreamWaitEvent({:#x}, event {:#x})", number(stream), number(event));
}

bool CudaDevice::is_capturing(StreamHandle stream) {
  fork_.check();
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult result = in_context([&] { return driver_.stream_is_capturing(raw(stream), &status); });
  // The legacy stream, while a stream that synchronises with it is being captured: work on it would break the capture.
  if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) return true;
  check(result, "cuStreamIsCapturing({:#x})", number(stream));
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

void CudaDevice::copy_to_host(void* target, DeviceAddress source, Bytes size, StreamHandle stream) {
  fork_.check();
  if (size == 0) return;
  check(in_context([&] { return driver_.memcpy_dtoh_async(target, raw(source), size, raw(stream)); }),
        "cuMemcpyDtoHAsync({:#x}, {:#x}, {}, stream {:#x})", number(target), number(source), size, number(stream));
}

void CudaDevice::copy_to_device(DeviceAddress target, const void* source, Bytes size, StreamHandle stream) {
  fork_.check();
  if (size == 0) return;
  check(in_context([&] { return driver_.memcpy_htod_async(raw(target), source, size, raw(stream)); }),
        "cuMemcpyHtoDAsync({:#x}, {:#x}, {}, stream {:#x})", number(target), number(source), size, number(stream));
}

void CudaDevice::copy_on_device(DeviceAddress target, DeviceAddress source, Bytes size, StreamHandle stream) {
  fork_.check();
  if (size == 0) return;
  check(in_context([&] { return driver_.memcpy_dtod_async(raw(target), raw(source), size, raw(stream)); }),
        "cuMemcpyDtoDAsync({:#x}, {:#x}, {}, stream {:#x})", number(target), number(source), size, number(stream));
}

void CudaDevice::register_host(void* memory, Bytes size) {
  fork_.check();
  // Portable: pinned for the contexts of all devices, so one region's bytes may move through any of them.
  check(in_context([&] { return driver_.mem_host_register(memory, size, CU_MEMHOSTREGISTER_PORTABLE); }),
        "cuMemHostRegister({:#x}, {}, PORTABLE)", number(memory), size);
}

void CudaDevice::unregister_host(void* memory, Bytes size) noexcept {
  if (fork_.in_child()) return;
  report(in_context([&] { return driver_.mem_host_unregister(memory); }), "cuMemHostUnregister({:#x}) of {} bytes",
         number(memory), size);
}

/// The driver's state is inherited by a forked child, but the driver refuses to work there.
const ForkGuard& driver_fork_guard() {
  static const ForkGuard guard;
  return guard;
}

}  // namespace

int cuda_device_count() noexcept {
  const bool forked = driver_fork_guard().in_child();
  return forked ? 0 : cuda_driver_state().devices;
}

std::string cuda_unavailable_reason() {
  if (driver_fork_guard().in_child()) return "the process was forked after the CUDA driver was initialised";
  return cuda_driver_state().reason;
}

int cuda_driver_version() noexcept { return cuda_driver_state().version; }

std::unique_ptr<Device> make_cuda_device(int index) {
  const int count = cuda_device_count();
  if (count == 0) throw Misuse(fmt::format("there is no CUDA device {}: {}", index, cuda_unavailable_reason()));
  if (index < 0 || index >= count) {
    throw Misuse(fmt::format("there is no CUDA device {}: this process may use 0 to {}", index, count - 1));
  }
  return std::make_unique<CudaDevice>(cuda_driver_state().driver, index);
}

}  // namespace lowtide
