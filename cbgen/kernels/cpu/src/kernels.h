/* What the caller and the kernels agree on. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#define THREAD omp_get_thread_num()
#define THREADS omp_get_max_threads()
#else
#define THREAD 0
#define THREADS 1
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

enum { KV_FLOAT32, KV_BFLOAT16, KV_INT8, KEYS_INT8 }; /* the last: keys in pages of int8, see attention.h */
enum { SILU, GELU_TANH };

/* What comes after a piece of a weight is fetched while that is multiplied, evenly over all its blocks of rows: all at once
 * would fill the queue to memory and hold up everything. One step's worth, `bytes`, every so many steps. */
struct ahead {
    const char *at;
    int64_t every, bytes;
};
INLINE void fetch(struct ahead *ahead) {
    for (int64_t byte = 0; byte < ahead->bytes; byte += 64) __builtin_prefetch(ahead->at + byte, 0, 2);
    ahead->at += ahead->bytes;
}

/* Items 0 to n dealt to the threads in runs. A thread goes up through its own, so that it knows what comes next, and then
   takes the last ones of others:

       thread 0   0 1 2 3 4 .   thread 1   . . 8 9 10 11
                  ----->    <--            ----->

   runs [threads * RUN]: the next item and the end of each run, in one number that changes at once; a line of the cache each. */
#define RUN 8
INLINE void deal(uint64_t *runs, int64_t threads, int64_t items) {
    for (int64_t t = 0; t < threads; t++) runs[t * RUN] = (uint64_t)(items * t / threads) << 32 | (uint64_t)(items * (t + 1) / threads);
}

/* An item that nobody else has, or -1. */
INLINE int64_t take_item(uint64_t *runs, int64_t threads, int64_t own) {
    for (int64_t other = 0; other < threads; other++) {
        uint64_t *run = runs + (own + other) % threads * RUN, seen = __atomic_load_n(run, __ATOMIC_RELAXED);
        while (seen >> 32 < (seen & UINT32_MAX)) {
            uint64_t left = other ? seen - 1 : seen + (1ull << 32);
            if (__atomic_compare_exchange_n(run, &seen, left, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
                return other ? left & UINT32_MAX : seen >> 32;
        }
    }
    return -1;
}

/* Rows of x that pass over a panel, the depth of a piece of it in float32 and in integers, and how many panels are worked on
 * at once: rows and pieces that stay in the caches near a core. */
#define M_BLOCK 96
#define K_BLOCK 576
#define INTEGER_K_BLOCK 2048
#define CHUNK 4

/* The rows of a product in blocks of at most M_BLOCK, its panels in chunks of a few. */
struct grid {
    int64_t blocks, chunk, chunks;
};
INLINE struct grid grid_of(int64_t rows, int64_t panels) {
    int64_t chunk = panels / (8 * THREADS);
    chunk = chunk < 1 ? 1 : chunk > CHUNK ? CHUNK : chunk;
    return (struct grid){(rows + M_BLOCK - 1) / M_BLOCK, chunk, (panels + chunk - 1) / chunk};
}

/* Where part `i` of `parts` equal ones begins. */
INLINE int64_t part_begin(int64_t i, int64_t parts, int64_t count) { return count * i / parts; }

/* Which of `all` equal parts of some work this is: `count` from `first` on. */
struct share {
    int64_t first, count, all;
};

/* Keys of so many tokens lie together, and so many numbers of the values of a page. */
#define TILE 16
/* The most pages that a split has. */
#define MAX_SPLIT 128

/* Numbers of a row of x in 8 bits that share a scale. */
#define GROUP 32

/* The weight [n, k] of a linear layer, packed: in float32 (linear.h), or in int8 for x of 16 (integer.h) or 8 bits
   (grouped.h). */
enum { WEIGHT_FLOAT32, WEIGHT_WORDS, WEIGHT_BYTES };
struct weight {
    int64_t kind, n, k;
    const void *packed;
    const float *bias; /* [n] or null */
    /* Of integers alone; limit: the largest level of x, of words. */
    int64_t limit;
    const float *scales, *scales_in; /* [n]; [k], by which x is multiplied, or null */
};

/* A decoder layer around its attention: norm, projections, rotary embedding; output projection, norm, gated MLP.

       x ---> norm -> q, k, v -> (norm of heads) -> rotate ---> attention -> o -> + -> norm -> gate, up -> down -> +
         \____________________________________________________________________/  \_____________________________/

   A null norm of heads is none. Rotation turns the first `rotary` numbers of each head of q and k, the first half of them
   against the second. */
struct layer {
    int64_t heads, kv_heads, dim, rotary, activation;
    const float *input_norm, *query_norm, *key_norm, *mlp_norm;
    float input_epsilon, head_epsilon, mlp_epsilon;
    const struct weight *qkv, *out, *gate_up, *down;
};

/* Rows of the widest product lie so many floats apart, lest they be a multiple of 4096 bytes apart: see linear_panel_rows. */
#define WIDE_GAP 16

/* Memory for the steps of a layer, for `rows` rows at least: wide [rows, gate and up and the gap], qkv [rows, heads + 2 *
   kv_heads, dim], attended [rows, heads, dim], levels: rows as the widest of the weights reads them. */
struct workspace {
    float *normed, *wide, *inner, *qkv, *attended;
    char *levels;
};

/* The attention of one layer in one forward pass.

   A page of one layer: keys, values, and for int8 a scale for each token and head of both. `slots` is page_size rounded up
   to whole tiles, `padded_dim` is dim rounded up to whole tiles.

       keys          [kv_heads, slots / TILE, dim, TILE]
         in int8     [kv_heads, slots / TILE, key_dim / 4, TILE, 4]    key_dim: dim rounded up to a multiple of 4
       values        [kv_heads, padded_dim / TILE, slots, TILE]        at byte `values`
         in int8     [kv_heads, padded_dim / TILE, slots / 2, TILE, 2]
       key scales    float32 [kv_heads, slots]                         at byte `key_scales`
       value scales  float32 [kv_heads, slots]                         at byte `value_scales`

   Query tokens are numbered as they lie in `query`. `tokens` lists them request after request, `starts` [requests + 1]
   says where each request begins in it; `positions` says where in its request a token is. Row r of `tables` begins with
   the page of token table_firsts[r].

   items         [n, 5]  request, from where to where in `tokens`, and from which to which KV head: rows attended together
   prefix_items  [n, 4]  a request whose table begins with the prefix, from where to where in `prefix_tokens`, and how many
                         splits the prefix has; the results wait in `prefix_states` [tokens, heads, padded_dim + 2]
   single_items  [n, 3]  request, split, and where in `split_states` the rows of that split wait
   prefix_splits [requests], splits of each that its group works out; split_places [requests], where its first single split
   waits, those after it following; -1: it has none. */
struct attention {
    const char *pages;
    int64_t page_bytes, page_size, slots, kv_heads, group, dim, padded_dim, kind;
    int64_t values, key_scales, value_scales;
    int64_t split_pages, window, max_rows;
    float scaling, softcap;
    const float *sinks;
    const float *query;
    int64_t query_token, query_head;
    float *out;
    int64_t out_token, out_head;
    const int64_t *tables, *table_firsts;
    int64_t table_width;
    const int64_t *tokens, *starts, *positions;
    const int64_t *prefix_splits, *split_places;
    const int64_t *items, *prefix_items, *prefix_tokens, *single_items;
    int64_t num_items, num_prefix_items, num_single_items;
    float *prefix_states, *split_states;
    char *scratch;
    int64_t scratch_bytes;
};
