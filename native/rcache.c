/*
 * The C side of the table's callbacks: each operation checks that there is still a Python object to answer it, and
 * refuses otherwise. s_copy and s_mask, called once a cell and ubatch, read the published plan without entering Python.
 */

#include "rcache_plugin.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "rcache_handle.h"
#include "rcache_callbacks.h"

#define MAX_TOKENS (1 << 24) /* of one ubatch: what says more is damaged */

/* Ubatches as numbers, one after the other: n_seqs, n_seq_tokens, whether there are tokens, n_seq_id, the ids of each
 * set, the positions, the tokens. */
struct ubatches {
    int32_t * data;
    size_t room;
    size_t used;
};

struct rcache_handle {
    struct rcache_vtable table;
    uint64_t key;
    atomic_int holders;   /* Python and the host; the last holder frees */
    atomic_int open;
    int32_t s_copy_in_python;
    int32_t s_mask_in_python;
    int32_t plan_n;
    int32_t plan_room;
    int32_t * plan_s_copy;
    float   * plan_s_mask;
    /* Positions of the sequences, so that a host may ask for all of them at each step. Valid while pos_at == changes. */
    pthread_mutex_t pos_lock;
    atomic_ullong changes; /* of the cache, counted */
    unsigned long long pos_at;
    int32_t n_pos;         /* sequences of the cache */
    int32_t pos_room;
    int32_t * pos;
    /* Saves calls of Python: the ubatches last prepared, and the sets of the last slot. The lock is tried, never waited
     * for: see op_seq_pos. */
    pthread_mutex_t step_lock;
    struct ubatches prepared;
    size_t prepared_read;         /* how much of it find_slot has taken */
    uint64_t prepared_number;     /* of the next one to take */
    uint64_t prepared_end;
    struct ubatches slot;         /* the last slot's ubatch */
    unsigned long long slot_at;   /* changes after that slot; 0: none */
    atomic_ullong n_batches;      /* that the host has prepared */
    pthread_mutex_t error_lock;
    char * error;
};

static atomic_int python_alive;
static atomic_int calls_under_way;
static _Thread_local char factory_error[1024];

int32_t rcache_python_alive(int32_t alive, int32_t timeout_ms) {
    atomic_store(&python_alive, alive);
    for (int32_t waited = 0; !alive && atomic_load(&calls_under_way) > 0 && waited < timeout_ms; waited++) {
        nanosleep(&(struct timespec) { .tv_nsec = 1000000 }, NULL);
    }
    return atomic_load(&calls_under_way);
}

/* The count comes before the test, so that rcache_python_alive(0) either sees this call or is seen by it. */
static int enter(const struct rcache_handle * handle) {
    atomic_fetch_add(&calls_under_way, 1);
    if (atomic_load(&python_alive) && (!handle || atomic_load(&handle->open))) {
        return 1;
    }
    atomic_fetch_sub(&calls_under_way, 1);
    return 0;
}

static void leave(void) {
    atomic_fetch_sub(&calls_under_way, 1);
}

#define CALL_PYTHON(user, call)                          \
    const struct rcache_handle * handle = user;          \
    if (!enter(handle)) { return RCACHE_STATUS_CLOSED; } \
    const int32_t status = call;                         \
    leave();                                             \
    return status

static atomic_ullong next_number = 1;

/* Whether everything that is read below is present. If not, Python is called, which says what is wrong. */
static int readable(const struct rcache_ubatch * u) {
    if (!u || u->struct_size < sizeof(*u) || !u->n_seq_id || !u->seq_id || !u->pos || u->n_seqs == 0 ||
        u->n_seq_tokens == 0 || (uint64_t) u->n_seqs * u->n_seq_tokens > MAX_TOKENS) {
        return 0;
    }
    for (uint32_t s = 0; s < u->n_seqs; s++) {
        if (u->n_seq_id[s] < 1 || u->n_seq_id[s] > MAX_TOKENS || !u->seq_id[s]) {
            return 0;
        }
    }
    return 1;
}

static int save_ints(struct ubatches * saved, const int32_t * values, size_t n) {
    if (saved->used + n > saved->room) {
        const size_t room = 2 * (saved->used + n);
        int32_t * data = realloc(saved->data, room * sizeof(int32_t));
        if (!data) {
            return 0;
        }
        saved->data = data;
        saved->room = room;
    }
    memcpy(saved->data + saved->used, values, n * sizeof(int32_t));
    saved->used += n;
    return 1;
}

