/*
 * A whole scenario driven through the C interface, with no Python on this side: rows of its own instead of a model,
 * whose state is a running hash of the tokens, so that any wrong row shows. Compiled as a shared object; the tests load
 * it and hand over a factory or a table. Each function returns 0, or the line of the check that failed.
 */

#include "rcache_plugin.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            fprintf(stderr, "%s:%d: %s is not so\n", __FILE__, __LINE__, #condition); \
            return __LINE__;                                                          \
        }                                                                             \
    } while (0)

enum { MAX_CELLS = 64, MAX_SEQS = 64 };

static uint64_t fold(uint64_t state, int32_t token) {
    return (state ^ (uint64_t) (uint32_t) token) * 0x9E3779B97F4A7C15u + 1u;
}

/* What a graph does with a slot: gather all rows, compute the first ones, write all back. */
static int step(const struct rcache_vtable * t, uint64_t * rows, const struct rcache_ubatch * u, int use_mask) {
    struct rcache_slot slot = { .struct_size = sizeof(slot) };
    CHECK(t->find_slot(t->user, u, &slot) == RCACHE_STATUS_OK);
    CHECK(slot.n >= (int32_t) u->n_seqs && slot.head >= 0 && slot.head + slot.n <= MAX_CELLS);
    if (!use_mask && slot.rs_z >= 0) {
        rows[slot.rs_z] = 0;
    }
    uint64_t gathered[MAX_CELLS];
    for (int32_t i = 0; i < slot.n; i++) {
        const int32_t row = t->s_copy(t->user, i);
        CHECK(row >= 0 && row < MAX_CELLS);
        CHECK(row == t->s_copy(t->user, i)); /* reading changes nothing */
        const float keep = t->s_mask(t->user, i);
        CHECK(keep == 0.0f || keep == 1.0f);
        gathered[i] = use_mask && keep == 0.0f ? 0 : rows[row];
    }
    for (uint32_t s = 0; s < u->n_seqs; s++) {
        for (uint32_t j = 0; j < u->n_seq_tokens; j++) {
            gathered[s] = fold(gathered[s], u->token[s * u->n_seq_tokens + j]);
        }
    }
    memcpy(rows + slot.head, gathered, (size_t) slot.n * sizeof(*gathered));
    CHECK(t->s_copy(t->user, -1) == -1 && t->s_copy(t->user, slot.n) == -1);
    CHECK(isnan(t->s_mask(t->user, -1)) && isnan(t->s_mask(t->user, slot.n)));
    return 0;
}

/* Decodes n_seq_tokens tokens of each of these sequences, after their positions, and keeps the ledger. */
static int decode(const struct rcache_vtable * t, uint64_t * rows, uint64_t * ledger, const int32_t * seqs,
                  uint32_t n_seqs, uint32_t n_seq_tokens, int use_mask) {
    static int32_t next_token = 1;
    int32_t n_seq_id[MAX_SEQS], pos[MAX_SEQS * 8], token[MAX_SEQS * 8];
    const int32_t * seq_id[MAX_SEQS];
    for (uint32_t s = 0; s < n_seqs; s++) {
        int32_t last;
        CHECK(t->seq_pos_max(t->user, seqs[s], &last) == RCACHE_STATUS_OK);
        n_seq_id[s] = 1;
        seq_id[s] = seqs + s;
        for (uint32_t j = 0; j < n_seq_tokens; j++) {
            pos[s * n_seq_tokens + j] = last + 1 + (int32_t) j;
            token[s * n_seq_tokens + j] = next_token;
            ledger[seqs[s]] = fold(ledger[seqs[s]], next_token++);
        }
    }
    const struct rcache_ubatch u = {
        .struct_size = sizeof(u), .n_seqs = n_seqs, .n_seq_tokens = n_seq_tokens,
        .n_seq_id = n_seq_id, .seq_id = seq_id, .pos = pos, .token = token,
    };
    CHECK(t->prepare(t->user, &u, 1) == RCACHE_STATUS_OK);
    return step(t, rows, &u, use_mask);
}

#define DECODE(n_seq_tokens, ...)                                                                            \
    do {                                                                                                     \
        const int32_t seqs_[] = { __VA_ARGS__ };                                                             \
        const int line_ = decode(t, rows, ledger, seqs_, sizeof(seqs_) / sizeof(*seqs_), n_seq_tokens, use_mask); \
        CHECK(line_ == 0);                                                                                   \
    } while (0)

