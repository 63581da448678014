// Takes the bytes away from one torch storage and gives them back. In between the storage says that it has 0 bytes, and
// every access to its data raises with a text of ours, instead of reading an address behind which nothing is mapped.
// Knows nothing of regions; region_tensors.h decides which storages are guarded, and when.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/core/SymNodeImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <string>
#include <vector>

#include "allocator/types.h"

namespace lowtide {

using StorageRef = c10::intrusive_ptr<c10::StorageImpl>;
using WeakStorageRef = c10::weak_intrusive_ptr<c10::StorageImpl>;

/// Address of the storage's bytes, null if it has none. Never raises, materialises or warns, unlike
/// StorageImpl::data().
void* bytes_of(const c10::StorageImpl& storage) noexcept;

/// Size of the storage; 0 where it is symbolic (such storages have no memory).
Bytes size_of(const c10::StorageImpl& storage) noexcept;

/// Whether the storage shares its bytes with others until somebody writes (torch._lazy_clone, on either side of it).
bool is_lazy_copy(const c10::StorageImpl& storage) noexcept;

/// What guarded storages say. One for the storages that are guarded together.
class GuardMessage {
 public:
  GuardMessage(std::string text, std::size_t storages);
  const std::string& text() const noexcept { return text_; }
  /// The size that storage `index` shows. Pre: index < storages.
  const c10::SymNode& absent_size(std::size_t index) const noexcept { return absent_sizes_[index / kStoragesPerSize]; }

 private:
  // Neighbours share one: they are guarded on one thread, and threads that count references to one object wait for each
  // other.
  static constexpr std::size_t kStoragesPerSize = 1024;
  std::string text_;
  std::vector<c10::SymNode> absent_sizes_;
};

/// One storage between guard and release. The storage goes on owning its memory: it keeps the allocator's context and
/// deleter, only the address is taken out of sight. So a tensor that dies meanwhile frees its block at once, whoever
/// allocated it. Holds the storage weakly. Not synchronised; the caller sees to it that nobody uses the storage during
/// engage() and release().
class GuardedStorage {
 public:
  enum class Outcome {
    Restored,  // as before
    Dead,      // the last reference went away meanwhile
    Changed,   // somebody gave the storage other memory, or none: it was left as found
  };

  /// From here on accesses raise RuntimeError with the message. Asked for its size, the storage answers 0 to Python and
  /// to sym_nbytes(); nbytes(), which cannot tell a size from an access, raises too. `message` must live until
  /// release(); `index` is the storage's among those that share it. Once; throws std::bad_alloc, having changed nothing.
  void engage(const StorageRef& storage, const GuardMessage& message, std::size_t index);

  /// Looks whether the storage is alive and as it was left, and keeps it alive until release() or forget_preparation():
  /// what may be done ahead of release().
  void prepare_release() noexcept;
  void forget_preparation() noexcept { held_.reset(); }

  /// Ends the guard. An object that never engaged, or was released, does nothing and says Restored.
  Outcome release() noexcept;

  /// Where the bytes are, and how many.
  void* bytes() const noexcept { return bytes_; }
  Bytes size() const noexcept { return size_; }
  /// The storage's identity; may dangle once the storage is dead, so only to be compared.
  const c10::StorageImpl* storage() const noexcept { return storage_._unsafe_get_target(); }

 private:
  WeakStorageRef storage_{StorageRef()};
  StorageRef held_;                        // between prepare_release() and release()
  const GuardMessage* message_ = nullptr;  // not shared: counting references to one object from several threads is slow
  void* bytes_ = nullptr;
  void* context_ = nullptr;
  Bytes size_ = 0;
  bool engaged_ = false;
  bool own_memory_ = false;   // found by prepare_release(): nobody gave the storage other memory
  bool own_message_ = false;  // likewise, or another text
  // What others had set before: torch itself poisons storages this way (memory of a CUDA graph tree that was reused).
  bool raised_before_ = false;
  std::unique_ptr<std::string> message_before_;  // behind a pointer: rare, and there is one guard per tensor
};

}  // namespace lowtide
