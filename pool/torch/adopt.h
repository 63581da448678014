// Moves a storage that lies outside every region into one, once. The tensors that use it stay the same objects; only
// their address changes, which is why this is not part of evict.
#pragma once

#include <c10/core/Storage.h>

#include <string>

#include "pool/offload_region.h"

namespace lowtide {

/// Why the storage cannot be moved into a region, for people; empty if it can. Refused: memory that torch does not own
/// alone (from_blob, DLPack, numpy, files, memory received from or shared with another process), that has no bytes or
/// is on another kind of device than Lowtide serves, and memory of a CUDA graph's or MemPool's private pool, whose
/// address the graph has recorded.
std::string adoption_obstacle(const c10::Storage& storage);

/// Moves the storage's bytes into a new block of `region` and frees its old memory, ordered after the current stream's
/// work and before what is queued on it later. Nothing to do if the storage is in `region` already.
/// Streams: the new block belongs to the stream the old one was allocated on, so tensors need no record_stream that
/// they did not need before. Asynchronous on CUDA; on the host device done on return.
/// Throws Misuse (adoption_obstacle(), another region, a region that is not resident, a capture under way), torch's
/// OutOfMemoryError: the storage is then as before.
void adopt(const Region& region, const c10::Storage& storage);

}  // namespace lowtide
