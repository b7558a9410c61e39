/* Implemented in Python (rcache_plugin/capi/vtable.py), called by native/rcache.c. Read by cffi as well. `key` names the
 * Python object; each answers with a status and lets no exception out. */

int32_t rcache_py_create(uint64_t key, const struct rcache_spec * spec, const struct rcache_vtable ** table);
/* The ubatches are known by the numbers `number`, `number` + 1, ... */
int32_t rcache_py_prepare(uint64_t key, const struct rcache_ubatch * ubatches, uint32_t n_ubatches, uint64_t number);
/* prepared != 0: the ubatch is the one prepared under that number, to the last token. continues_at != 0: its sets are those
 * of the last slot, published as that change, after which there was none. n_batches: calls of prepare so far. */
int32_t rcache_py_find_slot(uint64_t key, const struct rcache_ubatch * ubatch, struct rcache_slot * slot,
                            uint64_t prepared, uint64_t continues_at, uint64_t n_batches);
int32_t rcache_py_s_copy(uint64_t key, int32_t i);
float   rcache_py_s_mask(uint64_t key, int32_t i);
int32_t rcache_py_discard_slot(uint64_t key);
int32_t rcache_py_seq_rm(uint64_t key, int32_t seq_id, int32_t p0, int32_t p1);
int32_t rcache_py_seq_cp(uint64_t key, int32_t seq_id_src, int32_t seq_id_dst, int32_t p0, int32_t p1);
int32_t rcache_py_seq_keep(uint64_t key, int32_t seq_id);
int32_t rcache_py_seq_add(uint64_t key, int32_t seq_id, int32_t p0, int32_t p1, int32_t shift);
int32_t rcache_py_seq_div(uint64_t key, int32_t seq_id, int32_t p0, int32_t p1, int32_t d);
int32_t rcache_py_seq_pos(uint64_t key, int32_t seq_id, int32_t * pos);
/* Positions of all sequences, -1 where there is none: [n_seq_max]. Writes at most n; returns n_seq_max or a negative
 * status. */
int32_t rcache_py_positions(uint64_t key, int32_t * pos, int32_t n);
int32_t rcache_py_clear(uint64_t key, int32_t data);
int32_t rcache_py_get_can_shift(uint64_t key);
int32_t rcache_py_info(uint64_t key, struct rcache_info * info);
int32_t rcache_py_r_tensor(uint64_t key, int32_t il, void ** tensor);
int32_t rcache_py_s_tensor(uint64_t key, int32_t il, void ** tensor);
int32_t rcache_py_p_tensor(uint64_t key, int32_t il, void ** tensor);
int32_t rcache_py_state_write(uint64_t key, const struct rcache_io * io, int32_t seq_id, uint32_t flags);
int32_t rcache_py_state_read(uint64_t key, const struct rcache_io * io, int32_t seq_id, uint32_t flags);
int32_t rcache_py_set_replay(uint64_t key, rcache_replay replay, void * data);
int32_t rcache_py_mark(uint64_t key, int32_t seq_id);
void    rcache_py_destroy(uint64_t key);
