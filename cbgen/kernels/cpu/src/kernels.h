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
#else
#define THREAD 0
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

enum { KV_FLOAT32, KV_BFLOAT16, KV_INT8 };
enum { SILU, GELU_TANH };

#ifndef FETCH_LEVEL
#define FETCH_LEVEL 2
#endif

/* What comes after a piece of a weight is fetched while that is multiplied, evenly over all its blocks of rows: all at once
 * would fill the queue to memory and hold up everything. One step's worth, `bytes`, every so many steps. */
struct ahead {
    const char *at;
    int64_t every, bytes;
};
INLINE void fetch(struct ahead *ahead) {
    for (int64_t byte = 0; byte < ahead->bytes; byte += 64) __builtin_prefetch(ahead->at + byte, 0, FETCH_LEVEL);
    ahead->at += ahead->bytes;
}
/* Keys of so many tokens lie together, and so many numbers of the values of a page. */
#define TILE 16
/* The most pages that a split has. */
#define MAX_SPLIT 128

/* The weight [n, k] of a linear layer, packed: see linear.h for float32 and integer.h for integers. */
enum { WEIGHT_FLOAT32, WEIGHT_INTEGER };
struct weight {
    int64_t kind, n, k;
    const void *packed;
    const float *bias; /* [n] or null */
    /* Of integers alone: */
    int64_t bytes, limit;
    const float *scales, *scales_in; /* [n]; [k] or null */
    const int32_t *level_sums;       /* [n] */
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

/* Memory for the steps of a layer, for `rows` rows at least: wide [rows, gate and up and the gap], levels [rows, widest
   input] in int16, row_scales [rows]. */
struct workspace {
    float *normed, *wide, *inner;
    void *levels;
    float *row_scales;
};

/* The attention of one layer in one forward pass.

   A page of one layer: keys, values, and for int8 a scale for each token and head of both. `slots` is page_size rounded up
   to whole tiles, `padded_dim` is dim rounded up to whole tiles.

       keys          [kv_heads, slots / TILE, dim, TILE]
       values        [kv_heads, padded_dim / TILE, slots, TILE]        at byte `values`
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
