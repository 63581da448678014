// The units of Lowtide: sizes, device addresses and driver handles.
// Addresses and handles are distinct types, so that a stream cannot be passed where an event is meant.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace lowtide {

/// A size or an offset, in bytes.
using Bytes = std::size_t;

inline constexpr Bytes operator""_KiB(unsigned long long n) { return n << 10; }
inline constexpr Bytes operator""_MiB(unsigned long long n) { return n << 20; }
inline constexpr Bytes operator""_GiB(unsigned long long n) { return n << 30; }

/// A virtual address of a device. Memory may or may not be mapped there.
enum class DeviceAddress : std::uintptr_t {};

/// A stream of a device: a CUstream, or a worker thread's queue on the host device. 0 is the default stream.
enum class StreamHandle : std::uintptr_t {};

/// An event of a device. 0 is no event.
enum class EventHandle : std::uintptr_t {};

/// Physical memory of a device, without an address. 0 is no memory.
enum class PageHandle : std::uint64_t {};

constexpr DeviceAddress operator+(DeviceAddress address, Bytes n) {
  return DeviceAddress{static_cast<std::uintptr_t>(address) + n};
}

constexpr Bytes operator-(DeviceAddress end, DeviceAddress begin) {
  return static_cast<std::uintptr_t>(end) - static_cast<std::uintptr_t>(begin);
}

inline void* to_pointer(DeviceAddress address) { return reinterpret_cast<void*>(address); }

inline DeviceAddress to_address(const void* pointer) {
  return DeviceAddress{reinterpret_cast<std::uintptr_t>(pointer)};
}

/// Smallest multiple of `unit` that holds `n`. Pre: unit > 0.
constexpr Bytes round_up(Bytes n, Bytes unit) { return (n + unit - 1) / unit * unit; }

/// Largest multiple of `unit` not above `n`. Pre: unit > 0.
constexpr Bytes round_down(Bytes n, Bytes unit) { return n / unit * unit; }

/// A range of offsets.
struct Extent {
  Bytes offset = 0;
  Bytes size = 0;
  Bytes end() const noexcept { return offset + size; }
  friend bool operator==(const Extent&, const Extent&) = default;
};

/// Blocks start and end at multiples of this: what CUDA guarantees of its own allocations at least, and torch relies on.
inline constexpr Bytes kBlockUnit = 512;

/// Who a block belongs to: an offload region, or nobody (ordinary memory).
enum class OwnerId : std::uint32_t {};
inline constexpr OwnerId kNoOwner{0};

}  // namespace lowtide
