/*
 * llama.cpp's class for recurrent states, answered by a cache of this package: the one file that is compiled.
 *
 * The shared object made from it is loaded before libllama. It defines every member of `llama_memory_recurrent` and of
 * its context that is not inline, so the dynamic linker binds libllama's own calls to them here. It is compiled against
 * the internal headers of that very libllama; its object layout is therefore libllama's, and must stay so: the destructor
 * of the hybrid memories is inlined there.
 *
 * Nothing is decided here. A batch is split into ubatches, then the table of the cache (rcache_plugin.h) is asked.
 *
 * Which file stands in for what:
 *
 *   construct.cpp   the constructor, what is done at destruction, and the functions that Python calls (factory, options)
 *   batches.cpp     init_batch, init_full, init_update, prepare, find_slot, and llama_memory_recurrent_context
 *   sequences.cpp   clear, seq_rm, seq_cp, seq_keep, seq_add, seq_div, seq_pos_min, seq_pos_max, get_can_shift, set_rs_idx;
 *                   and the replay that the table asks for
 *   state_io.cpp    state_write, state_read, and four members of llama_context, for restores of hybrid memories
 *   tensors.cpp     memory_breakdown, total_size, size_*_bytes, and get_r_l, get_s_l, get_p_l, get_size of the context
 *   adapter.h       what these files share
 *   versions.h      what differs between versions of llama.cpp
 *
 * Each of the five compiles by itself. They are compiled as one, because nearly half of the time goes into llama.cpp's
 * headers: 2.6 s of a core instead of 6.4.
 */

#include "batches.cpp"
#include "construct.cpp"
#include "sequences.cpp"
#include "state_io.cpp"
#include "tensors.cpp"