/* Every live sequence's state must be the hash of exactly its tokens: found by decoding one token more. */
static int verify(const struct rcache_vtable * t, uint64_t * rows, uint64_t * ledger, int32_t n_seqs, int use_mask) {
    for (int32_t seq = 0; seq < n_seqs; seq++) {
        DECODE(1, seq);
        struct rcache_info info = { .struct_size = sizeof(info) };
        CHECK(t->info(t->user, &info) == RCACHE_STATUS_OK);
        CHECK(rows[info.head] == ledger[seq]);
    }
    return 0;
}

static int scenario(const struct rcache_vtable * t, int use_mask) {
    uint64_t rows[MAX_CELLS], ledger[MAX_SEQS] = { 0 };
    for (int i = 0; i < MAX_CELLS; i++) {
        rows[i] = 0xBAD0BAD0BAD0BAD0u + (uint64_t) i; /* whatever was there before */
    }
    CHECK(t->abi_version == RCACHE_ABI_VERSION && t->struct_size >= sizeof(*t));
    struct rcache_info info = { .struct_size = sizeof(info) };
    CHECK(t->info(t->user, &info) == RCACHE_STATUS_OK);
    CHECK(info.size == 8 && info.n_seq_max == 8 && info.used == 0 && info.n_layer == 3);
    CHECK(t->clear(t->user, 1) == RCACHE_STATUS_OK);
    CHECK(t->get_can_shift(t->user) == 1);
    CHECK(t->s_copy(t->user, 0) == -1 && isnan(t->s_mask(t->user, 0)));

    DECODE(4, 0, 1, 2);
    DECODE(1, 2, 0);
    DECODE(2, 5);
    DECODE(1, 5, 1, 0, 2);
    CHECK(verify(t, rows, ledger, 3, use_mask) == 0);

    /* a fork: both continue, each with its own tokens */
    CHECK(t->seq_cp(t->user, 0, 3, -1, -1) == RCACHE_STATUS_OK);
    ledger[3] = ledger[0];
    DECODE(3, 3, 0);
    DECODE(1, 0);
    CHECK(verify(t, rows, ledger, 4, use_mask) == 0);

    /* a refusal changes nothing, a full removal starts from zero */
    int32_t pos = 0;
    CHECK(t->seq_rm(t->user, 1, 1, -1) == RCACHE_STATUS_REFUSED);
    CHECK(t->seq_pos_max(t->user, 1, &pos) == RCACHE_STATUS_OK && pos > 1);
    CHECK(t->seq_pos_min(t->user, 1, &pos) == RCACHE_STATUS_OK && pos > 1);
    CHECK(t->seq_rm(t->user, 1, 0, -1) == RCACHE_STATUS_OK);
    CHECK(t->seq_pos_max(t->user, 1, &pos) == RCACHE_STATUS_OK && pos == -1);
    ledger[1] = 0;
    DECODE(2, 4, 1);
    DECODE(1, 1, 5, 4);
    CHECK(verify(t, rows, ledger, 6, use_mask) == 0);

    CHECK(t->seq_add(t->user, 4, 0, -1, 10) == RCACHE_STATUS_OK);
    CHECK(t->seq_div(t->user, 4, 0, -1, 2) == RCACHE_STATUS_OK);
    CHECK(t->seq_add(t->user, 4, 0, -1, -1000) == RCACHE_STATUS_INVALID);
    CHECK(t->seq_div(t->user, 4, 0, -1, 0) == RCACHE_STATUS_INVALID);

    /* errors are statuses with a text */
    char text[256];
    struct rcache_slot slot = { .struct_size = sizeof(slot) };
    const int32_t zero = 0, one = 1, far = 1000, *ids[] = { &far };
    struct rcache_ubatch bad = {
        .struct_size = sizeof(bad), .n_seqs = 1, .n_seq_tokens = 1, .n_seq_id = &one, .seq_id = ids, .pos = &zero,
    };
    CHECK(t->find_slot(t->user, &bad, &slot) == RCACHE_STATUS_INVALID);
    CHECK(t->last_error(t->user, text, sizeof(text)) > 0 && strstr(text, "1000") && strstr(text, "n_seq_max=8"));
    CHECK(t->last_error(t->user, text, 5) > 5 && strlen(text) == 4);
    CHECK(t->last_error(t->user, NULL, 0) > 5);
    CHECK(t->prepare(t->user, &bad, 1) == RCACHE_STATUS_INVALID);
    bad.n_seqs = 0;
    CHECK(t->find_slot(t->user, &bad, &slot) == RCACHE_STATUS_INVALID);
    bad.n_seqs = 0xFFFFFFFFu;
    CHECK(t->find_slot(t->user, &bad, &slot) == RCACHE_STATUS_INVALID);
    bad.n_seqs = 1;
    bad.struct_size = 4;
    CHECK(t->find_slot(t->user, &bad, &slot) == RCACHE_STATUS_INVALID);
    CHECK(t->find_slot(t->user, NULL, &slot) == RCACHE_STATUS_INVALID);
    bad.struct_size = sizeof(bad);
    CHECK(t->find_slot(t->user, &bad, NULL) == RCACHE_STATUS_INVALID);
    CHECK(t->info(t->user, NULL) == RCACHE_STATUS_INVALID);
    CHECK(t->seq_pos_max(t->user, 0, NULL) == RCACHE_STATUS_INVALID);
    CHECK(t->seq_pos_max(t->user, 1000, &pos) == RCACHE_STATUS_INVALID && pos == -1);
    CHECK(t->seq_cp(t->user, 0, -7, -1, -1) == RCACHE_STATUS_INVALID);
    CHECK(t->seq_rm(t->user, 1000, -1, -1) == RCACHE_STATUS_REFUSED);
    CHECK(t->state_write(t->user, NULL, -1, 0) == RCACHE_STATUS_INVALID);
    CHECK(t->state_read(t->user, NULL, -1, 0) == RCACHE_STATUS_INVALID);
    CHECK(verify(t, rows, ledger, 6, use_mask) == 0);

    /* a failed computation: its sequences are gone, the others are not */
    DECODE(1, 1, 4);
    CHECK(t->discard_slot(t->user) == RCACHE_STATUS_OK);
    CHECK(t->discard_slot(t->user) == RCACHE_STATUS_INVALID);
    CHECK(t->s_copy(t->user, 0) == -1);
    CHECK(t->seq_pos_max(t->user, 1, &pos) == RCACHE_STATUS_OK && pos == -1);
    for (int32_t seq = 0; seq < 6; seq++) {
        CHECK(t->seq_pos_max(t->user, seq, &pos) == RCACHE_STATUS_OK);
        if (pos == -1) {
            ledger[seq] = 0;
        }
    }
    CHECK(verify(t, rows, ledger, 6, use_mask) == 0);

    void * tensor = NULL;
    CHECK(t->r_tensor(t->user, 0, &tensor) == RCACHE_STATUS_OK && tensor != NULL);
    CHECK(t->s_tensor(t->user, 2, &tensor) == RCACHE_STATUS_OK && tensor != NULL);
    CHECK(t->r_tensor(t->user, 1, &tensor) == RCACHE_STATUS_OK && tensor == NULL); /* a layer without state */
    CHECK(t->r_tensor(t->user, 3, &tensor) == RCACHE_STATUS_INVALID && tensor == NULL);

    CHECK(t->seq_keep(t->user, 2) == RCACHE_STATUS_OK);
    CHECK(t->seq_rm(t->user, -1, 0, -1) == RCACHE_STATUS_OK);
    CHECK(t->info(t->user, &info) == RCACHE_STATUS_OK && info.used == 0);
    return 0;
}

