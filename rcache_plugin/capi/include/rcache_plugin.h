/* rcache: the C interface of the recurrent-state cache. The declarations stand in rcache_decl.h. */
#ifndef RCACHE_PLUGIN_H
#define RCACHE_PLUGIN_H

#include <stddef.h>
#include <stdint.h>

/* Raised when a struct or the meaning of a call changes; tables only ever grow at the end within one version. */
#define RCACHE_ABI_VERSION 2u

#ifdef __cplusplus
extern "C" {
#define RCACHE_STATIC_ASSERT(condition, text) static_assert(condition, text)
#else
#define RCACHE_STATIC_ASSERT(condition, text) _Static_assert(condition, text)
#endif

#include "rcache_decl.h"

/* The layout that both sides were compiled against, on machines with 8-byte pointers. */
RCACHE_STATIC_ASSERT(sizeof(void *) != 8 || sizeof(struct rcache_spec) == 88, "rcache_spec");
RCACHE_STATIC_ASSERT(sizeof(void *) != 8 || sizeof(struct rcache_ubatch) == 48, "rcache_ubatch");
RCACHE_STATIC_ASSERT(sizeof(struct rcache_slot) == 16, "rcache_slot");
RCACHE_STATIC_ASSERT(sizeof(struct rcache_info) == 56, "rcache_info");
RCACHE_STATIC_ASSERT(sizeof(void *) != 8 || sizeof(struct rcache_io) == 48, "rcache_io");
RCACHE_STATIC_ASSERT(sizeof(void *) != 8 || sizeof(struct rcache_vtable) == 208, "rcache_vtable");
RCACHE_STATIC_ASSERT(sizeof(void *) != 8 || offsetof(struct rcache_vtable, find_slot) == 24, "rcache_vtable.find_slot");
RCACHE_STATIC_ASSERT(sizeof(void *) != 8 || offsetof(struct rcache_vtable, destroy) == 184, "rcache_vtable.destroy");

#ifdef __cplusplus
}
#endif

#endif