static int save_ubatch(struct ubatches * saved, const struct rcache_ubatch * u) {
    const size_t n_tokens = (size_t) u->n_seqs * u->n_seq_tokens;
    const int32_t sizes[3] = { (int32_t) u->n_seqs, (int32_t) u->n_seq_tokens, u->token != NULL };
    int saved_all = save_ints(saved, sizes, 3) && save_ints(saved, u->n_seq_id, u->n_seqs);
    for (uint32_t s = 0; s < u->n_seqs && saved_all; s++) {
        saved_all = save_ints(saved, u->seq_id[s], (size_t) u->n_seq_id[s]);
    }
    return saved_all && save_ints(saved, u->pos, n_tokens) && (!u->token || save_ints(saved, u->token, n_tokens));
}

static int same_ints(const int32_t ** saved, const int32_t * values, size_t n) {
    const int same = memcmp(*saved, values, n * sizeof(int32_t)) == 0;
    *saved += n;
    return same;
}

/* Whether the sets are those saved at *saved, which then points behind them. */
static int same_sets(const int32_t ** saved, const struct rcache_ubatch * u) {
    if ((uint32_t) (*saved)[0] != u->n_seqs) {
        return 0;
    }
    *saved += 3;
    int same = same_ints(saved, u->n_seq_id, u->n_seqs);
    for (uint32_t s = 0; s < u->n_seqs && same; s++) {
        same = same_ints(saved, u->seq_id[s], (size_t) u->n_seq_id[s]);
    }
    return same;
}

/* Whether all is as saved at *saved, which then points behind it. */
static int same_ubatch(const int32_t ** saved, const struct rcache_ubatch * u) {
    const size_t n_tokens = (size_t) u->n_seqs * u->n_seq_tokens;
    const int32_t * const sizes = *saved;
    return (uint32_t) sizes[1] == u->n_seq_tokens && sizes[2] == (u->token != NULL) && same_sets(saved, u) &&
           same_ints(saved, u->pos, n_tokens) && (!u->token || same_ints(saved, u->token, n_tokens));
}

/* Whether the ubatch continues the sets of the last slot and the cache is as that slot has left it. Each set then has
 * a cell to itself, side by side and in order, so the ubatch fits. */
static int continues(const struct rcache_handle * handle, const struct rcache_ubatch * u) {
    const int32_t * saved = handle->slot.data;
    if (handle->slot_at == 0 || handle->slot_at != atomic_load(&handle->changes) || !same_sets(&saved, u)) {
        return 0;
    }
    int32_t lowest = 0;
    for (uint32_t i = 0; i < u->n_seqs * u->n_seq_tokens; i++) {
        lowest = u->pos[i] < lowest ? u->pos[i] : lowest;
    }
    return lowest == 0;
}

static int32_t op_prepare(void * user, const struct rcache_ubatch * ubatches, uint32_t n_ubatches) {
    struct rcache_handle * handle = user;
    if (!enter(handle)) {
        return RCACHE_STATUS_CLOSED;
    }
    atomic_fetch_add(&handle->n_batches, 1);
    const int locked = pthread_mutex_trylock(&handle->step_lock) == 0;
    int fits = locked && ubatches && n_ubatches > 0;
    for (uint32_t i = 0; i < n_ubatches && fits; i++) {
        fits = readable(ubatches + i) && continues(handle, ubatches + i);
    }
    int32_t status = RCACHE_STATUS_OK;
    if (locked) {
        handle->prepared.used = handle->prepared_read = 0;
        handle->prepared_number = handle->prepared_end = 0;
    }
    if (!fits) {
        const uint64_t number = atomic_fetch_add(&next_number, n_ubatches);
        status = rcache_py_prepare(handle->key, ubatches, n_ubatches, number);
        if (locked && status == RCACHE_STATUS_OK) {
            int saved = 1;
            for (uint32_t i = 0; i < n_ubatches && saved; i++) {
                saved = readable(ubatches + i) && save_ubatch(&handle->prepared, ubatches + i);
            }
            handle->prepared_number = number;
            handle->prepared_end = saved ? number + n_ubatches : number;
        }
    }
    if (locked) {
        pthread_mutex_unlock(&handle->step_lock);
    }
    leave();
    return status;
}