/* On a cache of the factory's: create, use, destroy. */
int abi_run_factory(const struct rcache_factory * factory, int placement, int use_mask, const char * ggml_library) {
    const uint32_t n_embd_r[] = { 8, 0, 4 }, n_embd_s[] = { 16, 0, 12 };
    struct rcache_spec spec = {
        .abi_version = RCACHE_ABI_VERSION, .struct_size = sizeof(spec), .n_cells = 8, .n_layer = 3,
        .placement = placement, .n_embd_r = n_embd_r, .n_embd_s = n_embd_s, .ggml_library = ggml_library,
    };
    char text[512];
    const struct rcache_vtable * table = NULL;
    CHECK(factory->abi_version == RCACHE_ABI_VERSION && factory->struct_size >= sizeof(*factory));

    spec.abi_version = RCACHE_ABI_VERSION + 1;
    CHECK(factory->create(factory->user, &spec, &table) == RCACHE_STATUS_ABI && !table);
    CHECK(factory->last_error(factory->user, text, sizeof(text)) > 0 && strstr(text, "version 2"));
    spec.abi_version = RCACHE_ABI_VERSION;
    spec.struct_size = 8;
    CHECK(factory->create(factory->user, &spec, &table) == RCACHE_STATUS_ABI && !table);
    spec.struct_size = sizeof(spec);
    spec.n_cells = 0;
    CHECK(factory->create(factory->user, &spec, &table) == RCACHE_STATUS_INVALID && !table);
    spec.n_cells = 8;
    spec.placement = 7;
    CHECK(factory->create(factory->user, &spec, &table) == RCACHE_STATUS_INVALID && !table);
    spec.placement = placement;
    spec.ggml_library = "/nowhere/libggml-base.so";
    CHECK(factory->create(factory->user, &spec, &table) == RCACHE_STATUS_BACKEND && !table);
    CHECK(factory->last_error(factory->user, text, sizeof(text)) > 0 && strstr(text, "/nowhere"));
    spec.ggml_library = ggml_library;
    CHECK(factory->create(factory->user, NULL, &table) == RCACHE_STATUS_INVALID);
    CHECK(factory->create(factory->user, &spec, NULL) == RCACHE_STATUS_INVALID);

    CHECK(factory->create(factory->user, &spec, &table) == RCACHE_STATUS_OK && table);
    const int line = scenario(table, use_mask);
    table->destroy(table->user);
    return line;
}

