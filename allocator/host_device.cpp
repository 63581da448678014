#include "allocator/host_device.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <exception>
#include <map>
#include <system_error>
#include <unordered_map>
#include <utility>
#include <vector>

#include "allocator/address_ranges.h"
#include "allocator/bytes_format.h"
#include "allocator/errors.h"
#include "allocator/fork_guard.h"
#include "allocator/host_pages.h"
#include "allocator/host_stream.h"
#include "allocator/log.h"
#include "allocator/mutex.h"

namespace lowtide {
namespace {

std::uintptr_t number(DeviceAddress address) { return static_cast<std::uintptr_t>(address); }
std::uintptr_t number(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }
std::uintptr_t number(StreamHandle stream) { return static_cast<std::uintptr_t>(stream); }
std::uintptr_t number(EventHandle event) { return static_cast<std::uintptr_t>(event); }
std::uint64_t number(PageHandle page) { return static_cast<std::uint64_t>(page); }

std::string error_text(int error) { return std::generic_category().message(error); }

std::string range_call(std::string_view name, std::uintptr_t address, Bytes size) {
  return fmt::format("{}({:#x}, {})", name, address, size);
}

/// Lock: everything guarded is guarded by mutex_, which is held neither while a task runs nor while this waits for
/// one. A stream's own lock is taken inside it.
class HostDevice final : public Device {
 public:
  explicit HostDevice(const HostDeviceOptions& options)
      : options_(options), pages_file_(fmt::format("lowtide-host-{}", options.index)) {
    streams_.emplace(0, std::make_unique<HostStream>(stream_name(0)));
  }
  ~HostDevice() override;

  int index() const noexcept override { return options_.index; }
  std::string_view kind() const noexcept override { return "host"; }
  std::string name() const override { return "host memory"; }
  Bytes granularity() const noexcept override { return options_.granularity; }
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

  void enqueue(StreamHandle stream, HostStream::Task task);

 private:
  struct Page {
    Bytes offset;
    Bytes size;
    std::uintptr_t mapped_at;  // 0: not mapped
  };
  /// What the last record() of an event waits for; null if it was never recorded.
  using Event = std::shared_ptr<Completion>;

  std::string stream_name(std::uintptr_t handle) const { return fmt::format("lt{}-stream{}", options_.index, handle); }
  void check_multiple(std::string_view call, Bytes size) const;
  void check_range(std::string_view call, DeviceAddress address, Bytes size) const;
  HostStream& stream_of(StreamHandle stream, std::string_view call) LOWTIDE_REQUIRES(mutex_);
  Event& event_of(EventHandle event, std::string_view call) LOWTIDE_REQUIRES(mutex_);
  void check_mapped(std::string_view call, DeviceAddress address, Bytes size) const LOWTIDE_REQUIRES(mutex_);
  void check_host(std::string_view call, const void* memory, Bytes size) const LOWTIDE_REQUIRES(mutex_);
  void reap() LOWTIDE_REQUIRES(mutex_);

