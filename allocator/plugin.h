/* C functions for torch.cuda.memory.CUDAPluggableAllocator and for programs in any language. They use the CUDA devices
 * of the process, and need nothing else of Lowtide:
 *
 *   alloc = torch.cuda.memory.CUDAPluggableAllocator(path_of_liblowtide, "lowtide_malloc", "lowtide_free")
 *   torch.cuda.memory.change_current_allocator(alloc)
 *
 * The hooks' addresses may be given to the setters of that object (set_record_stream_fn and so on). torch's hooks for
 * private pools take C++ types of torch and cannot come from here.
 * No function throws or ends the process. Functions that return int give 0 for success; lowtide_last_error() then says
 * why the last one failed on this thread. */
#ifndef LOWTIDE_PLUGIN_H
#define LOWTIDE_PLUGIN_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* stream: a cudaStream_t. size in bytes. */

/* Null where there is no memory; torch raises nothing then, so the reason is logged too. Size 0 gives null. */
void* lowtide_malloc(ssize_t size, int device, void* stream);
void lowtide_free(void* pointer, ssize_t size, int device, void* stream);

/* Hooks, each for the setter of the same name. */
void lowtide_init(int device_count);
void lowtide_reset(void);
void lowtide_set_memory_fraction(double fraction, int device);
void* lowtide_base_alloc(void* pointer, size_t* size);
void lowtide_record_stream(void* pointer, void* stream);

/* What went wrong in the last failed call on this thread; empty if nothing did. Valid until the next call. */
const char* lowtide_last_error(void);

#ifdef __cplusplus
}
#endif
#endif