/* After a find_slot that was the only change since: its sequences are where the ubatch ends. */
static void follow_positions(struct rcache_handle * handle, const struct rcache_ubatch * u, unsigned long long before) {
    if (pthread_mutex_trylock(&handle->pos_lock) != 0) { /* see op_seq_pos */
        return;
    }
    if (handle->pos && handle->pos_at == before && atomic_load(&handle->changes) == before + 1) {
        for (uint32_t s = 0; s < u->n_seqs; s++) {
            const int32_t last = u->pos[(s + 1) * u->n_seq_tokens - 1];
            for (int32_t j = 0; j < u->n_seq_id[s]; j++) {
                if (u->seq_id[s][j] < handle->n_pos) {
                    handle->pos[u->seq_id[s][j]] = last;
                }
            }
        }
        handle->pos_at = before + 1;
    }
    pthread_mutex_unlock(&handle->pos_lock);
}

static int32_t op_find_slot(void * user, const struct rcache_ubatch * ubatch, struct rcache_slot * slot) {
    struct rcache_handle * handle = user;
    if (!enter(handle)) {
        return RCACHE_STATUS_CLOSED;
    }
    const unsigned long long before = atomic_load(&handle->changes);
    const int locked = pthread_mutex_trylock(&handle->step_lock) == 0;
    uint64_t prepared = 0, continues_at = 0;
    if (locked && readable(ubatch)) {
        if (handle->prepared_number < handle->prepared_end) {
            const int32_t * saved = handle->prepared.data + handle->prepared_read;
            if (same_ubatch(&saved, ubatch)) {
                prepared = handle->prepared_number++;
                handle->prepared_read = (size_t) (saved - handle->prepared.data);
            } else {
                handle->prepared_end = 0;
            }
        } else if (continues(handle, ubatch)) {
            continues_at = handle->slot_at;
        }
    }
    const int32_t status = rcache_py_find_slot(
        handle->key, ubatch, slot, prepared, continues_at, atomic_load(&handle->n_batches));
    if (status == RCACHE_STATUS_OK) {
        follow_positions(handle, ubatch, before);
    }
    if (locked) {
        if (!continues_at || status != RCACHE_STATUS_OK) {
            handle->slot_at = 0;
            handle->slot.used = 0;
            if (status == RCACHE_STATUS_OK && readable(ubatch) && save_ubatch(&handle->slot, ubatch)) {
                handle->slot_at = before + 1;
            }
        } else {
            handle->slot_at = before + 1;
        }
        pthread_mutex_unlock(&handle->step_lock);
    }
    leave();
    return status;
}

static int32_t op_discard_slot(void * user) {
    CALL_PYTHON(user, rcache_py_discard_slot(handle->key));
}

static int32_t op_seq_rm(void * user, int32_t seq_id, int32_t p0, int32_t p1) {
    CALL_PYTHON(user, rcache_py_seq_rm(handle->key, seq_id, p0, p1));
}

static int32_t op_seq_cp(void * user, int32_t seq_id_src, int32_t seq_id_dst, int32_t p0, int32_t p1) {
    CALL_PYTHON(user, rcache_py_seq_cp(handle->key, seq_id_src, seq_id_dst, p0, p1));
}

static int32_t op_seq_keep(void * user, int32_t seq_id) {
    CALL_PYTHON(user, rcache_py_seq_keep(handle->key, seq_id));
}

static int32_t op_seq_add(void * user, int32_t seq_id, int32_t p0, int32_t p1, int32_t shift) {
    CALL_PYTHON(user, rcache_py_seq_add(handle->key, seq_id, p0, p1, shift));
}

static int32_t op_seq_div(void * user, int32_t seq_id, int32_t p0, int32_t p1, int32_t d) {
    CALL_PYTHON(user, rcache_py_seq_div(handle->key, seq_id, p0, p1, d));
}

/* Reads the positions if the cache has changed since the last time; 0: that failed. Called with pos_lock held. */
static int positions_known(struct rcache_handle * handle) {
    const unsigned long long now = atomic_load(&handle->changes);
    if (handle->pos && handle->pos_at == now) {
        return 1;
    }
    for (;;) {
        const int32_t n = rcache_py_positions(handle->key, handle->pos, handle->pos_room);
        if (n < 0) {
            return 0;
        }
        if (n <= handle->pos_room) {
            handle->n_pos  = n;
            handle->pos_at = now;
            return 1;
        }
        int32_t * room = realloc(handle->pos, (size_t) n * sizeof(int32_t));
        if (!room) {
            return 0;
        }
        handle->pos      = room;
        handle->pos_room = n;
    }
}