  const HostDeviceOptions options_;
  const ForkGuard fork_;
  HostPages pages_file_;  // locks itself
  Mutex mutex_;
  Bytes used_ LOWTIDE_GUARDED_BY(mutex_) = 0;                  // sum of the sizes of pages_ and of pages being released
  std::uintptr_t last_handle_ LOWTIDE_GUARDED_BY(mutex_) = 0;  // never reused, so a stale handle is always noticed
  std::unordered_map<std::uint64_t, Page> pages_ LOWTIDE_GUARDED_BY(mutex_);
  AddressRanges reserved_ LOWTIDE_GUARDED_BY(mutex_);
  AddressRanges mapped_ LOWTIDE_GUARDED_BY(mutex_);                             // each inside one range of reserved_
  std::map<std::uintptr_t, std::uint64_t> page_at_ LOWTIDE_GUARDED_BY(mutex_);  // begin of a range of mapped_ -> page
  AddressRanges registered_ LOWTIDE_GUARDED_BY(mutex_);
  std::unordered_map<std::uintptr_t, std::unique_ptr<HostStream>> streams_ LOWTIDE_GUARDED_BY(mutex_);
  /// Destroyed by the caller, but perhaps with work left.
  std::vector<std::unique_ptr<HostStream>> closed_ LOWTIDE_GUARDED_BY(mutex_);
  std::unordered_map<std::uintptr_t, Event> events_ LOWTIDE_GUARDED_BY(mutex_);
};

HostDevice::~HostDevice() {
  if (fork_.in_child()) {
    // The threads stayed with the parent: joining them would hang, so their objects are left alone.
    for (auto& [handle, stream] : streams_) static_cast<void>(stream.release());
    for (auto& stream : closed_) static_cast<void>(stream.release());
  } else {
    // All are closed before the first is joined: one may wait for an event on another.
    for (auto& [handle, stream] : streams_) stream->close();
    streams_.clear();
    closed_.clear();
  }
  for (const auto& [address, size] : reserved_) munmap(reinterpret_cast<void*>(address), size);
}

void HostDevice::check_multiple(std::string_view call, Bytes size) const {
  if (size != 0 && size % options_.granularity == 0) return;
  throw DriverError(fmt::format("{}({})", call, size),
                    fmt::format("the size is no multiple of {}", options_.granularity));
}

void HostDevice::check_range(std::string_view call, DeviceAddress address, Bytes size) const {
  if (size != 0 && size % options_.granularity == 0 && number(address) % options_.granularity == 0) return;
  throw DriverError(range_call(call, number(address), size),
                    fmt::format("address or size is no multiple of {}", options_.granularity));
}

HostStream& HostDevice::stream_of(StreamHandle stream, std::string_view call) {
  const auto found = streams_.find(number(stream));
  if (found == streams_.end()) {
    throw DriverError(fmt::format("{}(stream {})", call, number(stream)), "there is no such stream");
  }
  return *found->second;
}

HostDevice::Event& HostDevice::event_of(EventHandle event, std::string_view call) {
  const auto found = events_.find(number(event));
  if (found == events_.end()) {
    throw DriverError(fmt::format("{}(event {})", call, number(event)), "there is no such event");
  }
  return found->second;
}

void HostDevice::check_mapped(std::string_view call, DeviceAddress address, Bytes size) const {
  if (mapped_.covers(number(address), size)) return;
  throw DriverError(range_call(call, number(address), size), "the device range is not mapped throughout");
}

void HostDevice::check_host(std::string_view call, const void* memory, Bytes size) const {
  // As CUDA has it: host memory of one copy is inside one registration, or not registered at all.
  const auto begin = number(memory);
  if (!registered_.overlaps(begin, size) || registered_.inside_one(begin, size)) return;
  throw DriverError(range_call(call, begin, size), "the host range crosses the end of a registered range");
}

void HostDevice::reap() {
  std::erase_if(closed_, [](const auto& stream) { return stream->ended(); });
}

DeviceMemory HostDevice::memory() {
  fork_.check();
  MutexLock lock(mutex_);
  return {.free = options_.memory - used_, .total = options_.memory};
}

DeviceAddress HostDevice::reserve(Bytes size) {
  fork_.check();
  check_multiple("reserve", size);
  MutexLock lock(mutex_);
  const auto refuse = [&](int error) {
    throw OutOfMemory(options_.index, size,
                      fmt::format("mmap of {} of address space failed: {}", format_bytes(size), error_text(error)));
  };
  // mmap aligns to the system's page only: take more, and cut off what is too much on both sides.
  const Bytes unit = options_.granularity;
  if (size + unit < size) refuse(ENOMEM);
  void* const memory = mmap(nullptr, size + unit, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) refuse(errno);
  const auto begin = round_up(number(memory), unit);
  const Bytes before = begin - number(memory);
  if (before != 0) munmap(memory, before);
  munmap(reinterpret_cast<void*>(begin + size), unit - before);
  try {
    reserved_.insert(begin, size);
  } catch (...) {
    munmap(reinterpret_cast<void*>(begin), size);
    throw;
  }
  return DeviceAddress{begin};
}

void HostDevice::release_address(DeviceAddress address, Bytes size) noexcept {
  if (fork_.in_child()) return;
  MutexLock lock(mutex_);
  if (!reserved_.has(number(address), size) || mapped_.overlaps(number(address), size)) {
    log(LogLevel::Error, "release_address({:#x}, {}): never reserved as such, or still mapped; leaked", number(address),
        size);
    return;
  }
  reserved_.erase(number(address), size);
  munmap(to_pointer(address), size);
}

PageHandle HostDevice::create(Bytes size) {
  fork_.check();
  check_multiple("create", size);
  MutexLock lock(mutex_);
  const Bytes left = options_.memory - used_;
  if (size > left) {
    throw OutOfMemory(options_.index, size,
                      fmt::format("host device {} cannot supply {}: {} of {} are free", options_.index,
                                  format_bytes(size), format_bytes(left), format_bytes(options_.memory)));
  }
  const Bytes offset = pages_file_.allocate(size);
  try {
    pages_.emplace(last_handle_ + 1, Page{.offset = offset, .size = size, .mapped_at = 0});
  } catch (...) {
    pages_file_.free(offset, size);
    throw;
  }
  used_ += size;
  return PageHandle{++last_handle_};
}

void HostDevice::release(PageHandle page, Bytes size) noexcept {
  if (fork_.in_child()) return;
  Bytes offset = 0;
  {
    MutexLock lock(mutex_);
    const auto found = pages_.find(number(page));
    if (found == pages_.end() || found->second.size != size || found->second.mapped_at != 0) {
      log(LogLevel::Error, "release(page {}, {}): no such page of that size, or still mapped; leaked", number(page),
          size);
      return;
    }
    offset = found->second.offset;
    pages_.erase(found);
  }
  pages_file_.free(offset, size);
  MutexLock lock(mutex_);
  used_ -= size;
}

void HostDevice::map(DeviceAddress address, Bytes size, PageHandle page) {
  fork_.check();
  check_range("map", address, size);
  const auto begin = number(address);
  const auto call = [&] { return fmt::format("map({:#x}, {}, page {})", begin, size, number(page)); };
  MutexLock lock(mutex_);
  const auto found = pages_.find(number(page));
  if (found == pages_.end()) throw DriverError(call(), "there is no such page");
  if (found->second.size != size) throw DriverError(call(), "a page is mapped whole");
  if (found->second.mapped_at != 0) throw DriverError(call(), "the page is mapped already");
  if (!reserved_.inside_one(begin, size)) throw DriverError(call(), "the range is not inside one reservation");
  if (mapped_.overlaps(begin, size)) throw DriverError(call(), "something is mapped there");

  mapped_.insert(begin, size);
  try {
    page_at_.emplace(begin, number(page));
    if (mmap(to_pointer(address), size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, pages_file_.descriptor(),
             static_cast<off_t>(found->second.offset)) == MAP_FAILED) {
      throw DriverError(call(), error_text(errno));
    }
  } catch (...) {
    page_at_.erase(begin);
    mapped_.erase(begin, size);
    throw;
  }
  found->second.mapped_at = begin;
}

void HostDevice::unmap(DeviceAddress address, Bytes size) {
  fork_.check();
  check_range("unmap", address, size);
  const auto begin = number(address);
  MutexLock lock(mutex_);
  if (!mapped_.has(begin, size)) throw DriverError(range_call("unmap", begin, size), "no map() made this range");
  // Over the page rather than munmap: the addresses must stay reserved.
  if (mmap(to_pointer(address), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) ==
      MAP_FAILED) {
    throw DriverError(range_call("unmap", begin, size), error_text(errno));
  }
  const auto page = page_at_.find(begin);
  pages_.at(page->second).mapped_at = 0;
  page_at_.erase(page);
  mapped_.erase(begin, size);
}

StreamHandle HostDevice::create_stream() {
  fork_.check();
  MutexLock lock(mutex_);
  reap();
  const auto handle = last_handle_ + 1;
  streams_.emplace(handle, std::make_unique<HostStream>(stream_name(handle)));
  last_handle_ = handle;
  return StreamHandle{handle};
}

void HostDevice::destroy_stream(StreamHandle stream) noexcept {
  if (fork_.in_child()) return;
  MutexLock lock(mutex_);
  const auto found = streams_.find(number(stream));
  if (found == streams_.end() || number(stream) == 0) {
    log(LogLevel::Error, "destroy_stream({}): no create_stream() made it", number(stream));
    return;
  }
  try {
    // Its queued work still runs, and this call does not wait for it, as on CUDA.
    closed_.reserve(closed_.size() + 1);
  } catch (const std::exception& error) {
    log(LogLevel::Error, "destroy_stream({}): {}; leaked", number(stream), error.what());
    return;
  }
  found->second->close();
  closed_.push_back(std::move(found->second));
  streams_.erase(found);
  reap();
}

EventHandle HostDevice::create_event() {
  fork_.check();
  MutexLock lock(mutex_);
  events_.emplace(last_handle_ + 1, nullptr);
  return EventHandle{++last_handle_};
}

void HostDevice::destroy_event(EventHandle event) noexcept {
  if (fork_.in_child()) return;
  MutexLock lock(mutex_);
  if (events_.erase(number(event)) == 0) log(LogLevel::Error, "destroy_event({}): no such event", number(event));
}

void HostDevice::record(EventHandle event, StreamHandle stream) {
  fork_.check();
  MutexLock lock(mutex_);
  Event& target = event_of(event, "record");
  HostStream& queue = stream_of(stream, "record");
  // A new completion each time: whoever waits for an earlier record() goes on waiting for that one.
  auto completion = std::make_shared<Completion>();
  queue.enqueue([completion] { completion->pass(); });
  target = std::move(completion);
}

bool HostDevice::query(EventHandle event) {
  fork_.check();
  MutexLock lock(mutex_);
  const Event& completion = event_of(event, "query");
  return completion == nullptr || completion->passed();
}

void HostDevice::synchronize(EventHandle event) {
  fork_.check();
  Event completion;
  {
    MutexLock lock(mutex_);
    completion = event_of(event, "synchronize");
  }
  if (completion != nullptr) completion->wait();
}

void HostDevice::synchronize(StreamHandle stream) {
  fork_.check();
  auto completion = std::make_shared<Completion>();
  {
    MutexLock lock(mutex_);
    stream_of(stream, "synchronize").enqueue([completion] { completion->pass(); });
  }
  completion->wait();
}

void HostDevice::wait(StreamHandle stream, EventHandle event) {
  fork_.check();
  MutexLock lock(mutex_);
  HostStream& queue = stream_of(stream, "wait");
  const Event completion = event_of(event, "wait");
  if (completion != nullptr) queue.enqueue([completion] { completion->wait(); });
}

bool HostDevice::is_capturing(StreamHandle stream) {
  fork_.check();
  MutexLock lock(mutex_);
  stream_of(stream, "is_capturing");
  return false;
}

void HostDevice::copy_to_host(void* target, DeviceAddress source, Bytes size, StreamHandle stream) {
  fork_.check();
  MutexLock lock(mutex_);
  HostStream& queue = stream_of(stream, "copy_to_host");
  if (size == 0) return;
  check_mapped("copy_to_host", source, size);
  check_host("copy_to_host", target, size);
  queue.enqueue([=] { std::memcpy(target, to_pointer(source), size); });
}

void HostDevice::copy_to_device(DeviceAddress target, const void* source, Bytes size, StreamHandle stream) {
  fork_.check();
  MutexLock lock(mutex_);
  HostStream& queue = stream_of(stream, "copy_to_device");
  if (size == 0) return;
  check_mapped("copy_to_device", target, size);
  check_host("copy_to_device", source, size);
  queue.enqueue([=] { std::memcpy(to_pointer(target), source, size); });
}

void HostDevice::copy_on_device(DeviceAddress target, DeviceAddress source, Bytes size, StreamHandle stream) {
  fork_.check();
  MutexLock lock(mutex_);
  HostStream& queue = stream_of(stream, "copy_on_device");
  if (size == 0) return;
  check_mapped("copy_on_device", target, size);
  check_mapped("copy_on_device", source, size);
  queue.enqueue([=] { std::memmove(to_pointer(target), to_pointer(source), size); });
}

void HostDevice::register_host(void* memory, Bytes size) {
  fork_.check();
  const auto unit = static_cast<Bytes>(sysconf(_SC_PAGESIZE));
  if (size == 0 || number(memory) == 0 || number(memory) % unit != 0 || size % unit != 0) {
    throw DriverError(range_call("register_host", number(memory), size),
                      fmt::format("address or size is no multiple of the system's page of {} bytes", unit));
  }
  MutexLock lock(mutex_);
  if (registered_.overlaps(number(memory), size)) {
    throw DriverError(range_call("register_host", number(memory), size), "part of it is registered already");
  }
  registered_.insert(number(memory), size);
}

void HostDevice::unregister_host(void* memory, Bytes size) noexcept {
  if (fork_.in_child()) return;
  MutexLock lock(mutex_);
  if (!registered_.erase(number(memory), size)) {
    log(LogLevel::Error, "unregister_host({:#x}, {}): never registered as such", number(memory), size);
  }
}

void HostDevice::enqueue(StreamHandle stream, HostStream::Task task) {
  fork_.check();
  MutexLock lock(mutex_);
  stream_of(stream, "enqueue_host_function").enqueue(std::move(task));
}

}  // namespace

std::unique_ptr<Device> make_host_device(const HostDeviceOptions& options) {
  const auto system_page = static_cast<Bytes>(sysconf(_SC_PAGESIZE));
  if (!std::has_single_bit(options.granularity) || options.granularity < system_page) {
    throw Misuse(fmt::format("a host device's granularity is a power of two and at least {}, not {}", system_page,
                             options.granularity));
  }
  return std::make_unique<HostDevice>(options);
}

void enqueue_host_function(Device& device, StreamHandle stream, std::function<void()> function) {
  auto* host = dynamic_cast<HostDevice*>(&device);
  if (host == nullptr) throw Misuse("enqueue_host_function() needs a device of make_host_device()");
  host->enqueue(stream, std::move(function));
}

}  // namespace lowtide
