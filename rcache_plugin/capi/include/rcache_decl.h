/*
 * rcache: the C interface of the recurrent-state cache, ABI version 2.
 *
 * This file is read twice: by the C compiler (through rcache_plugin.h, which adds the include guards) and by cffi.
 * It therefore holds declarations only, no preprocessor lines.
 *
 * Words: a *cell* is room for one sequence's whole state; a *row* is the bytes of one cell in one layer's tensor; a
 * *slot* is the contiguous range of cells [head, head + n) that one ubatch works on; a *host* builds and computes the
 * graphs. docs/c-interface.md tells the order of calls and the rules of lifetime and threads.
 *
 * Two rules hold for every call:
 *  - it returns a status and never aborts, never throws and never jumps out; a negative status is an error, whose text
 *    is had from last_error; a positive one is an ordinary refusal, and nothing has changed;
 *  - the first argument is the `user` pointer found in the table.
 */

enum rcache_status {
    RCACHE_STATUS_OK            =  0,
    RCACHE_STATUS_NO_SLOT       =  1, /* the ubatch does not fit; nothing has changed */
    RCACHE_STATUS_REFUSED       =  2, /* seq_rm: that position can't be rolled back to; nothing has changed */
    RCACHE_STATUS_INVALID       = -1, /* the caller's mistake: an id, a range or a struct that can't be */
    RCACHE_STATUS_CLOSED        = -2, /* the cache is closed, was collected, or Python has ended */
    RCACHE_STATUS_ABI           = -3, /* abi_version or struct_size does not match */
    RCACHE_STATUS_ALLOC         = -4, /* out of memory, on the host or on a device */
    RCACHE_STATUS_BACKEND       = -5, /* a ggml call failed */
    RCACHE_STATUS_CORRUPT       = -6, /* an invariant of the table is broken: a bug of the cache */
    RCACHE_STATUS_IO            = -7, /* a reader or writer failed, or the data can't be a state */
    RCACHE_STATUS_UNSUPPORTED   = -8, /* this cache has no such operation */
    RCACHE_STATUS_EXCEPTION     = -9  /* Python code raised something else */
};

enum rcache_placement {
    RCACHE_PLACEMENT_CLASSIC = 0, /* llama.cpp's placement, cell for cell */
    RCACHE_PLACEMENT_COMPACT = 1  /* prefers free runs, so that bystanders are not copied */
};

enum rcache_spec_flags {
    /* A hybrid model: the host has more of a sequence than its state (an attention cache). A sequence then rolls back to
     * checkpoints of its own lineage only, because the attention cache has no other. */
    RCACHE_SPEC_HYBRID = 1
};

/* Replays `n_tokens` tokens into a sequence, from position pos0 on, without outputs; it calls prepare and find_slot itself.
 * The sequence ends at pos0 - 1, and whatever the host has beside the state is to be cut to that first. Returns
 * RCACHE_STATUS_OK, or anything else when it could not be done. */
typedef int32_t (*rcache_replay)(void * data, int32_t seq_id, int32_t pos0, const int32_t * tokens, uint32_t n_tokens);

/* What a cache is made from. Everything is read during create; no pointer is held. */
struct rcache_spec {
    uint32_t abi_version;          /* RCACHE_ABI_VERSION of the host */
    uint32_t struct_size;          /* sizeof(struct rcache_spec) */
    uint32_t n_cells;              /* cells, >= 1 */
    uint32_t n_seq_max;            /* sequence ids are 0 .. n_seq_max - 1; 0 means n_cells */
    uint32_t n_layer;              /* layers of the model */
    int32_t  type_r;               /* ggml_type of the r tensors; 0 is F32 */
    int32_t  type_s;               /* ggml_type of the s tensors */
    int32_t  placement;            /* enum rcache_placement */
    const uint32_t * n_embd_r;     /* [n_layer] elements of r in a cell; 0 in both: the layer keeps no state */
    const uint32_t * n_embd_s;     /* [n_layer] elements of s in a cell */
    void * const * buft;           /* [n_layer] ggml_backend_buffer_type_t; NULL, whole or by layer: the CPU's */
    const char * ggml_library;     /* path of libggml-base (or the folder of the ggml libraries); NULL: as found */
    const uint32_t * n_embd_p;     /* [n_layer] elements of p in a cell, a second conv history of type_r; NULL: none */
    uint32_t n_rs_seq;             /* snapshots of earlier tokens that the host's graphs write behind the rows: each
                                    * tensor then has (1 + n_rs_seq) * n_cells rows, see docs/c-interface.md */
    uint32_t checkpoint_cells;     /* cells for checkpoints, beyond n_cells; the tensors' rows count them */
    uint32_t flags;                /* enum rcache_spec_flags */
    uint32_t reserved;             /* 0 */
};