/* What the host keeps for its replay: the rows, and how many tokens were replayed. */
struct replay_data {
    const struct rcache_vtable * table;
    uint64_t * rows;
    int32_t    n_tokens;
    int        fails;
};

static int32_t replay(void * data, int32_t seq_id, int32_t pos0, const int32_t * tokens, uint32_t n_tokens) {
    struct replay_data * host = data;
    int32_t pos[64];
    const int32_t one = 1, * ids[] = { &seq_id };
    if (host->fails || n_tokens > 64) {
        return RCACHE_STATUS_REFUSED;
    }
    for (uint32_t i = 0; i < n_tokens; i++) {
        pos[i] = pos0 + (int32_t) i;
    }
    const struct rcache_ubatch u = {
        .struct_size = sizeof(u), .n_seqs = 1, .n_seq_tokens = n_tokens, .n_seq_id = &one, .seq_id = ids, .pos = pos,
        .token = tokens,
    };
    host->n_tokens += (int32_t) n_tokens;
    return host->table->prepare(host->table->user, &u, 1) == RCACHE_STATUS_OK && step(host->table, host->rows, &u, 0) == 0
               ? RCACHE_STATUS_OK : RCACHE_STATUS_BACKEND;
}

/* Rollback: to a mark without a replay, elsewhere with one; without a replay function it is refused. */
int abi_run_checkpoints(const struct rcache_factory * factory, uint32_t flags) {
    const uint32_t n_embd[] = { 4 };
    struct rcache_spec spec = {
        .abi_version = RCACHE_ABI_VERSION, .struct_size = sizeof(spec), .n_cells = 2, .n_layer = 1,
        .n_embd_r = n_embd, .n_embd_s = n_embd, .checkpoint_cells = 3, .flags = flags,
    };
    uint64_t rows[MAX_CELLS] = { 0 }, ledger[MAX_SEQS] = { 0 }, after[32];
    const struct rcache_vtable * t = NULL;
    const int use_mask = 0;
    int32_t pos = 0;
    CHECK(factory->create(factory->user, &spec, &t) == RCACHE_STATUS_OK && t);
    struct replay_data host = { .table = t, .rows = rows };
    struct rcache_info info = { .struct_size = sizeof(info) };
    CHECK(t->info(t->user, &info) == RCACHE_STATUS_OK && info.size == 5 && info.n_seq_max == 2);
    CHECK(t->mark(t->user, 0) == RCACHE_STATUS_REFUSED); /* it is empty */
    CHECK(t->mark(t->user, 7) == RCACHE_STATUS_INVALID);

    for (int i = 0; i < 20; i++) {
        DECODE(1, 0);
        after[i] = ledger[0];
        if (i == 9) {
            CHECK(t->mark(t->user, 0) == RCACHE_STATUS_OK);
        }
    }
    CHECK(t->seq_rm(t->user, 0, 15, -1) == RCACHE_STATUS_REFUSED); /* no replay was set */
    CHECK(t->seq_pos_max(t->user, 0, &pos) == RCACHE_STATUS_OK && pos == 19);
    CHECK(t->set_replay(t->user, replay, &host) == RCACHE_STATUS_OK);
    host.fails = flags == 0;
    if (host.fails) { /* nothing has changed then */
        CHECK(t->seq_rm(t->user, 0, 15, -1) == RCACHE_STATUS_REFUSED);
        CHECK(t->seq_pos_max(t->user, 0, &pos) == RCACHE_STATUS_OK && pos == 19);
        host.fails = 0;
    }
    CHECK(t->seq_rm(t->user, 0, 15, -1) == RCACHE_STATUS_OK && host.n_tokens == 5);
    CHECK(t->seq_pos_max(t->user, 0, &pos) == RCACHE_STATUS_OK && pos == 14);
    ledger[0] = after[14];
    CHECK(verify(t, rows, ledger, 1, use_mask) == 0);
    CHECK(t->seq_rm(t->user, 0, 10, -1) == RCACHE_STATUS_OK && host.n_tokens == 5); /* the mark */
    ledger[0] = after[9];
    CHECK(verify(t, rows, ledger, 1, use_mask) == 0);

    /* the graph fails: the state is gone, a step above position 0 is refused, a rollback is not */
    DECODE(1, 0);
    CHECK(t->discard_slot(t->user) == RCACHE_STATUS_OK);
    const int32_t zero = 0, one = 1, eleven = 11, * ids[] = { &zero };
    struct rcache_slot slot = { .struct_size = sizeof(slot) };
    const struct rcache_ubatch u = {
        .struct_size = sizeof(u), .n_seqs = 1, .n_seq_tokens = 1, .n_seq_id = &one, .seq_id = ids, .pos = &eleven,
        .token = &one,
    };
    CHECK(t->prepare(t->user, &u, 1) == RCACHE_STATUS_IO && t->find_slot(t->user, &u, &slot) == RCACHE_STATUS_IO);
    CHECK(t->seq_rm(t->user, 0, 10, -1) == RCACHE_STATUS_OK);
    ledger[0] = after[9];
    CHECK(verify(t, rows, ledger, 1, use_mask) == 0);
    CHECK(t->set_replay(t->user, NULL, NULL) == RCACHE_STATUS_OK);
    CHECK(t->seq_rm(t->user, 0, 5, -1) == RCACHE_STATUS_REFUSED);
    t->destroy(t->user);
    return 0;
}

