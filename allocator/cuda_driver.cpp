#include "allocator/cuda_driver.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <exception>

namespace lowtide {
namespace {

/// Looks entry points up, and remembers the first that is missing.
class Lookup {
 public:
  explicit Lookup(void* library)
      : with_status_(reinterpret_cast<PFN_cuGetProcAddress_v12000>(dlsym(library, "cuGetProcAddress_v2"))),
        plain_(reinterpret_cast<PFN_cuGetProcAddress_v11030>(dlsym(library, "cuGetProcAddress"))) {}

  /// `version` is that of the function's type: the driver returns the interface of that CUDA version.
  template <typename Function>
  void operator()(Function& target, const char* name, int version) {
    void* found = nullptr;
    if (find(name, &found, version) != CUDA_SUCCESS || found == nullptr) {
      if (missing_.empty()) missing_ = name;
      return;
    }
    target = reinterpret_cast<Function>(found);
  }

  /// Empty if all were found.
  const std::string& missing() const noexcept { return missing_; }

 private:
  CUresult find(const char* name, void** found, int version) const {
    if (with_status_ != nullptr) {
      CUdriverProcAddressQueryResult status{};
      return with_status_(name, found, version, CU_GET_PROC_ADDRESS_LEGACY_STREAM, &status);
    }
    // The signature of drivers before CUDA 12.
    if (plain_ != nullptr) return plain_(name, found, version, CU_GET_PROC_ADDRESS_LEGACY_STREAM);
    return CUDA_ERROR_NOT_FOUND;
  }

  PFN_cuGetProcAddress_v12000 with_status_;
  PFN_cuGetProcAddress_v11030 plain_;
  std::string missing_;
};

std::string find_all(void* library, CudaDriver& driver) {
  Lookup find(library);
  find(driver.init, "cuInit", 2000);
  find(driver.driver_get_version, "cuDriverGetVersion", 2020);
  find(driver.get_error_name, "cuGetErrorName", 6000);
  find(driver.get_error_string, "cuGetErrorString", 6000);
  find(driver.device_get_count, "cuDeviceGetCount", 2000);
  find(driver.device_get, "cuDeviceGet", 2000);
  find(driver.device_get_name, "cuDeviceGetName", 2000);
  find(driver.device_get_attribute, "cuDeviceGetAttribute", 2000);
  find(driver.primary_ctx_retain, "cuDevicePrimaryCtxRetain", 7000);
  find(driver.primary_ctx_release, "cuDevicePrimaryCtxRelease", 11000);
  find(driver.ctx_push_current, "cuCtxPushCurrent", 4000);
  find(driver.ctx_pop_current, "cuCtxPopCurrent", 4000);
  find(driver.mem_get_info, "cuMemGetInfo", 3020);
  find(driver.mem_get_allocation_granularity, "cuMemGetAllocationGranularity", 10020);
  find(driver.mem_address_reserve, "cuMemAddressReserve", 10020);
  find(driver.mem_address_free, "cuMemAddressFree", 10020);
  find(driver.mem_create, "cuMemCreate", 10020);
  find(driver.mem_release, "cuMemRelease", 10020);
  find(driver.mem_map, "cuMemMap", 10020);
  find(driver.mem_unmap, "cuMemUnmap", 10020);
  find(driver.mem_set_access, "cuMemSetAccess", 10020);
  find(driver.stream_create, "cuStreamCreate", 2000);
  find(driver.stream_destroy, "cuStreamDestroy", 4000);
  find(driver.stream_synchronize, "cuStreamSynchronize", 2000);
  find(driver.stream_wait_event, "cuStreamWaitEvent", 3020);
  find(driver.stream_is_capturing, "cuStreamIsCapturing", 10000);
  find(driver.event_create, "cuEventCreate", 2000);
  find(driver.event_destroy, "cuEventDestroy", 4000);
  find(driver.event_record, "cuEventRecord", 2000);
  find(driver.event_query, "cuEventQuery", 2000);
  find(driver.event_synchronize, "cuEventSynchronize", 2000);
  find(driver.memcpy_dtoh_async, "cuMemcpyDtoHAsync", 3020);
  find(driver.memcpy_htod_async, "cuMemcpyHtoDAsync", 3020);
  find(driver.memcpy_dtod_async, "cuMemcpyDtoDAsync", 3020);
  find(driver.mem_host_register, "cuMemHostRegister", 6050);
  find(driver.mem_host_unregister, "cuMemHostUnregister", 4000);
  find(driver.mem_host_alloc, "cuMemHostAlloc", 2020);
  find(driver.mem_host_get_device_pointer, "cuMemHostGetDevicePointer", 3020);
  find(driver.stream_wait_value32, "cuStreamWaitValue32", 11070);
  return find.missing();
}

/// Fills `state`, whose reason stays empty only if there are devices.
void load(CudaDriverState& state) {
  // Never closed: contexts, and threads of the driver, live until the process ends.
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const error = dlerror();
    state.reason = fmt::format("there is no CUDA driver: {}", error == nullptr ? "dlopen failed" : error);
    return;
  }
  const std::string missing = find_all(library, state.driver);
  if (!missing.empty()) {
    state.reason = fmt::format("the CUDA driver is too old: it has no {} of the version needed", missing);
    return;
  }
  static_cast<void>(state.driver.driver_get_version(&state.version));
  if (const CUresult result = state.driver.init(0); result != CUDA_SUCCESS) {
    state.reason = fmt::format("cuInit(0) failed: {}", cuda_error_text(state.driver, result));
    return;
  }
  int devices = 0;
  if (const CUresult result = state.driver.device_get_count(&devices); result != CUDA_SUCCESS) {
    state.reason = fmt::format("cuDeviceGetCount() failed: {}", cuda_error_text(state.driver, result));
    return;
  }
  state.devices = devices;
  if (devices == 0) state.reason = "the CUDA driver shows no device to this process (CUDA_VISIBLE_DEVICES?)";
}

}  // namespace

const CudaDriverState& cuda_driver_state() noexcept {
  static const CudaDriverState* const state = [] {
    auto* loaded = new CudaDriverState{};
    try {
      load(*loaded);
    } catch (const std::exception& error) {
      loaded->devices = 0;
      loaded->reason = error.what();
    }
    return loaded;
  }();
  return *state;
}

std::string cuda_error_text(const CudaDriver& driver, CUresult result) {
  const char* name = nullptr;
  const char* text = nullptr;
  // An error newer than the driver's own list has neither.
  if (driver.get_error_name(result, &name) != CUDA_SUCCESS || name == nullptr) {
    return fmt::format("CUDA error {}", static_cast<int>(result));
  }
  if (driver.get_error_string(result, &text) != CUDA_SUCCESS || text == nullptr) return name;
  return fmt::format("{} ({})", name, text);
}

}  // namespace lowtide
