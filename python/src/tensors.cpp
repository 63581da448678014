// Tensors of Python and their storages.
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <string>

#include "allocator/errors.h"
#include "bindings.h"
#include "pool/torch/adopt.h"
#include "pool/torch/region_tensors.h"

namespace lowtide {
namespace {

// The tensor's own storage; a wrapper subclass has one without memory, its inner tensors are found in Python.
c10::Storage storage_of(const py::handle& object) {
  if (!THPVariable_Check(object.ptr())) throw py::type_error("expected a torch.Tensor");
  const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
  return tensor.defined() && tensor.has_storage() ? tensor.unsafeGetTensorImpl()->unsafe_storage() : c10::Storage();
}

// A storage that the holder does not keep alive. Once it is gone every question has an empty answer: it may go at any
// moment, by a garbage collection in the middle of a loop over handles.
class StorageHandle {
 public:
  explicit StorageHandle(const c10::Storage& storage)
      : weak_(storage.getWeakStorageImpl()), key_(reinterpret_cast<std::uintptr_t>(storage.unsafeGetStorageImpl())) {}

  /// Identity of the storage; no other storage has it while this handle lives.
  std::uintptr_t key() const noexcept { return key_; }
  bool alive() const noexcept { return !weak_.expired(); }
  /// An empty Storage once it is gone.
  c10::Storage lock() const { return c10::Storage(weak_.lock()); }

 private:
  WeakStorageRef weak_;
  std::uintptr_t key_;
};

std::optional<std::uint32_t> region_id(const StorageHandle& handle) {
  const c10::Storage storage = handle.lock();
  if (!storage) return std::nullopt;
  const OwnerId owner = without_gil([&] { return region_of(*storage.unsafeGetStorageImpl()); });
  return owner == kNoOwner ? std::nullopt : std::optional(static_cast<std::uint32_t>(owner));
}

}  // namespace

void bind_tensors(py::module_& module) {
  py::class_<StorageHandle>(module, "StorageHandle")
      .def_property_readonly("key", &StorageHandle::key)
      .def_property_readonly("alive", &StorageHandle::alive)
      .def_property_readonly("region_id", &region_id)
      .def_property_readonly("nbytes",
                             [](const StorageHandle& handle) -> Bytes {
                               const c10::Storage storage = handle.lock();
                               return storage ? full_size_of(*storage.unsafeGetStorageImpl()) : 0;
                             })
      .def_property_readonly("device",
                             [](const StorageHandle& handle) {
                               const c10::Storage storage = handle.lock();
                               return storage ? storage.device().str() : std::string();
                             })
      .def("adoption_obstacle",
           [](const StorageHandle& handle) {
             const c10::Storage storage = handle.lock();
             return storage ? adoption_obstacle(storage) : std::string();
           })
      // With the GIL: the old memory may have a deleter that is Python's. The copy itself is asynchronous on CUDA.
      .def("adopt_into", [](const StorageHandle& handle, const Region& region) {
        if (const c10::Storage storage = handle.lock()) adopt(region, storage);
      });

  module.def(
      "storage_handle",
      [](const py::handle& tensor) -> std::optional<StorageHandle> {
        const c10::Storage storage = storage_of(tensor);
        return storage ? std::optional<StorageHandle>(storage) : std::nullopt;
      },
      py::arg("tensor"));
  module.def("track", [](const Region& region, const py::handle& tensor) {
    if (const c10::Storage storage = storage_of(tensor)) track(region, storage);
  });
  module.def("track_where_it_is", [](const py::handle& tensor) {
    if (const c10::Storage storage = storage_of(tensor)) track_where_it_is(storage);
  });
}

}  // namespace lowtide
