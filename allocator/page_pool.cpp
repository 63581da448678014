#include "allocator/page_pool.h"

#include <fmt/format.h>

#include "allocator/bytes_format.h"
#include "allocator/errors.h"

namespace lowtide {

PagePool::~PagePool() { release_free(); }

std::optional<Page> PagePool::take(Bytes size) noexcept {
  auto& list = free_list(size);
  if (list.empty()) return std::nullopt;
  Page page{list.back(), size};
  list.pop_back();
  return page;
}

Page PagePool::create(Bytes size) {
  if (held_bytes_ + size > limit_) {
    throw OutOfMemory(
        device_.index(), size,
        fmt::format("the memory limit of {} is reached ({} held)", format_bytes(limit_), format_bytes(held_bytes_)));
  }
  // Room for this page's way back, so that give() cannot fail.
  auto& list = free_list(size);
  list.reserve(static_cast<std::size_t>(pages_) + 1);
  Page page{device_.create(size), size};
  held_bytes_ += size;
  ++pages_;
  ++creations_;
  return page;
}

void PagePool::give(Page page) noexcept { free_list(page.size).push_back(page.handle); }

void PagePool::release_last(Bytes size) noexcept {
  auto& list = free_list(size);
  device_.release(list.back(), size);
  list.pop_back();
  held_bytes_ -= size;
  --pages_;
  ++releases_;
}

Bytes PagePool::release_free() noexcept {
  const Bytes before = held_bytes_;
  for (const Bytes size : {sizes_.small, sizes_.large}) {
    while (!free_list(size).empty()) release_last(size);
  }
  return before - held_bytes_;
}

bool PagePool::release_some(Bytes size, Bytes bytes) noexcept {
  if (free_list(size).size() * size < bytes) return false;
  for (Bytes released = 0; released < bytes; released += size) release_last(size);
  return true;
}

void PagePool::shrink_to(Bytes held) noexcept {
  for (const Bytes size : {sizes_.large, sizes_.small}) {
    while (!free_list(size).empty() && held_bytes_ >= held + size) release_last(size);
  }
}

Bytes PagePool::free_bytes() const noexcept { return small_.size() * sizes_.small + large_.size() * sizes_.large; }

}  // namespace lowtide
