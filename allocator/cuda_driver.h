// The CUDA driver's entry points that Lowtide uses, looked up at run time: nothing links to libcuda, so the library
// loads where no driver is. Only cuda_device.cpp and tests/support include this; it brings CUDA's types.
#pragma once

#include <cudaTypedefs.h>

#include <string>

namespace lowtide {

/// Each type names the version of the interface that is asked for, so a newer driver or header changes nothing.
/// All entries are set. Streams are legacy: stream 0 is the one that blocking streams synchronise with.
struct CudaDriver {
  PFN_cuInit_v2000 init;
  PFN_cuDriverGetVersion_v2020 driver_get_version;
  PFN_cuGetErrorName_v6000 get_error_name;
  PFN_cuGetErrorString_v6000 get_error_string;
  PFN_cuDeviceGetCount_v2000 device_get_count;
  PFN_cuDeviceGet_v2000 device_get;
  PFN_cuDeviceGetName_v2000 device_get_name;
  PFN_cuDeviceGetAttribute_v2000 device_get_attribute;
  PFN_cuDevicePrimaryCtxRetain_v7000 primary_ctx_retain;
  PFN_cuDevicePrimaryCtxRelease_v11000 primary_ctx_release;
  PFN_cuCtxPushCurrent_v4000 ctx_push_current;
  PFN_cuCtxPopCurrent_v4000 ctx_pop_current;

  PFN_cuMemGetInfo_v3020 mem_get_info;
  PFN_cuMemGetAllocationGranularity_v10020 mem_get_allocation_granularity;
  PFN_cuMemAddressReserve_v10020 mem_address_reserve;
  PFN_cuMemAddressFree_v10020 mem_address_free;
  PFN_cuMemCreate_v10020 mem_create;
  PFN_cuMemRelease_v10020 mem_release;
  PFN_cuMemMap_v10020 mem_map;
  PFN_cuMemUnmap_v10020 mem_unmap;
  PFN_cuMemSetAccess_v10020 mem_set_access;

  PFN_cuStreamCreate_v2000 stream_create;
  PFN_cuStreamDestroy_v4000 stream_destroy;
  PFN_cuStreamSynchronize_v2000 stream_synchronize;
  PFN_cuStreamWaitEvent_v3020 stream_wait_event;
  PFN_cuStreamIsCapturing_v10000 stream_is_capturing;
  PFN_cuEventCreate_v2000 event_create;
  PFN_cuEventDestroy_v4000 event_destroy;
  PFN_cuEventRecord_v2000 event_record;
  PFN_cuEventQuery_v2000 event_query;
  PFN_cuEventSynchronize_v2000 event_synchronize;

  PFN_cuMemcpyDtoHAsync_v3020 memcpy_dtoh_async;
  PFN_cuMemcpyHtoDAsync_v3020 memcpy_htod_async;
  PFN_cuMemcpyDtoDAsync_v3020 memcpy_dtod_async;
  PFN_cuMemHostRegister_v6050 mem_host_register;
  PFN_cuMemHostUnregister_v4000 mem_host_unregister;

  // A flag that holds a stream until the host sets it (tests/support/latch).
  PFN_cuMemHostAlloc_v2020 mem_host_alloc;
  PFN_cuMemHostGetDevicePointer_v3020 mem_host_get_device_pointer;
  PFN_cuStreamWaitValue32_v11070 stream_wait_value32;
};

/// What was found when the driver was first asked for. Never destroyed.
struct CudaDriverState {
  CudaDriver driver;  // use only if devices > 0
  int devices = 0;
  int version = 0;     // 13000 for 13.0; 0 without a driver
  std::string reason;  // why devices is 0; else empty
};

/// Loads and initialises the driver on the first call. Creates no context.
const CudaDriverState& cuda_driver_state() noexcept;

/// "CUDA_ERROR_INVALID_VALUE (invalid argument)".
std::string cuda_error_text(const CudaDriver& driver, CUresult result);

}  // namespace lowtide
