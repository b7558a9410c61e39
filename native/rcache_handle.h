/* What the Python side uses of native/rcache.c. Read by cffi as well: declarations only. */

struct rcache_handle;

/* A table whose operations go to the Python object known by `key`; NULL: out of memory. Two parties hold it: Python,
 * until rcache_handle_close, and the host, until the table's destroy. */
struct rcache_handle * rcache_handle_new(uint64_t key);
const struct rcache_vtable * rcache_handle_table(struct rcache_handle * handle);

/* From now on every call answers RCACHE_STATUS_CLOSED. Python must not use the handle any more. */
void rcache_handle_close(struct rcache_handle * handle);

/* Sends s_copy / s_mask to Python instead of to the published plan. */
void rcache_handle_use_python(struct rcache_handle * handle, int32_t s_copy, int32_t s_mask);

/* Copies the plan that the C readers of s_copy and s_mask answer from: [n] each. n == 0: no plan. Counts as a touch. */
int32_t rcache_handle_publish(struct rcache_handle * handle, int32_t n, const int32_t * s_copy, const int32_t * src);

/* The cache has changed otherwise than by the find_slot under way: positions known here are void. */
void rcache_handle_touch(struct rcache_handle * handle);

/* How many changes there have been; each publish and each touch is one. */
unsigned long long rcache_handle_changes(const struct rcache_handle * handle);

/* Copies the text of an error for last_error. */
void rcache_handle_set_error(struct rcache_handle * handle, const char * text);
void rcache_factory_set_error(const char * text);

/* A factory whose create goes to the Python function known by `key`; lives as long as the process. NULL: no memory. */
const struct rcache_factory * rcache_factory_new(uint64_t key);

/* Moves rows of tensors in host memory: tensor t has its rows, row_bytes[t] bytes each, at data[t]. A move is three
 * numbers: row a is copied to row b != a, and if the third is not 0, row b to row a in turn. In the order given. */
void rcache_move_rows(char * const * data, const uint64_t * row_bytes, uint32_t n_tensors, const int32_t * moves,
                      uint32_t n_moves);

/* 1: calls go through to Python. 0: they are refused, and this waits up to timeout_ms for those under way. Returns how
 * many were still under way. */
int32_t rcache_python_alive(int32_t alive, int32_t timeout_ms);

/* The first id of each set of a ubatch, [n_seqs]. 1: no set has another; 0: some have; -1: a count or pointer can't be. */
int32_t rcache_ubatch_ids(const struct rcache_ubatch * ubatch, int32_t * ids);
