#include "tests/support/block_content.h"

#include <algorithm>
#include <vector>

#include "tests/support/patterns.h"

namespace lowtide::testing {
namespace {

constexpr Bytes kSample = 512;
constexpr Bytes kSampleStep = 256_KiB;

/// Where samples of a block lie.
std::vector<Bytes> sample_offsets(Bytes size) {
  std::vector<Bytes> offsets;
  for (Bytes at = 0; at + kSample < size; at += kSampleStep) offsets.push_back(at);
  offsets.push_back(size > kSample ? size - kSample : 0);
  return offsets;
}

}  // namespace

void BlockContent::fill(DeviceAddress address, Bytes size, std::uint64_t cookie, StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  for (Bytes at = 0; at < size; at += buffer_.size()) {
    const Bytes part = std::min(buffer_.size(), size - at);
    fill_pattern(buffer_.data(), part, cookie, at);
    device_.copy_to_device(address + at, buffer_.data(), part, stream);
    device_.synchronize(stream);
  }
}

std::optional<Bytes> BlockContent::mismatch(DeviceAddress address, Bytes size, std::uint64_t cookie,
                                            StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  for (Bytes at = 0; at < size; at += buffer_.size()) {
    const Bytes part = std::min(buffer_.size(), size - at);
    device_.copy_to_host(buffer_.data(), address + at, part, stream);
    device_.synchronize(stream);
    if (const auto wrong = pattern_mismatch(buffer_.data(), part, cookie, at)) return at + *wrong;
  }
  return std::nullopt;
}

void BlockContent::fill_samples(DeviceAddress address, Bytes size, std::uint64_t cookie, StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  const Bytes part = std::min(kSample, size);
  Bytes used = 0;
  for (const Bytes at : sample_offsets(size)) {
    if (used + part > buffer_.size()) {
      device_.synchronize(stream);
      used = 0;
    }
    fill_pattern(buffer_.data() + used, part, cookie, at);
    device_.copy_to_device(address + at, buffer_.data() + used, part, stream);
    used += part;
  }
  device_.synchronize(stream);
}

std::optional<Bytes> BlockContent::sample_mismatch(DeviceAddress address, Bytes size, std::uint64_t cookie,
                                                   StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  const Bytes part = std::min(kSample, size);
  const std::vector<Bytes> offsets = sample_offsets(size);
  const std::size_t batch = buffer_.size() / kSample;
  for (std::size_t first = 0; first < offsets.size(); first += batch) {
    const std::size_t end = std::min(offsets.size(), first + batch);
    for (std::size_t i = first; i < end; ++i) {
      device_.copy_to_host(buffer_.data() + (i - first) * kSample, address + offsets[i], part, stream);
    }
    device_.synchronize(stream);
    for (std::size_t i = first; i < end; ++i) {
      const auto wrong = pattern_mismatch(buffer_.data() + (i - first) * kSample, part, cookie, offsets[i]);
      if (wrong) return offsets[i] + *wrong;
    }
  }
  return std::nullopt;
}

}  // namespace lowtide::testing
