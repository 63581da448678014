// Regions and their scopes.
#include "pool/offload_region.h"

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "allocator/allocation_scope.h"
#include "allocator/errors.h"
#include "bindings.h"
#include "pool/torch/region_tensors.h"

namespace lowtide {
namespace {

// Python opens and closes scopes by two calls, so the guards of a thread are kept here in between.
struct OpenScope {
  std::unique_ptr<OffloadRegion> region;  // null: the scope of no region
  std::unique_ptr<NoRegion> none;
};

struct OpenScopes {
  std::vector<OpenScope> stack;

  // A thread that ends inside a `with` block (a daemon thread at exit) leaves its guards open: closing them now would
  // call into thread-local state of torch that is gone.
  ~OpenScopes() {
    for (OpenScope& scope : stack) {
      (void)scope.region.release();
      (void)scope.none.release();
    }
  }
};

std::vector<OpenScope>& open_scopes() {
  static thread_local OpenScopes scopes;
  return scopes.stack;
}

void leave(const Region* region) {
  auto& scopes = open_scopes();
  const bool innermost = !scopes.empty() && (region != nullptr ? scopes.back().region &&
                                                                     scopes.back().region->region().id() == region->id()
                                                               : scopes.back().none != nullptr);
  if (!innermost) {
    throw Misuse(
        "`with` blocks of regions must be left on the thread that entered them, the innermost first; a generator or "
        "coroutine "
        "that is suspended inside one breaks that");
  }
  if (current_owner() != (region != nullptr ? region->id() : kNoOwner)) {
    throw Misuse(
        "a scope that was entered inside this one, from C or C++, is still open: leave it first "
        "(lowtide_region_leave())");
  }
  scopes.pop_back();
}

py::list sizes_of(const std::vector<BlockInfo>& blocks) {
  py::list result;
  for (const BlockInfo& block : blocks) {
    result.append(py::make_tuple(static_cast<std::uintptr_t>(block.address), block.requested));
  }
  return result;
}

template <typename Result>
auto getter(Result (Region::*method)() const) {
  return [method](const Region& region) { return without_gil([&] { return (region.*method)(); }); };
}

}  // namespace

void bind_regions(py::module_& module) {
  py::class_<Region>(module, "Region")
      .def(py::init([](const std::string& name) { return without_gil([&] { return Region(name); }); }), py::arg("name"))
      .def_static("find", [](const std::string& name) { return without_gil([&] { return Region::find(name); }); })
      .def_static("all", [] { return without_gil([] { return Region::all(); }); })
      .def_property_readonly("name", [](const Region& region) { return region.name(); })
      .def_property_readonly("id", [](const Region& region) { return static_cast<std::uint32_t>(region.id()); })
      .def("enter",
           [](const Region& region) {
             open_scopes().push_back({std::make_unique<OffloadRegion>(region), nullptr});
           })
      .def("leave", [](const Region& region) { leave(&region); })
      .def(
          "evict",
          [](Region& region, bool unmap_untracked) {
            EvictOptions options;
            options.untracked = unmap_untracked ? Untracked::Unmap : Untracked::Refuse;
            without_gil([&] { region.evict(options); });
          },
          py::arg("unmap_untracked"))
      .def("restore", [](Region& region) { without_gil([&] { region.restore(); }); })
      .def_property_readonly(
          "state",
          [](const Region& region) { return std::string(to_string(without_gil([&] { return region.state(); }))); })
      .def_property_readonly("allocated_bytes", getter(&Region::allocated_bytes))
      .def_property_readonly("resident_bytes", getter(&Region::resident_bytes))
      .def_property_readonly("evicted_bytes", getter(&Region::evicted_bytes))
      .def_property_readonly("pinned_bytes", getter(&Region::pinned_bytes))
      .def("live_blocks",
           [](const Region& region) { return sizes_of(without_gil([&] { return region.live_blocks(); })); })
      .def("untracked_blocks",
           [](const Region& region) { return sizes_of(without_gil([&] { return untracked_blocks(region); })); })
      .def("table_entries", [](const Region& region) { return table_entries(region); })
      .def("tracked_storages", [](const Region& region) { return tracked_storages(region); })
      .def("take_changed_storages", [](const Region& region) { return take_changed_storages(region); })
      .def("set_remedy", [](const Region& region, std::string remedy) { set_remedy(region, std::move(remedy)); });

  module.def("enter_no_region", [] { open_scopes().push_back({nullptr, std::make_unique<NoRegion>()}); });
  module.def("leave_no_region", [] { leave(nullptr); });
}

}  // namespace lowtide
