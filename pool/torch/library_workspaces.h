// Scratch memory that torch keeps for CUDA libraries, and regions.
#pragma once

namespace lowtide {

/// cuBLAS and cuBLASLt have one workspace per handle and stream, which torch allocates in the first matrix product on
/// it and keeps. One that was allocated while a region was open lies in the region: always in use, known to no tensor,
/// and gone when the next matrix product comes while the region is evicted. This gives each such workspace other memory.
/// To be called on the thread and at the end of the operator that may have made it; the old memory is then free for
/// later work of the same stream. Cheap where there is nothing new. A failure leaves the workspace where it is.
void move_library_workspaces_out() noexcept;

}  // namespace lowtide
