// Figures, and host memory.
#include "allocator/stats.h"

#include "allocator/device_registry.h"
#include "bindings.h"
#include "pool/pool_stats.h"

namespace lowtide {
namespace {

void put(py::dict& target, const char* name, const Stat& stat) {
  const std::string key(name);
  target[py::str(key)] = stat.current;
  target[py::str(key + "_peak")] = stat.peak;
}

py::dict allocator_stats(int device) {
  const AllocatorStats stats = without_gil([&] { return allocator_of(device).stats(); });
  py::dict result;
  put(result, "allocations", stats.allocations[0]);
  put(result, "allocated_bytes", stats.allocated_bytes[0]);
  put(result, "requested_bytes", stats.requested_bytes[0]);
  put(result, "active_bytes", stats.active_bytes[0]);
  put(result, "reserved_bytes", stats.reserved_bytes[0]);
  put(result, "evicted_bytes", stats.evicted_bytes);
  result["free_page_bytes"] = stats.free_page_bytes;
  result["pages"] = stats.pages;
  result["page_creations"] = stats.num_page_creations;
  result["page_releases"] = stats.num_page_releases;
  result["metadata_bytes"] = stats.metadata_bytes;
  result["alloc_retries"] = stats.num_alloc_retries;
  result["ooms"] = stats.num_ooms;
  return result;
}

py::dict pool_stats_of(int device) {
  const PoolStats stats = without_gil([&] { return pool_stats(device); });
  py::dict result;
  result["pinned_bytes"] = stats.pinned_bytes;
  result["pinned_leased_bytes"] = stats.pinned_leased_bytes;
  result["evictions"] = stats.evictions;
  result["restores"] = stats.restores;
  result["copies"] = stats.copies;
  result["evicted_bytes_total"] = stats.evicted_bytes_total;
  result["restored_bytes_total"] = stats.restored_bytes_total;
  result["evict_seconds"] = stats.evict_seconds;
  result["restore_seconds"] = stats.restore_seconds;
  result["host_allocations"] = stats.host_allocations;
  return result;
}

}  // namespace

void bind_stats(py::module_& module) {
  module.def("allocator_stats", &allocator_stats, py::arg("device"));
  module.def("pool_stats", &pool_stats_of, py::arg("device"));
  module.def(
      "check", [](int device) { without_gil([&] { allocator_of(device).check(); }); }, py::arg("device"));
  module.def(
      "trim", [](int device) { return without_gil([&] { return allocator_of(device).trim(); }); }, py::arg("device"));
  module.def("trim_host", [] { return without_gil([] { return trim_host(); }); });
  module.def(
      "set_host_budget", [](Bytes budget) { set_host_budget(budget); }, py::arg("budget"));
  module.def("host_budget", &host_budget);
}

}  // namespace lowtide
