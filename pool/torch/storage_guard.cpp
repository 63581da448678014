#include "pool/torch/storage_guard.h"

#include <utility>

namespace lowtide {
namespace {

// torch sets "raise on access" through a public method, but before some minor offered no way back: the flag is a private member.
// An explicit instantiation may name a private member, and its friend function carries the access out. This is the one place that
// depends on the member; `requires` below prefers torch's own method wherever a minor has it.
bool& raise_flag(c10::StorageImpl& storage) noexcept;

template <bool c10::StorageImpl::*Flag>
struct OpenFlag {
  friend bool& raise_flag(c10::StorageImpl& storage) noexcept { return storage.*Flag; }
};
template struct OpenFlag<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

template <typename Storage>
void clear_raise_flag(Storage& storage) noexcept {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); }) {
    storage.clear_data_ptr_access_error_msg_();
  } else {
    raise_flag(storage) = false;
    storage.get_extra_meta().custom_data_ptr_error_msg_.reset();
  }
}

// Puts back address, context and deleter; set_data_ptr_noswap also recomputes torch's cached "any check to make?".
void set_bytes(c10::StorageImpl& storage, void* bytes) noexcept {
  c10::DataPtr& held = storage._mutable_data_ptr_no_checks();
  const auto deleter = held.get_deleter();
  const auto device = held.device();
  void* const context = held.release_context();
  storage.set_data_ptr_noswap(c10::DataPtr(bytes, context, deleter, device));
}

}  // namespace

void* bytes_of(const c10::StorageImpl& storage) noexcept {
  return const_cast<c10::StorageImpl&>(storage)._mutable_data_ptr_no_checks().get();
}

Bytes size_of(const c10::StorageImpl& storage) noexcept {
  const c10::SymInt size = storage.sym_nbytes();
  return size.is_heap_allocated() ? 0 : static_cast<Bytes>(size.as_int_unchecked());
}

GuardedStorage::GuardedStorage(const StorageRef& storage, std::shared_ptr<const std::string> message)
    : storage_(storage),
      identity_(storage.get()),
      message_(std::move(message)),
      message_for_storage_(*message_),
      bytes_(bytes_of(*storage)),
      size_(size_of(*storage)),
      raised_before_(raise_flag(*storage)) {
  auto& meta = storage->get_extra_meta();  // allocates it, so that engage() does not
  if (raised_before_) message_before_ = meta.custom_data_ptr_error_msg_;
}

void GuardedStorage::engage() noexcept {
  const StorageRef storage = storage_.lock();
  if (!storage || engaged_) return;
  context_ = storage->_mutable_data_ptr_no_checks().get_context();
  set_bytes(*storage, nullptr);
  storage->set_nbytes(std::size_t{0});
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(message_for_storage_));
  engaged_ = true;
}

GuardedStorage::Outcome GuardedStorage::release() noexcept {
  if (!std::exchange(engaged_, false)) return Outcome::Restored;
  const StorageRef storage = storage_.lock();
  if (!storage) return Outcome::Dead;

  const c10::DataPtr& held = storage->_mutable_data_ptr_no_checks();
  const bool ours = held.get() == nullptr && held.get_context() == context_;
  const bool our_message = raise_flag(*storage) && storage->get_extra_meta().custom_data_ptr_error_msg_ == *message_;
  if (our_message) clear_raise_flag(*storage);
  if (!ours) {
    set_bytes(*storage, held.get());  // the same bytes; recomputes the cached check
    return Outcome::Changed;
  }
  set_bytes(*storage, bytes_);
  storage->set_nbytes(size_);
  if (our_message && raised_before_) storage->release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(message_before_));
  return Outcome::Restored;
}

}  // namespace lowtide
