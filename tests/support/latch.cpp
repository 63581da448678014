#include "tests/support/latch.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>

#include "allocator/cuda_driver.h"
#include "allocator/host_device.h"
#include "allocator/host_stream.h"
#include "tests/support/faulty_device.h"

namespace lowtide::testing {
namespace {

Device& real_device(Device& device) {
  auto* decorator = dynamic_cast<FaultyDevice*>(&device);
  return decorator == nullptr ? device : real_device(decorator->inner());
}

std::function<void()> hold_host(Device& device, StreamHandle stream) {
  auto opened = std::make_shared<Completion>();
  enqueue_host_function(device, stream, [opened] { opened->wait(); });
  return [opened] { opened->pass(); };
}

void check(CUresult result, const char* call) {
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error(std::string(call) + ": " + cuda_error_text(cuda_driver_state().driver, result));
  }
}

/// Makes the primary context of a device current, for a scope.
class PrimaryContext {
 public:
  PrimaryContext(const CudaDriver& driver, int index) : driver_(driver) {
    check(driver_.device_get(&device_, index), "cuDeviceGet");
    CUcontext context = nullptr;
    check(driver_.primary_ctx_retain(&context, device_), "cuDevicePrimaryCtxRetain");
    check(driver_.ctx_push_current(context), "cuCtxPushCurrent");
  }
  ~PrimaryContext() {
    CUcontext popped = nullptr;
    driver_.ctx_pop_current(&popped);
    driver_.primary_ctx_release(device_);
  }
  PrimaryContext(const PrimaryContext&) = delete;
  PrimaryContext& operator=(const PrimaryContext&) = delete;

 private:
  const CudaDriver& driver_;
  CUdevice device_ = 0;
};

/// A word of pinned memory that a stream can wait for. Never freed: cuMemFreeHost waits for all work of the device, so
/// it would hang while another latch holds a stream.
std::uint32_t* make_flag(const CudaDriver& driver) {
  void* memory = nullptr;
  check(driver.mem_host_alloc(&memory, sizeof(std::uint32_t), CU_MEMHOSTALLOC_DEVICEMAP), "cuMemHostAlloc");
  auto* flag = static_cast<std::uint32_t*>(memory);
  *flag = 0;
  return flag;
}

std::function<void()> hold_cuda(Device& device, StreamHandle stream) {
  const CudaDriver& driver = cuda_driver_state().driver;
  const PrimaryContext current(driver, device.index());
  std::uint32_t* const flag = make_flag(driver);
  CUdeviceptr flag_on_device = 0;
  check(driver.mem_host_get_device_pointer(&flag_on_device, flag, 0), "cuMemHostGetDevicePointer");
  check(driver.stream_wait_value32(reinterpret_cast<CUstream>(stream), flag_on_device, 1, CU_STREAM_WAIT_VALUE_GEQ),
        "cuStreamWaitValue32");
  return [flag] { std::atomic_ref<std::uint32_t>(*flag).store(1, std::memory_order_seq_cst); };
}

}  // namespace

StreamLatch::StreamLatch(Device& device, StreamHandle stream) {
  Device& real = real_device(device);
  open_ = real.kind() == "cuda" ? hold_cuda(real, stream) : hold_host(real, stream);
}

StreamLatch::~StreamLatch() { release(); }

void StreamLatch::release() noexcept { open_(); }

}  // namespace lowtide::testing