struct thread_job {
    const struct rcache_vtable * table;
    int32_t seq_id;
    int32_t n_steps;
    int failed;
};

static void * thread_main(void * arg) {
    struct thread_job * job = arg;
    const struct rcache_vtable * t = job->table;
    const int32_t one = 1, * ids[] = { &job->seq_id };
    for (int32_t pos = 0; pos < job->n_steps && !job->failed; pos++) {
        const struct rcache_ubatch u = {
            .struct_size = sizeof(u), .n_seqs = 1, .n_seq_tokens = 1, .n_seq_id = &one, .seq_id = ids, .pos = &pos,
        };
        struct rcache_slot slot = { .struct_size = sizeof(slot) };
        int32_t last = -2;
        job->failed |= t->find_slot(t->user, &u, &slot) != RCACHE_STATUS_OK;
        job->failed |= t->seq_pos_max(t->user, job->seq_id, &last) != RCACHE_STATUS_OK || last != pos;
    }
    return NULL;
}

/* n_threads threads, that Python has never seen, each with a sequence of its own on one table. */
int abi_run_threads(const struct rcache_vtable * table, int n_threads, int n_steps) {
    pthread_t threads[MAX_SEQS];
    struct thread_job jobs[MAX_SEQS];
    CHECK(n_threads <= MAX_SEQS);
    for (int i = 0; i < n_threads; i++) {
        jobs[i] = (struct thread_job) { .table = table, .seq_id = i, .n_steps = n_steps };
        CHECK(pthread_create(&threads[i], NULL, thread_main, &jobs[i]) == 0);
    }
    for (int i = 0; i < n_threads; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
        CHECK(!jobs[i].failed);
    }
    return 0;
}