/* An equal-length micro-batch: n_seqs sequence sets, n_seq_tokens tokens of each, set after set. */
struct rcache_ubatch {
    uint32_t struct_size;             /* sizeof(struct rcache_ubatch) */
    uint32_t n_seqs;                  /* sequence sets, >= 1 */
    uint32_t n_seq_tokens;            /* tokens of each set, >= 1 */
    uint32_t reserved;                /* 0 */
    const int32_t * n_seq_id;         /* [n_seqs] ids in each set, >= 1 */
    const int32_t * const * seq_id;   /* [n_seqs][n_seq_id[s]]; [s][0] names the set; no id twice in a ubatch */
    const int32_t * pos;              /* [n_seqs * n_seq_tokens] token positions */
    const int32_t * token;            /* [n_seqs * n_seq_tokens] token ids, or NULL when the input is embeddings */
};

/* Where the ubatch works. The state of set s goes to row head + s; rows head + n_seqs .. head + n - 1 are bystanders
 * that the same gather moves or keeps. */
struct rcache_slot {
    uint32_t struct_size;          /* in: sizeof(struct rcache_slot) */
    int32_t  head;                 /* first cell */
    int32_t  n;                    /* cells, >= n_seqs */
    int32_t  rs_z;                 /* row that has to read as zeros before the gather, because new sequences copy from it
                                    * (nobody else needs it); -1: none. A cache with buffers has cleared it already */
};

struct rcache_info {
    uint32_t struct_size;          /* in: sizeof(struct rcache_info) */
    uint32_t size;                 /* cells; also the rows of each tensor */
    uint32_t used;                 /* cells with at least one sequence */
    uint32_t n_seq_max;
    uint32_t n_layer;
    int32_t  head;                 /* of the last slot, or where the next search starts */
    int32_t  n;                    /* of the last slot */
    int32_t  rs_z;                 /* of the last slot */
    uint64_t r_bytes;              /* all r tensors */
    uint64_t s_bytes;              /* all s tensors */
    uint64_t total_bytes;          /* all buffers, padding included */
};

enum rcache_io_flags {
    RCACHE_IO_ROWS_WAIT = 1        /* what read_tensor is asked for is done after state_read has returned OK, and not at
                                    * all if it fails: so rows of live states may be asked for before all is checked */
};

/* A stream of bytes, given by the host. Each call returns RCACHE_STATUS_OK or a negative status. */
struct rcache_io {
    uint32_t struct_size;          /* sizeof(struct rcache_io) */
    uint32_t flags;                /* enum rcache_io_flags; 0: read_tensor acts at once */
    void * user;                   /* first argument of each call */
    int32_t (*write)(void * user, const void * src, uint64_t n_bytes);
    int32_t (*read)(void * user, void * dst, uint64_t n_bytes);
    /* (optional) NULL: the cache copies through host memory and calls write / read. Each stands for the same bytes of the
     * stream, which go from or to the tensor instead. Unless rows wait, read_tensor is called before all of a state has
     * been checked only where the rows hold no state; if the state then turns out to be wrong, nothing refers to them. */
    int32_t (*write_tensor)(void * user, void * tensor, uint64_t offset, uint64_t n_bytes);
    int32_t (*read_tensor)(void * user, void * tensor, uint64_t offset, uint64_t n_bytes);
};

/*
 * The table of operations of one cache. The memory of the table stays valid until `destroy` was called, even when the
 * cache behind it is gone: then each call answers RCACHE_STATUS_CLOSED.
 */
struct rcache_vtable {
    uint32_t abi_version;          /* RCACHE_ABI_VERSION; a host refuses any other */
    uint32_t struct_size;          /* sizeof(struct rcache_vtable) as the cache knows it, >= what the host knows */
    void * user;                   /* first argument of each call */

    /* Verifies that the ubatches fit, one after the other, and leaves no trace. The find_slot calls that follow, for the
     * same ubatches in the same order, take the plans made here. NO_SLOT: one does not fit. */
    int32_t (*prepare)(void * user, const struct rcache_ubatch * ubatches, uint32_t n_ubatches);

