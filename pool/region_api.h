/* Offload regions from C and from any language with a foreign function interface, beside allocator/plugin.h: the same
 * library, the same rules for errors (0 for success, lowtide_last_error() for the reason).
 * These calls know no tensors. Where the Python package is loaded too, tensors of an evicted region raise when used;
 * where it is not, using them before lowtide_region_restore() is an illegal access. */
#ifndef LOWTIDE_REGION_API_H
#define LOWTIDE_REGION_API_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* From here on what this thread allocates goes into the region called `name`, made if there is none, until the matching
 * lowtide_region_leave(). Scopes nest. The region lives until lowtide_region_release(). */
int lowtide_region_enter(const char* name);
int lowtide_region_leave(const char* name);

/* Moves the region's bytes to pinned host memory, after the work queued so far on `stream` of `device` and on the streams
 * its blocks were allocated on. Returns when its device memory is free for others. */
int lowtide_region_evict(const char* name, int device, void* stream);
/* Brings the bytes back to the same addresses. Returns when they are there. */
int lowtide_region_restore(const char* name);

/* Live bytes of the region on the device, and on the host; 0 for a region that does not exist. */
size_t lowtide_region_resident_bytes(const char* name);
size_t lowtide_region_evicted_bytes(const char* name);

/* The name is no longer needed: the region ends once its last block is freed. */
int lowtide_region_release(const char* name);

#ifdef __cplusplus
}
#endif
#endif