/* Whatever is called, a table without a cache answers that it is closed; the plan of the last slot can be read on when
 * it is Python that has ended. */
static int closed(const struct rcache_vtable * t, int plan_is_left) {
    char text[64];
    struct rcache_slot slot = { .struct_size = sizeof(slot) };
    struct rcache_info info = { .struct_size = sizeof(info) };
    const int32_t zero = 0, one = 1, * ids[] = { &zero };
    const struct rcache_ubatch u = {
        .struct_size = sizeof(u), .n_seqs = 1, .n_seq_tokens = 1, .n_seq_id = &one, .seq_id = ids, .pos = &zero,
    };
    int32_t pos;
    void * tensor;
    CHECK(t->prepare(t->user, &u, 1) == RCACHE_STATUS_CLOSED);
    CHECK(t->find_slot(t->user, &u, &slot) == RCACHE_STATUS_CLOSED);
    CHECK((t->s_copy(t->user, 0) == -1) == !plan_is_left);
    CHECK((isnan(t->s_mask(t->user, 0)) != 0) == !plan_is_left);
    CHECK(t->discard_slot(t->user) == RCACHE_STATUS_CLOSED);
    CHECK(t->seq_rm(t->user, 0, -1, -1) == RCACHE_STATUS_CLOSED);
    CHECK(t->seq_cp(t->user, 0, 1, -1, -1) == RCACHE_STATUS_CLOSED);
    CHECK(t->seq_keep(t->user, 0) == RCACHE_STATUS_CLOSED);
    CHECK(t->seq_add(t->user, 0, -1, -1, 1) == RCACHE_STATUS_CLOSED);
    CHECK(t->seq_div(t->user, 0, -1, -1, 2) == RCACHE_STATUS_CLOSED);
    CHECK(t->seq_pos_min(t->user, 0, &pos) == RCACHE_STATUS_CLOSED);
    CHECK(t->seq_pos_max(t->user, 0, &pos) == RCACHE_STATUS_CLOSED);
    CHECK(t->clear(t->user, 1) == RCACHE_STATUS_CLOSED);
    CHECK(t->mark(t->user, 0) == RCACHE_STATUS_CLOSED);
    CHECK(t->set_replay(t->user, NULL, NULL) == RCACHE_STATUS_CLOSED);
    CHECK(t->get_can_shift(t->user) == RCACHE_STATUS_CLOSED);
    CHECK(t->info(t->user, &info) == RCACHE_STATUS_CLOSED);
    CHECK(t->r_tensor(t->user, 0, &tensor) == RCACHE_STATUS_CLOSED);
    CHECK(t->s_tensor(t->user, 0, &tensor) == RCACHE_STATUS_CLOSED);
    CHECK(t->state_write(t->user, NULL, -1, 0) == RCACHE_STATUS_CLOSED);
    CHECK(t->state_read(t->user, NULL, -1, 0) == RCACHE_STATUS_CLOSED);
    CHECK(t->last_error(t->user, text, sizeof(text)) >= 0);
    return 0;
}

int abi_run_closed(const struct rcache_vtable * t) {
    return closed(t, 0);
}

/* Keeps a table and calls it when the process ends, after Python has. */
static const struct rcache_vtable * open_table;
static int open_has_plan;

static void call_late(void) {
    const int line = closed(open_table, open_has_plan);
    open_table->destroy(open_table->user);
    printf("late calls: %s\n", line == 0 ? "closed" : "NOT closed");
    fflush(stdout);
}

int abi_call_at_exit(const struct rcache_vtable * table) {
    open_table = table;
    open_has_plan = table->s_copy(table->user, 0) >= 0;
    return atexit(call_late);
}

/* Calls for as long as the process lives, to be inside a call when Python ends. */
static void * call_forever(void * arg) {
    const struct rcache_vtable * t = arg;
    struct rcache_info info = { .struct_size = sizeof(info) };
    while (t->info(t->user, &info) == RCACHE_STATUS_OK) {
    }
    return NULL;
}

int abi_call_forever(const struct rcache_vtable * table, int n_threads) {
    for (int i = 0; i < n_threads; i++) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, call_forever, (void *) table) == 0);
        CHECK(pthread_detach(thread) == 0);
    }
    return 0;
}