/* A state has one position, so the smallest and the largest are the same. */
static int32_t op_seq_pos(void * user, int32_t seq_id, int32_t * pos) {
    struct rcache_handle * handle = user;
    if (!enter(handle)) {
        return RCACHE_STATUS_CLOSED;
    }
    int32_t status = RCACHE_STATUS_OK;
    /* Not waiting: whoever holds the lock may be waiting for Python, which this thread may hold. */
    const int locked = pthread_mutex_trylock(&handle->pos_lock) == 0;
    if (pos && seq_id >= 0 && locked && positions_known(handle) && seq_id < handle->n_pos) {
        *pos = handle->pos[seq_id];
    } else {
        status = rcache_py_seq_pos(handle->key, seq_id, pos); /* and the error, if it is one */
    }
    if (locked) {
        pthread_mutex_unlock(&handle->pos_lock);
    }
    leave();
    return status;
}

static int32_t op_set_replay(void * user, rcache_replay replay, void * data) {
    CALL_PYTHON(user, rcache_py_set_replay(handle->key, replay, data));
}

static int32_t op_mark(void * user, int32_t seq_id) {
    CALL_PYTHON(user, rcache_py_mark(handle->key, seq_id));
}

static int32_t op_clear(void * user, int32_t data) {
    CALL_PYTHON(user, rcache_py_clear(handle->key, data));
}

static int32_t op_get_can_shift(void * user) {
    CALL_PYTHON(user, rcache_py_get_can_shift(handle->key));
}

static int32_t op_info(void * user, struct rcache_info * info) {
    CALL_PYTHON(user, rcache_py_info(handle->key, info));
}

static int32_t op_r_tensor(void * user, int32_t il, void ** tensor) {
    CALL_PYTHON(user, rcache_py_r_tensor(handle->key, il, tensor));
}

static int32_t op_s_tensor(void * user, int32_t il, void ** tensor) {
    CALL_PYTHON(user, rcache_py_s_tensor(handle->key, il, tensor));
}

static int32_t op_p_tensor(void * user, int32_t il, void ** tensor) {
    CALL_PYTHON(user, rcache_py_p_tensor(handle->key, il, tensor));
}

static int32_t op_state_write(void * user, const struct rcache_io * io, int32_t seq_id, uint32_t flags) {
    CALL_PYTHON(user, rcache_py_state_write(handle->key, io, seq_id, flags));
}

static int32_t op_state_read(void * user, const struct rcache_io * io, int32_t seq_id, uint32_t flags) {
    CALL_PYTHON(user, rcache_py_state_read(handle->key, io, seq_id, flags));
}

static int32_t op_s_copy(void * user, int32_t i) {
    const struct rcache_handle * handle = user;
    if (handle->s_copy_in_python) {
        if (!enter(handle)) {
            return -1;
        }
        const int32_t row = rcache_py_s_copy(handle->key, i);
        leave();
        return row;
    }
    return atomic_load(&handle->open) && i >= 0 && i < handle->plan_n ? handle->plan_s_copy[i] : -1;
}

static float op_s_mask(void * user, int32_t i) {
    const struct rcache_handle * handle = user;
    if (handle->s_mask_in_python) {
        if (!enter(handle)) {
            return NAN;
        }
        const float keep = rcache_py_s_mask(handle->key, i);
        leave();
        return keep;
    }
    return atomic_load(&handle->open) && i >= 0 && i < handle->plan_n ? handle->plan_s_mask[i] : NAN;
}

static int32_t copy_text(const char * text, char * buf, uint32_t n_buf) {
    const size_t length = strlen(text);
    if (buf && n_buf > 0) {
        const size_t saved = length < n_buf ? length : n_buf - 1;
        memcpy(buf, text, saved);
        buf[saved] = 0;
    }
    return (int32_t) length;
}

static int32_t op_last_error(void * user, char * buf, uint32_t n_buf) {
    struct rcache_handle * handle = user;
    pthread_mutex_lock(&handle->error_lock);
    const int32_t length = copy_text(handle->error ? handle->error : "", buf, n_buf);
    pthread_mutex_unlock(&handle->error_lock);
    return length;
}

