// What the bridge asks torch about the current device and stream, answered without a driver: this program's definitions
// come before those of libc10_cuda.
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

namespace c10::cuda {

cudaError_t GetDevice(DeviceIndex* device) {
  *device = 0;
  return cudaSuccess;
}

CUDAStream getCurrentCUDAStream(DeviceIndex) {
  return CUDAStream(CUDAStream::UNCHECKED, Stream(Stream::DEFAULT, Device(DeviceType::CUDA, 0)));
}

cudaStream_t CUDAStream::stream() const { return nullptr; }

}  // namespace c10::cuda
