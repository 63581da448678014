// The allocator of one device: blocks in stream order, best fit, split and merged, cached in pages.
// A block freed on a stream may be handed out again on that stream at once, since work there is ordered; other streams
// see its memory only after events. One walk through an allocation: allocator/README.md.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "allocator/arena.h"
#include "allocator/device.h"
#include "allocator/stats.h"

namespace lowtide {

class AddressOwners;
class Heap;

struct AllocatorOptions {
  PageSizes page_sizes{};
  /// Blocks up to this size live in arenas of their own.
  Bytes small_limit = 1_MiB;
  /// Told of every address range, which then has `number` as its owner. Null: nobody asks.
  AddressOwners* owners = nullptr;
  std::uint16_t number = 0;
};

/// A live block.
struct BlockInfo {
  DeviceAddress address{};
  Bytes size = 0;       // what it occupies
  Bytes requested = 0;  // what was asked for
  StreamHandle stream{};
  OwnerId owner = kNoOwner;
};

/// One arena, for snapshots. Tiles are in address order and cover the mapped part of the arena only.
struct ArenaSnapshot {
  struct Tile {
    DeviceAddress address{};
    Bytes size = 0;
    Bytes requested = 0;
    TileKind kind = TileKind::Free;
    bool pending_free = false;  // freed, but a stream is not past it
    bool evicted = false;
  };
  DeviceAddress base{};
  StreamHandle stream{};
  OwnerId owner = kNoOwner;
  SizeClass size_class = SizeClass::Large;
  std::vector<Tile> tiles;
};

/// Safe from any thread. Its public face is wider than a dozen functions because it is the one door to a device's
/// memory for torch's bridge, the plug-in and pool/; the work is in Heap, PageSupply and RegionPages.
class CachingAllocator {
 public:
  explicit CachingAllocator(Device& device, AllocatorOptions options = {});
  ~CachingAllocator();
  CachingAllocator(const CachingAllocator&) = delete;
  CachingAllocator& operator=(const CachingAllocator&) = delete;

  Device& device() noexcept;

  /// At least `size` bytes, aligned to 512, for use on `stream` first; they belong to `owner` until freed.
  /// Size 0 gives address 0. May wait for the device where memory is short.
  /// Throws OutOfMemory (see its message for what was tried), DriverError.
  DeviceAddress allocate(Bytes size, StreamHandle stream, OwnerId owner = kNoOwner);

  /// Gives a block back; false if no live block starts at `address`. Address 0 is accepted. Never throws: where an
  /// event cannot be recorded the block is logged and leaked rather than handed out too early.
  bool free(DeviceAddress address) noexcept;

  /// `stream` uses the block too: after free() it is not handed out before `stream` is past its work so far.
  /// Ignored for the block's own stream and for addresses that are not ours. Returns whether the block is ours.
  bool record_stream(DeviceAddress address, StreamHandle stream);

  /// The live block that contains `address`.
  std::optional<BlockInfo> find(DeviceAddress address) const;
  /// Whether a live block starts at `address` and all of it is on the device.
  bool is_resident(DeviceAddress address) const;
  std::vector<BlockInfo> live_blocks(OwnerId owner) const;
  /// Address and size of every live block of `owner`, in order of address: what a walk of its arenas finds, cheaply.
  std::vector<std::pair<DeviceAddress, Bytes>> live_ranges(OwnerId owner) const;

  /// The block's memory may never leave the device, for `reason` ("shared with another process"): evicting its
  /// region is refused. Ends when the block is freed. Throws Misuse for addresses that are not ours or are evicted.
  void pin(DeviceAddress address, std::string reason);

  /// Gives unused pages to the driver, waiting for streams that still use them; returns their bytes.
  /// During a capture: releases only pages that need no wait.
  Bytes trim();

  /// Most bytes this allocator may hold, as a fraction of the device's memory. Pre: 0 <= fraction <= 1, else Misuse.
  void set_memory_fraction(double fraction);
  double memory_fraction() const;

  /// While at least one capture is under way nothing is unmapped and no event is queried or recorded here
  /// (in capture mode "global" those calls of any thread would break the capture).
  void begin_capture() noexcept;
  void end_capture() noexcept;
  bool capturing() const noexcept;

  /// `reclaim` is called, without any lock held, before an allocation fails; it returns whether it freed anything.
  void add_reclaimer(std::function<bool()> reclaim);

  AllocatorStats stats() const;
  void reset_peak_stats();
  void reset_accumulated_stats();
  std::vector<ArenaSnapshot> snapshot() const;

  /// Ends the arenas of `owner` that hold no block, as far as that needs no waiting: their pages go to the pool, their
  /// addresses back. Returns whether none is left.
  bool release_arenas(OwnerId owner) noexcept;

  /// Walks every structure and compares sums; throws std::logic_error naming what is broken.
  /// Checked builds call it after each public call.
  void check() const;

  /// For RegionPages and PageSupply.
  Heap& heap() noexcept { return *heap_; }

 private:
  std::unique_ptr<Heap> heap_;
};

}  // namespace lowtide