static void let_go(struct rcache_handle * handle) {
    if (atomic_fetch_sub(&handle->holders, 1) > 1) {
        return;
    }
    pthread_mutex_destroy(&handle->error_lock);
    pthread_mutex_destroy(&handle->pos_lock);
    pthread_mutex_destroy(&handle->step_lock);
    free(handle->prepared.data);
    free(handle->slot.data);
    free(handle->pos);
    free(handle->error);
    free(handle->plan_s_copy);
    free(handle->plan_s_mask);
    free(handle);
}

static void op_destroy(void * user) {
    struct rcache_handle * handle = user;
    if (enter(handle)) {
        rcache_py_destroy(handle->key);
        leave();
    }
    let_go(handle);
}

struct rcache_handle * rcache_handle_new(uint64_t key) {
    struct rcache_handle * handle = calloc(1, sizeof(*handle));
    if (!handle) {
        return NULL;
    }
    if (pthread_mutex_init(&handle->error_lock, NULL) != 0) {
        free(handle);
        return NULL;
    }
    if (pthread_mutex_init(&handle->pos_lock, NULL) != 0) {
        pthread_mutex_destroy(&handle->error_lock);
        free(handle);
        return NULL;
    }
    if (pthread_mutex_init(&handle->step_lock, NULL) != 0) {
        pthread_mutex_destroy(&handle->error_lock);
        pthread_mutex_destroy(&handle->pos_lock);
        free(handle);
        return NULL;
    }
    handle->key = key;
    atomic_init(&handle->holders, 2);
    atomic_init(&handle->open, 1);
    handle->table = (struct rcache_vtable) {
        .abi_version   = RCACHE_ABI_VERSION,
        .struct_size   = sizeof(struct rcache_vtable),
        .user          = handle,
        .prepare       = op_prepare,
        .find_slot     = op_find_slot,
        .s_copy        = op_s_copy,
        .s_mask        = op_s_mask,
        .discard_slot  = op_discard_slot,
        .seq_rm        = op_seq_rm,
        .seq_cp        = op_seq_cp,
        .seq_keep      = op_seq_keep,
        .seq_add       = op_seq_add,
        .seq_div       = op_seq_div,
        .seq_pos_min   = op_seq_pos,
        .seq_pos_max   = op_seq_pos,
        .clear         = op_clear,
        .get_can_shift = op_get_can_shift,
        .info          = op_info,
        .r_tensor      = op_r_tensor,
        .s_tensor      = op_s_tensor,
        .p_tensor      = op_p_tensor,
        .state_write   = op_state_write,
        .state_read    = op_state_read,
        .last_error    = op_last_error,
        .destroy       = op_destroy,
        .set_replay    = op_set_replay,
        .mark          = op_mark,
    };
    return handle;
}

const struct rcache_vtable * rcache_handle_table(struct rcache_handle * handle) {
    return &handle->table;
}

void rcache_handle_close(struct rcache_handle * handle) {
    atomic_store(&handle->open, 0);
    let_go(handle);
}

void rcache_handle_use_python(struct rcache_handle * handle, int32_t s_copy, int32_t s_mask) {
    handle->s_copy_in_python = s_copy;
    handle->s_mask_in_python = s_mask;
}

int32_t rcache_handle_publish(struct rcache_handle * handle, int32_t n, const int32_t * s_copy, const int32_t * src) {
    rcache_handle_touch(handle);
    handle->plan_n = 0;
    if (n > handle->plan_room) {
        int32_t * room_s_copy = realloc(handle->plan_s_copy, (size_t) n * sizeof(int32_t));
        if (!room_s_copy) {
            return RCACHE_STATUS_ALLOC;
        }
        handle->plan_s_copy = room_s_copy;
        float * room_s_mask = realloc(handle->plan_s_mask, (size_t) n * sizeof(float));
        if (!room_s_mask) {
            return RCACHE_STATUS_ALLOC;
        }
        handle->plan_s_mask = room_s_mask;
        handle->plan_room = n;
    }
    for (int32_t i = 0; i < n; i++) {
        handle->plan_s_copy[i] = s_copy[i];
        handle->plan_s_mask[i] = src[i] >= 0 ? 1.0f : 0.0f;
    }
    handle->plan_n = n;
    return RCACHE_STATUS_OK;
}

