// Which torch storages live in which region, and what becomes of them when it leaves: the tensor side of evict and
// restore.
//
// How storages are learnt: while a region's guard is open on a thread, a thread-local RecordFunction callback sees what
// every operator on it takes and returns, from C++ and Python alike; track() adds one by hand. What bypasses the
// dispatcher (memory that compiled code allocates, a storage resized in place) is not seen: untracked_blocks() names
// it, so that the caller can look for its owners.
//
// Locks: one mutex around the tables. Under it nothing is called: no allocator, no torch, nothing that may take the
// GIL. Storages are referenced strongly only outside it, as dropping one may free memory and run Python.
#pragma once

#include <c10/core/Storage.h>

#include <optional>
#include <string>
#include <vector>

#include "pool/offload_region.h"
#include "pool/torch/storage_guard.h"

namespace lowtide {

/// Makes this process's tensors take part in evict and restore. Once; again it does nothing.
void install_region_tensors();

/// Adds a storage to those of `region`. A storage without bytes, and one known already, are accepted and ignored.
/// Throws Misuse if the storage's memory is not in `region`, saying where it is and what to do.
void track(const Region& region, const c10::Storage& storage);

/// Adds a storage to the region its memory lies in, if any. What a search through live tensors uses.
void track_where_it_is(const c10::Storage& storage);

/// The region a storage lives in, also while it is guarded; kNoOwner if none.
OwnerId region_of(const c10::StorageImpl& storage);

/// Bytes of the storage, wherever they are: a guarded storage itself says 0.
Bytes full_size_of(const c10::StorageImpl& storage);

/// Live blocks of `region` for which no live storage is known; one that another thread is freeing now may be among
/// them.
std::vector<BlockInfo> untracked_blocks(const Region& region);

/// Storages of `region`, guarded or not, that are known and alive.
std::size_t tracked_storages(const Region& region);

/// Entries of the region's table, those of dead storages included: at most twice the storages alive at the last
/// pruning, or 64.
std::size_t table_entries(const Region& region);

/// Storages of `region` that somebody else had changed when restores since the last such call gave tensors their bytes
/// back; they were left as found.
std::size_t take_changed_storages(const Region& region);

/// What the error text of evicted tensors recommends; default "call region.restore() before using it".
void set_remedy(const Region& region, std::string remedy);

}  // namespace lowtide
