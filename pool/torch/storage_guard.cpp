#include "pool/torch/storage_guard.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/COW.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>
#include <utility>

namespace lowtide {
namespace {

// Members of StorageImpl that torch keeps private. An explicit instantiation may name a private member, and its friend
// function carries the access out. The only place that depends on them; a minor that renames one does not compile.
//
// raise_flag: torch sets "raise on access" through a public method, but some minors offer no way back. size_flag: "the
// size is not a plain number", which set_nbytes(SymInt) leaves as it was.
bool& raise_flag(c10::StorageImpl& storage) noexcept;
bool& size_flag(c10::StorageImpl& storage) noexcept;

template <bool c10::StorageImpl::*RaiseFlag, bool c10::StorageImpl::*SizeFlag>
struct OpenFlags {
  friend bool& raise_flag(c10::StorageImpl& storage) noexcept { return storage.*RaiseFlag; }
  friend bool& size_flag(c10::StorageImpl& storage) noexcept { return storage.*SizeFlag; }
};
template struct OpenFlags<&c10::StorageImpl::throw_on_immutable_data_ptr_,
                          &c10::StorageImpl::size_bytes_is_heap_allocated_>;

template <typename Storage>
void clear_raise_flag(Storage& storage) noexcept {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); }) {
    storage.clear_data_ptr_access_error_msg_();
  } else {
    // The text may stay: without the flag nobody reads it, and the next guard need not copy it again.
    raise_flag(storage) = false;
  }
}

// The size of a storage whose bytes are away: 0 for whoever asks, an error for an operator.
//
// A plain 0 is not enough: as_strided, and so every slice, transpose, index and linear layer, compares its strides with
// the storage's size before anything looks at the data, and would raise "out of bounds for storage of size 0", which
// tells nobody what happened. torch allows a size to be an object instead of a number, and asks it; so this object can
// raise the text that helps.
//
// Operators are told apart by what dispatch leaves in thread-local state: below autograd's kernels ADInplaceOrView is
// excluded. Inference mode excludes it everywhere; there the answer is 0, and torch's own words come first.
class AbsentSize final : public c10::SymNodeImpl {
 public:
  explicit AbsentSize(std::string text) : text_(std::move(text)) {}

  bool is_int() override { return true; }
  bool is_bool() override { return false; }
  bool is_float() override { return false; }
  bool has_hint() override { return true; }
  bool is_constant() override { return true; }
  bool is_symbolic() override { return false; }
  std::optional<int64_t> constant_int() override { return size(); }
  std::optional<int64_t> maybe_as_int() override { return size(); }
  int64_t guard_int(const char*, int64_t) override { return size(); }
  int64_t int_() override { return size(); }
  std::string str() override { return "0"; }

 private:
  int64_t size() const {
    const auto& dispatch = c10::impl::tls_local_dispatch_key_set();
    const bool in_operator =
        dispatch.excluded_.has(c10::DispatchKey::ADInplaceOrView) && !c10::InferenceMode::is_enabled();
    TORCH_CHECK(!in_operator, text_);
    return 0;
  }

  std::string text_;
};

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

bool is_lazy_copy(const c10::StorageImpl& storage) noexcept {
  return c10::impl::cow::is_cow_data_ptr(const_cast<c10::StorageImpl&>(storage)._mutable_data_ptr_no_checks());
}

GuardMessage::GuardMessage(std::string text, std::size_t storages) : text_(std::move(text)) {
  const std::size_t sizes = (storages + kStoragesPerSize - 1) / kStoragesPerSize;
  absent_sizes_.reserve(sizes);
  while (absent_sizes_.size() < sizes) absent_sizes_.emplace_back(c10::make_intrusive<AbsentSize>(text_));
}

void GuardedStorage::engage(const StorageRef& storage, const GuardMessage& message, std::size_t index) {
  // First all that may fail.
  auto& meta = storage->get_extra_meta();
  raised_before_ = raise_flag(*storage);
  const auto& text_before = meta.custom_data_ptr_error_msg_;
  if (raised_before_ && text_before) message_before_ = std::make_unique<std::string>(*text_before);
  const bool has_text = text_before == message.text();  // from the last time
  std::optional<std::string> text;
  if (!has_text) text = message.text();

  storage_ = WeakStorageRef(storage);
  message_ = &message;
  bytes_ = bytes_of(*storage);
  size_ = size_of(*storage);
  context_ = storage->_mutable_data_ptr_no_checks().get_context();
  if (has_text) text = std::move(meta.custom_data_ptr_error_msg_);
  set_bytes(*storage, nullptr);
  storage->set_nbytes(c10::SymInt(message.absent_size(index)));
  size_flag(*storage) = true;
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(text));
  engaged_ = true;
}

void GuardedStorage::prepare_release() noexcept {
  held_ = storage_.lock();
  if (!held_) return;
  const c10::DataPtr& held = held_->_mutable_data_ptr_no_checks();
  own_memory_ = held.get() == nullptr && held.get_context() == context_;
  own_message_ = raise_flag(*held_) && held_->get_extra_meta().custom_data_ptr_error_msg_ == message_->text();
}

GuardedStorage::Outcome GuardedStorage::release() noexcept {
  if (!std::exchange(engaged_, false)) return Outcome::Restored;
  if (!held_) prepare_release();
  if (!held_) return Outcome::Dead;
  c10::StorageImpl& storage = *held_;
  if (own_message_) clear_raise_flag(storage);
  if (!own_memory_) {
    set_bytes(storage, storage._mutable_data_ptr_no_checks().get());  // the same bytes; recomputes the cached check
    return Outcome::Changed;
  }
  set_bytes(storage, bytes_);
  storage.set_nbytes(size_);
  if (own_message_ && raised_before_) {
    std::optional<std::string> text_before;
    if (message_before_) text_before = std::move(*message_before_);
    storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(text_before));
  }
  return Outcome::Restored;
}

}  // namespace lowtide