void rcache_handle_touch(struct rcache_handle * handle) {
    atomic_fetch_add(&handle->changes, 1);
}

void rcache_handle_set_error(struct rcache_handle * handle, const char * text) {
    const size_t n_bytes = strlen(text) + 1;
    char * copy = malloc(n_bytes);
    if (copy) {
        memcpy(copy, text, n_bytes);
    }
    pthread_mutex_lock(&handle->error_lock);
    free(handle->error);
    handle->error = copy;
    pthread_mutex_unlock(&handle->error_lock);
}

void rcache_factory_set_error(const char * text) {
    copy_text(text, factory_error, sizeof(factory_error));
}

static int32_t factory_create(void * user, const struct rcache_spec * spec, const struct rcache_vtable ** table) {
    if (!spec || !table) {
        rcache_factory_set_error("create needs a spec and a place for the table");
        return RCACHE_STATUS_INVALID;
    }
    *table = NULL;
    if (spec->abi_version != RCACHE_ABI_VERSION || spec->struct_size < sizeof(*spec)) {
        snprintf(factory_error, sizeof(factory_error),
                 "the host has version %u of the interface with a spec of %u bytes, this is version %u with %zu bytes",
                 spec->abi_version, spec->struct_size, RCACHE_ABI_VERSION, sizeof(*spec));
        return RCACHE_STATUS_ABI;
    }
    if (!enter(NULL)) {
        rcache_factory_set_error("Python has ended");
        return RCACHE_STATUS_CLOSED;
    }
    const int32_t status = rcache_py_create((uint64_t) (uintptr_t) user, spec, table);
    leave();
    return status;
}

static int32_t factory_last_error(void * user, char * buf, uint32_t n_buf) {
    (void) user;
    return copy_text(factory_error, buf, n_buf);
}

/* Factories are never freed, since a host may keep one for as long as the process lives. */
struct factory_node {
    struct rcache_factory factory;
    struct factory_node * next;
};

static _Atomic(struct factory_node *) all_factories;

const struct rcache_factory * rcache_factory_new(uint64_t key) {
    struct factory_node * node = malloc(sizeof(*node));
    if (!node) {
        return NULL;
    }
    node->factory = (struct rcache_factory) {
        .abi_version = RCACHE_ABI_VERSION,
        .struct_size = sizeof(struct rcache_factory),
        .user        = (void *) (uintptr_t) key,
        .create      = factory_create,
        .last_error  = factory_last_error,
    };
    node->next = atomic_load(&all_factories);
    while (!atomic_compare_exchange_weak(&all_factories, &node->next, node)) {
    }
    return &node->factory;
}

static void swap_bytes(char * a, char * b, size_t n_bytes) {
    char piece[4096];
    while (n_bytes > 0) {
        const size_t n = n_bytes < sizeof(piece) ? n_bytes : sizeof(piece);
        memcpy(piece, a, n);
        memcpy(a, b, n);
        memcpy(b, piece, n);
        a += n;
        b += n;
        n_bytes -= n;
    }
}

void rcache_move_rows(char * const * data, const uint64_t * row_bytes, uint32_t n_tensors, const int32_t * moves,
                      uint32_t n_moves) {
    for (uint32_t t = 0; t < n_tensors; t++) {
        for (uint32_t i = 0; i < n_moves; i++) {
            char * const a = data[t] + (uint64_t) moves[3 * i] * row_bytes[t];
            char * const b = data[t] + (uint64_t) moves[3 * i + 1] * row_bytes[t];
            if (moves[3 * i + 2]) {
                swap_bytes(a, b, row_bytes[t]);
            } else {
                memcpy(b, a, row_bytes[t]);
            }
        }
    }
}

unsigned long long rcache_handle_changes(const struct rcache_handle * handle) {
    return atomic_load(&handle->changes);
}

int32_t rcache_ubatch_ids(const struct rcache_ubatch * ubatch, int32_t * ids) {
    int32_t single = 1;
    for (uint32_t s = 0; s < ubatch->n_seqs; s++) {
        if (ubatch->n_seq_id[s] < 1 || !ubatch->seq_id[s]) {
            return -1;
        }
        ids[s] = ubatch->seq_id[s][0];
        single &= ubatch->n_seq_id[s] == 1;
    }
    return single;
}
