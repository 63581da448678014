#include "allocator/torch/trace_history.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <string_view>
#include <utility>

namespace lowtide {
namespace {

thread_local std::vector<std::string> compile_contexts;

}  // namespace

void TraceHistory::configure(Settings settings, bool clear) {
  settings.max_entries = std::max<std::size_t>(settings.max_entries, 1);
  const bool enabled = settings.enabled;
  // What is dropped is destroyed after the lock: contexts are torch's objects.
  std::map<int, std::deque<Entry>> dropped;
  std::unordered_map<const void*, Context> forgotten;
  const MutexLock lock(mutex_);
  settings_ = std::make_shared<const Settings>(std::move(settings));
  if (clear) dropped.swap(entries_);
  if (!enabled) forgotten.swap(contexts_);
  listening_.store(enabled || !trackers_->empty(), std::memory_order_relaxed);
}

void TraceHistory::add_tracker(Tracker tracker) {
  const MutexLock lock(mutex_);
  auto trackers = std::make_shared<std::vector<Tracker>>(*trackers_);
  trackers->push_back(std::move(tracker));
  trackers_ = std::move(trackers);
  listening_.store(true, std::memory_order_relaxed);
}

void TraceHistory::allocated(Event event) {
  Context context = gather(Level::STATE);
  if (context) {
    const MutexLock lock(mutex_);
    contexts_.insert_or_assign(event.address, context);
  }
  record(make_entry(Entry::ALLOC, event, std::move(context)));
}

void TraceHistory::freed(Event event) {
  Context allocated_at;  // destroyed without the lock
  {
    const MutexLock lock(mutex_);
    if (const auto found = contexts_.find(event.address); found != contexts_.end()) {
      allocated_at = std::move(found->second);
      contexts_.erase(found);
    }
  }
  const Context context = gather(Level::ALL);
  record(make_entry(Entry::FREE_REQUESTED, event, context));
  record(make_entry(Entry::FREE_COMPLETED, event, context));
}

void TraceHistory::out_of_memory(Event event) { record(make_entry(Entry::OOM, event, gather(Level::STATE))); }

#if LOWTIDE_TORCH_2_14
void TraceHistory::annotated(Event event) { record(make_entry(Entry::ANNOTATE, event, nullptr)); }
#endif

TraceHistory::Context TraceHistory::context_of(const void* address) const {
  if (!listening()) return nullptr;
  const MutexLock lock(mutex_);
  const auto found = contexts_.find(address);
  return found == contexts_.end() ? nullptr : found->second;
}

void TraceHistory::merge_into(std::vector<std::vector<Entry>>& traces) const {
  std::map<int, std::deque<Entry>> entries;
  std::function<c10::time_t(c10::approx_time_t)> to_wall_time;
  {
    const MutexLock lock(mutex_);
    if (entries_.empty()) return;
    entries = entries_;
    to_wall_time = clock_.makeConverter();
  }
  for (auto& [device, ours] : entries) {
    if (traces.size() <= static_cast<std::size_t>(device)) traces.resize(static_cast<std::size_t>(device) + 1);
    for (Entry& entry : ours) entry.time_.t_ = to_wall_time(entry.time_.approx_t_) / 1000;
    std::vector<Entry>& native = traces[static_cast<std::size_t>(device)];
    std::vector<Entry> merged;
    merged.reserve(native.size() + ours.size());
    std::merge(std::make_move_iterator(native.begin()), std::make_move_iterator(native.end()),
               std::make_move_iterator(ours.begin()), std::make_move_iterator(ours.end()), std::back_inserter(merged),
               [](const Entry& a, const Entry& b) { return a.time_.t_ < b.time_.t_; });
    native = std::move(merged);
  }
}

void TraceHistory::push_compile_context(std::string name) { compile_contexts.push_back(std::move(name)); }

void TraceHistory::pop_compile_context() {
  if (!compile_contexts.empty()) compile_contexts.pop_back();
}

TraceHistory::Context TraceHistory::gather(Level level) const {
  std::shared_ptr<const Settings> settings;
  {
    const MutexLock lock(mutex_);
    settings = settings_;
  }
  if (!settings->enabled || settings->recorder == nullptr || settings->level < level) return nullptr;
  return settings->recorder();
}

TraceHistory::Entry TraceHistory::make_entry(Entry::Action action, const Event& event, Context context) const {
  return Entry(action, static_cast<c10::DeviceIndex>(event.device), reinterpret_cast<std::size_t>(event.address),
               event.size, reinterpret_cast<void*>(event.stream), c10::MempoolId_t{0, 0}, c10::getApproximateTime(),
               std::move(context), compile_contexts.empty() ? std::string() : compile_contexts.back(), event.metadata);
}

void TraceHistory::record(Entry entry) {
  static const auto name_of = [](Entry::Action action) -> std::string_view {
    switch (action) {
      case Entry::ALLOC:
        return "alloc";
      case Entry::FREE_REQUESTED:
        return "free_requested";
      case Entry::FREE_COMPLETED:
        return "free_completed";
      case Entry::OOM:
        return "oom";
      default:
        return {};
    }
  };
  std::shared_ptr<const std::vector<Tracker>> trackers;
  std::deque<Entry> dropped;
  {
    const MutexLock lock(mutex_);
    trackers = trackers_;
    const auto& skipped = settings_->skipped;
    if (settings_->enabled && std::find(skipped.begin(), skipped.end(), name_of(entry.action_)) == skipped.end()) {
      std::deque<Entry>& of_device = entries_[entry.device_];
      of_device.push_back(entry);
      if (settings_->level < Level::ALLOC) of_device.back().context_ = nullptr;
      while (of_device.size() > settings_->max_entries) {
        dropped.push_back(std::move(of_device.front()));
        of_device.pop_front();
      }
    }
  }
  for (const Tracker& tracker : *trackers) tracker(entry);
}

}  // namespace lowtide
