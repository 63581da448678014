// Who owns what this thread allocates: a stack of owners per thread, the innermost wins.
// The allocator asks it on each allocation; pool/offload_region.h pushes and pops.
#pragma once

#include "allocator/types.h"

namespace lowtide {

/// Owner of allocations of this thread now; kNoOwner outside any scope.
OwnerId current_owner() noexcept;

/// Whether a scope of `owner` is open on this thread, innermost or not.
bool in_scope_of(OwnerId owner) noexcept;

/// Makes `owner` (kNoOwner: nobody) the owner of this thread's allocations until leave_scope().
void enter_scope(OwnerId owner);

/// Ends the innermost scope of this thread. Throws Misuse if that is not one of `owner`:
/// scopes of one thread must nest, and a scope ends on the thread that entered it.
void leave_scope(OwnerId owner);

}  // namespace lowtide