    /* Finds a slot, commits it and publishes its plan. Positions and sequences of the cells change here, the host's
     * graph then moves the rows. */
    int32_t (*find_slot)(void * user, const struct rcache_ubatch * ubatch, struct rcache_slot * slot);

    /* Of the plan that the last find_slot published; i in [0, n). Neither changes anything.
     * s_copy: the row that destination row head + i reads from; a new sequence reads rs_z. -1: no plan, or i outside.
     * s_mask: 1.0 keep, 0.0 start from zero (older hosts multiply by it). NaN: no plan, or i outside. */
    int32_t (*s_copy)(void * user, int32_t i);
    float   (*s_mask)(void * user, int32_t i);

    /* The graph that was to work on the last slot failed. Sequences whose row it may have half written lose their states:
     * they are empty, and refuse a step above position 0 until they were removed or rolled back (seq_rm). */
    int32_t (*discard_slot)(void * user);

    /* Positions are half open, [p0, p1); p0 < 0 is 0, p1 < 0 is the end. seq_rm of the end of a sequence rolls it
     * back: to the nearest checkpoint, and by a replay of the tokens from there on, if the host has set one. */
    int32_t (*seq_rm)(void * user, int32_t seq_id, int32_t p0, int32_t p1); /* seq_id < 0: every sequence */
    int32_t (*seq_cp)(void * user, int32_t seq_id_src, int32_t seq_id_dst, int32_t p0, int32_t p1);
    int32_t (*seq_keep)(void * user, int32_t seq_id);
    int32_t (*seq_add)(void * user, int32_t seq_id, int32_t p0, int32_t p1, int32_t shift);
    int32_t (*seq_div)(void * user, int32_t seq_id, int32_t p0, int32_t p1, int32_t d);
    int32_t (*seq_pos_min)(void * user, int32_t seq_id, int32_t * pos); /* -1: the sequence is empty */
    int32_t (*seq_pos_max)(void * user, int32_t seq_id, int32_t * pos);

    /* data != 0 also sets every row to zero, and ends all checkpoints. */
    int32_t (*clear)(void * user, int32_t data);

    /* 1: positions may be shifted (seq_add); 0: no. */
    int32_t (*get_can_shift)(void * user);

    int32_t (*info)(void * user, struct rcache_info * info);

    /* ggml_tensor * of a layer, [n_embd, size]; NULL in *tensor: the layer keeps no such state. */
    int32_t (*r_tensor)(void * user, int32_t il, void ** tensor);
    int32_t (*s_tensor)(void * user, int32_t il, void ** tensor);
    int32_t (*p_tensor)(void * user, int32_t il, void ** tensor);

    /* seq_id < 0: the whole cache. flags: llama.cpp's; with 2 (on device) rows pass through write_tensor and read_tensor
     * only and are no part of the stream, and reading calls read_tensor after the whole stream has been checked. On
     * failure the cache is what it was. */
    int32_t (*state_write)(void * user, const struct rcache_io * io, int32_t seq_id, uint32_t flags);
    int32_t (*state_read)(void * user, const struct rcache_io * io, int32_t seq_id, uint32_t flags);

    /* The text of this cache's last error, cut to n_buf - 1 bytes and ended by 0. Returns the bytes that the whole text
     * takes without the 0; 0: no error yet. */
    int32_t (*last_error)(void * user, char * buf, uint32_t n_buf);

    /* The host will not call again: `user` and the table are freed (now, or when Python lets go of them). */
    void (*destroy)(void * user);

    /* How the host replays tokens; NULL: not at all. `data` is its first argument. */
    int32_t (*set_replay)(void * user, rcache_replay replay, void * data);

    /* Makes a checkpoint of a sequence as it is: a place to roll back to. It may be evicted for later ones. REFUSED: there
     * is no cell for it. */
    int32_t (*mark)(void * user, int32_t seq_id);
};

/* How a host makes caches. Valid for the lifetime of the process. */
struct rcache_factory {
    uint32_t abi_version;
    uint32_t struct_size;          /* sizeof(struct rcache_factory) */
    void * user;                   /* first argument of each call */

    /* On RCACHE_STATUS_OK *table is a new cache's table, owned by the caller until destroy. */
    int32_t (*create)(void * user, const struct rcache_spec * spec, const struct rcache_vtable ** table);

    /* As in the table: the text of the last error of create on this thread. */
    int32_t (*last_error)(void * user, char * buf, uint32_t n_buf);
};
