/* Attention over pages, for one layer. See struct attention in kernels.h.

   One work item is a KV head, or several for few rows, up to ROW_TILE rows (query tokens x the query heads that share a KV
   head) and some tokens of KV. KV is cut at fixed places, every `split_pages` pages from token 0 on, and each piece, a
   split, is attended by itself: scores, their softmax, the weighted sum of values. What comes out is folded in ascending
   order:

       split 0      split 1      split 2
       (m, l, O) -> (m, l, O) -> (m, l, O) -> O / l           m: largest score, l: sum of exp(score - m), O: sum of values

   So it does not matter to a single bit who works a split out: first come the prefixes that several requests share,
   attended by the rows of all of them at once, and single splits of long requests when there are few; then every request
   goes on from there.

   KV in int8 is multiplied in integers: a row of queries becomes levels of 8 bits, and the weights of a row in a split levels
   of 16 bits, since most of them are far smaller than the largest; sums of products with levels of KV are then exact. What
   both products go through are words: a number of float32 or bfloat16, or neighbours along the sum in int8, four of keys
   (unsigned, 128 added, see grouped.h) and two of values. */

struct CBGEN(scratch) {
    float *query;   /* [rows, query_words]: scaled, or for int8 levels, their scale, and what a sum with them starts from */
    float *scores;  /* [rows, split slots]: scores, then weights, for int8 as levels in the first half of a row */
    float *factors; /* [rows]: for int8, what a level of a weight stands for */
    float *part;    /* [rows, padded_dim]: of one split */
    float *state;   /* [rows, padded_dim]: folded so far */
    float *tile;    /* keys of one page, or values of one split, of one head in float32 */
    float *part_max, *part_sum, *state_max, *state_sum; /* [rows] */
    int64_t *low, *high; /* [rows]: the tokens that a row sees, high excluded */
};

/* How keys are multiplied; values are as their pages say. */
INLINE int CBGEN(key_kind)(const struct attention *a) { return a->kind == KV_INT8 ? KEYS_INT8 : (int)a->kind; }
/* Bytes of a word in a page, and how many words a sum over `count` numbers goes through. */
INLINE long CBGEN(word_bytes)(const int kind) { return kind == KV_FLOAT32 || kind == KEYS_INT8 ? 4 : 2; }
INLINE long CBGEN(words)(const int kind, long count) {
    return kind == KEYS_INT8 ? CBGEN(depth_of)(count) / 4 : kind == KV_INT8 ? count / 2 : count;
}
INLINE long CBGEN(key_words)(const struct attention *a) { return CBGEN(words)(CBGEN(key_kind)(a), a->dim); }
INLINE long CBGEN(key_bytes)(const struct attention *a) { /* of one head of a page */
    return a->slots * CBGEN(key_words)(a) * CBGEN(word_bytes)(CBGEN(key_kind)(a));
}
INLINE long CBGEN(value_bytes)(const struct attention *a) {
    return a->padded_dim * CBGEN(words)(a->kind, a->slots) * CBGEN(word_bytes)(a->kind);
}
/* Words of a row of queries. */
INLINE long CBGEN(query_words)(const struct attention *a) { return CBGEN(key_words)(a) + (a->kind == KV_INT8 ? 2 : 0); }

/* LANES words of a page, from word i of `from` on, as wide as they are multiplied. */
INLINE vf CBGEN(load_kv)(const int kind, const char *from, long i) {
    if (kind == KV_FLOAT32 || kind == KEYS_INT8) return CBGEN(load)((const float *)from + i);
    if (kind == KV_INT8) return (vf)CBGEN(widen)((const int8_t *)from + 2 * i);
    vu16 half;
    memcpy(&half, (const uint16_t *)from + i, sizeof half);
    return (vf)(__builtin_convertvector(half, vi) << 16);
}

INLINE vf CBGEN(multiply_add)(const int kind, vf sums, vf left, vf right) {
    if (kind == KEYS_INT8) return (vf)CBGEN(quads)((vi)sums, (vi)right, (vi)left);
    return kind == KV_INT8 ? (vf)CBGEN(pairs)((vi)sums, (vi)left, (vi)right) : sums + left * right;
}

/* The word at p in every lane. */
INLINE vf CBGEN(splat_word)(const float *p) {
    int32_t word;
    memcpy(&word, p, 4);
    return (vf)((vi){0} + word);
}

/* Part of a sum: `k` steps over words `a` on of the left factor and over rows of words of the right one, from `b` on.
 * Meanwhile `fetched` bytes from `next` on are fetched, evenly: what the phase after this one reads. */
struct CBGEN(piece) {
    const char *b;
    long a, k;
    const char *next;
    long fetched;
};
/* So many steps pass between two fetches. */
#define FETCH_STEPS 8

/* One step of k. What there is more of, rows or vectors, is not held in registers. */
INLINE void CBGEN(step)(const int kind, const int rows, const int wide, const float *a, long lda, const char *b, long from,
                        const long *at, vf sums[ROWS][2 * VECTORS]) {
    if (rows < wide) {
        vf left[ROWS];
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) left[r] = CBGEN(splat_word)(a + r * lda);
#pragma GCC unroll 4
        for (int v = 0; v < wide; v++) {
            vf right = CBGEN(load_kv)(kind, b, from + at[v]);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) sums[r][v] = CBGEN(multiply_add)(kind, sums[r][v], left[r], right);
        }
    } else {
        vf right[2 * VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < wide; v++) right[v] = CBGEN(load_kv)(kind, b, from + at[v]);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            vf left = CBGEN(splat_word)(a + r * lda);
#pragma GCC unroll 4
            for (int v = 0; v < wide; v++) sums[r][v] = CBGEN(multiply_add)(kind, sums[r][v], left, right[v]);
        }
    }
}

/* out [rows, `wide` vectors] = the sum over all pieces of a [rows, k] times b [k, wide vectors], whose vector v of step i
 * is at word i * step + at[v]. Only the first `vectors` of them are stored, for int8 as integers. */
INLINE void CBGEN(product_tile)(const int kind, const int rows, const int wide, const float *a, long lda,
                                const struct CBGEN(piece) *pieces, long num_pieces, long step, const long *at, int vectors,
                                struct share share, float *out, long ldo) {
    vf sums[ROWS][2 * VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < wide; v++) sums[r][v] = (vf){0};
    for (long p = 0; p < num_pieces; p++) {
        const float *own = a + pieces[p].a;
        const char *b = pieces[p].b;
        long k = pieces[p].k, fetched = pieces[p].fetched * share.count / share.all * FETCH_STEPS / k;
        const char *next = pieces[p].next + pieces[p].fetched * share.first / share.all;
        for (long begin = 0; begin < k; begin += FETCH_STEPS, next += fetched) {
            long end = begin + FETCH_STEPS < k ? begin + FETCH_STEPS : k;
            for (long byte = 0; byte < fetched; byte += 64) __builtin_prefetch(next + byte, 0, 2);
            for (long i = begin; i < end; i++) CBGEN(step)(kind, rows, wide, own + i, lda, b, i * step, at, sums);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < wide; v++)
            if (v < vectors) CBGEN(put)(out + r * ldo + v * LANES, sums[r][v]);
}

INLINE void CBGEN(product_rows)(const int kind, long rows, int wide, const float *a, long lda,
                                const struct CBGEN(piece) *pieces, long num_pieces, long step, const long *at, int vectors,
                                struct share share, float *out, long ldo) {
#define TILE_OF(n, w) \
    case n: CBGEN(product_tile)(kind, n, w, a, lda, pieces, num_pieces, step, at, vectors, share, out, ldo); return;
#define WIDE(n) TILE_OF(n, 2 * VECTORS)
#define NARROW(n) TILE_OF(n, VECTORS)
    if (wide)
        switch (rows) { UP_TO_HALF(WIDE) }
    switch (rows) { UP_TO_ROWS(NARROW) }
#undef TILE_OF
#undef WIDE
#undef NARROW
}

/* out [rows, vectors] as product_tile says, for any number of rows and vectors; at [vectors + 2 * VECTORS]. Few rows
 * take more vectors at once, lest every sum wait for the one before. Every element is summed in ascending order of k. */
static void CBGEN(product)(int kind, long rows, const float *a, long lda, const struct CBGEN(piece) *pieces, long num_pieces,
                           long step, const long *at, long vectors, float *out, long ldo) {
    int most = 2 * rows <= ROWS ? 2 * VECTORS : VECTORS;
    for (long v = 0; v < vectors; v += most) {
        long count = vectors - v < most ? vectors - v : most;
        int wide = count > VECTORS;
        for (long r = 0; r < rows; r += ROWS) {
            long block = rows - r < ROWS ? rows - r : ROWS;
            struct share share = {v, r ? 0 : count, vectors};
            float *to = out + r * ldo + v * LANES;
#define WITH(k) \
    CBGEN(product_rows)(k, block, wide, a + r * lda, lda, pieces, num_pieces, step, at + v, count, share, to, ldo)
            if (kind == KV_FLOAT32) WITH(KV_FLOAT32);
            else if (kind == KV_BFLOAT16) WITH(KV_BFLOAT16);
            else if (kind == KEYS_INT8) WITH(KEYS_INT8);
            else WITH(KV_INT8);
#undef WITH
        }
    }
}

/* `count` words of bfloat16, a multiple of LANES, as float32. */
static const char *CBGEN(as_float)(const char *from, long count, float *to) {
    for (long i = 0; i < count; i += LANES) CBGEN(put)(to + i, CBGEN(load_kv)(KV_BFLOAT16, from, i));
    return (const char *)to;
}

/* Whether so many rows are worth a copy of what they read in float32. */
INLINE int CBGEN(copies)(const struct attention *a, long rows) { return a->kind == KV_BFLOAT16 && rows > ROWS; }

/* The most vectors of one row of a product: of the slots of a page, or of a head. */
#define MAX_VECTORS 64

/* A query [dim] -> levels of 8 bits, their scale, and -128 times their sum. One with NaN or infinity has NaN for its scale. */
static void CBGEN(query_levels)(const struct attention *a, const float *from, float *to) {
    long depth = CBGEN(depth_of)(a->dim);
    float largest = CBGEN(largest_size)(from, 0, a->dim);
    vf inverse = CBGEN(splat)(CBGEN(level_factor)(largest, 127));
    vi total = {0};
    for (long i = 0; i < depth; i += LANES) {
        vi whole = largest == largest ? CBGEN(round)(CBGEN(scaled_input)(from, 0, i, a->dim) * inverse) : (vi){0};
        vu8 narrow = __builtin_convertvector(whole, vu8);
        memcpy((char *)to + i, &narrow, depth - i < LANES ? depth - i : LANES);
        total += whole;
    }
    int32_t start = -128 * CBGEN(sum_int)(total);
    to[depth / 4] = largest / 127 * a->scaling;
    memcpy(to + depth / 4 + 1, &start, 4);
}

/* Scores from sums of products of levels, with the scales of keys [slots]. */
INLINE void CBGEN(scale_scores)(const struct attention *a, const float *query, const float *scales, float *scores) {
    const float *last = query + CBGEN(key_words)(a);
    vf own = CBGEN(splat_word)(last), start = CBGEN(splat_word)(last + 1);
    for (long i = 0; i < a->slots; i += LANES) {
        vi sum = CBGEN(load_int)(scores + i) + (vi)start;
        CBGEN(put)(scores + i, __builtin_convertvector(sum, vf) * own * CBGEN(load)(scales + i));
    }
}

/* scores [rows, slots] of the places of one page. */
static void CBGEN(page_scores)(const struct attention *a, const char *page, long head, long rows, struct CBGEN(scratch) *s,
                               const float *query, float *scores, long ld) {
    long words = CBGEN(key_words)(a), width = CBGEN(query_words)(a), values = CBGEN(value_bytes)(a);
    struct CBGEN(piece) piece = {page + head * CBGEN(key_bytes)(a), 0, words, page + a->values + head * values, values};
    int kind = CBGEN(key_kind)(a);
    if (CBGEN(copies)(a, rows)) piece.b = CBGEN(as_float)(piece.b, a->slots * words, s->tile), kind = KV_FLOAT32;
    for (long slot = 0; slot < a->slots; slot += MAX_VECTORS * LANES) {
        long at[MAX_VECTORS + 2 * VECTORS], most = MAX_VECTORS * LANES;
        long slots = a->slots - slot < most ? a->slots - slot : most;
        for (long v = 0; v < slots / LANES + 2 * VECTORS; v++) {
            long own = v < slots / LANES ? slot + v * LANES : slot;
            at[v] = own / TILE * TILE * words + own % TILE;
        }
        CBGEN(product)(kind, rows, query, width, &piece, 1, TILE, at, slots / LANES, scores + slot, ld);
    }
    const float *scales = (const float *)(page + a->key_scales) + head * a->slots;
    for (long r = 0; kind == KEYS_INT8 && r < rows; r++) CBGEN(scale_scores)(a, query + r * width, scales, scores + r * ld);
}

/* Weights [pages, slots] of one row times the scales of their values become levels of 16 bits in their place; gives what a
 * level stands for. A place of weight 0 may hold anything. */
static float CBGEN(weight_levels)(const struct attention *a, const int64_t *pages, long num_pages, long head, float *weights) {
    const long most_levels = INT32_MAX / 127 / (a->split_pages * a->slots);
    const float limit = most_levels < INT16_MAX ? most_levels : INT16_MAX;
    vf most = {0}, strange = {0};
    for (long p = 0; p < num_pages; p++) {
        const float *scales = (const float *)(a->pages + pages[p] * a->page_bytes + a->value_scales) + head * a->slots;
        for (long i = 0; i < a->slots; i += LANES) {
            vf weight = CBGEN(load)(weights + p * a->slots + i);
            vf scaled = CBGEN(choose)(weight == 0.0f, weight, weight * CBGEN(load)(scales + i));
            CBGEN(put)(weights + p * a->slots + i, scaled);
            most = CBGEN(max)(scaled, most);
            strange += scaled * 0;
        }
    }
    float largest = CBGEN(sum)(strange) == 0 ? CBGEN(largest)(most) : NAN;
    vf inverse = CBGEN(splat)(CBGEN(level_factor)(largest, limit));
    for (long i = 0; i < num_pages * a->slots; i += LANES) {
        vf scaled = CBGEN(load)(weights + i);
        CBGEN(put_levels)((int16_t *)weights + i, largest == largest ? CBGEN(round)(scaled * inverse) : (vi){0});
    }
    return largest / limit;
}

/* part [rows, padded_dim] = weights [rows, split slots] times the values of one split: tokens `from` to `to` of it. The
 * keys of the first `num_next` pages of the next split are fetched. */
static void CBGEN(split_values)(const struct attention *a, const int64_t *pages, long head, long from, long to, long rows,
                                const int64_t *next, long num_next, struct CBGEN(scratch) *s, const float *weights, long ld,
                                const float *factors, float *part) {
    long width = a->padded_dim, bytes = CBGEN(word_bytes)(a->kind), count = 0, copies = CBGEN(copies)(a, rows);
    long words = CBGEN(words)(a->kind, a->slots), each = a->slots / words; /* words of a column of a page, tokens of each */
    long keys = CBGEN(key_bytes)(a);
    int kind = copies ? KV_FLOAT32 : (int)a->kind;
    struct CBGEN(piece) pieces[MAX_SPLIT];
    float *copy = s->tile;
    for (long first = from / a->page_size * a->page_size; first < to; first += a->page_size, count++) {
        long p = first / a->page_size, begin = first < from ? (from - first) / each : 0;
        long end = to - first < a->page_size ? to - first : a->page_size;
        const char *page = a->pages + pages[p] * a->page_bytes;
        const char *values = page + a->values + head * words * width * bytes;
        if (copies) values = CBGEN(as_float)(values, words * width, copy), copy += words * width;
        values += begin * TILE * CBGEN(word_bytes)(kind);
        pieces[count] = (struct CBGEN(piece)){values, p * words + begin, (end + each - 1) / each - begin, page, 0};
        if (count < num_next) {
            pieces[count].next = a->pages + next[count] * a->page_bytes + head * keys;
            pieces[count].fetched = keys;
        }
    }
    for (long column = 0; column < width; column += MAX_VECTORS * LANES) {
        long at[MAX_VECTORS + 2 * VECTORS], most = MAX_VECTORS * LANES;
        long columns = width - column < most ? width - column : most;
        for (long v = 0; v < columns / LANES + 2 * VECTORS; v++) {
            long own = v < columns / LANES ? column + v * LANES : column;
            at[v] = own / TILE * words * TILE + own % TILE;
        }
        CBGEN(product)(kind, rows, weights, ld, pieces, count, TILE, at, columns / LANES, part + column, width);
    }
    for (long r = 0; kind == KV_INT8 && r < rows; r++)
        for (long i = 0; i < width; i += LANES) {
            float *own = part + r * width + i;
            CBGEN(put)(own, __builtin_convertvector(CBGEN(load_int)(own), vf) * factors[r]);
        }
}

/* scores [slots], of which only `low` to `high` are visible and seen, become weights; their sum and largest score. */
INLINE void CBGEN(softmax_row)(const struct attention *a, float *scores, long slots, float *largest, float *sum) {
    vf best = CBGEN(splat)(-INFINITY), total = {0};
    if (a->softcap > 0)
        for (long i = 0; i < slots; i += LANES) {
            vf x = CBGEN(load)(scores + i);
            vf capped = a->softcap * CBGEN(tanh)(x / a->softcap);
            CBGEN(put)(scores + i, CBGEN(choose)(x == -INFINITY, x, capped));
        }
    for (long i = 0; i < slots; i += LANES) best = CBGEN(max)(CBGEN(load)(scores + i), best);
    *largest = CBGEN(largest)(best);
    /* Nothing visible: everything is -inf, or NaN, which passes through. */
    vf shift = CBGEN(splat)(*largest == -INFINITY ? 0.0f : *largest);
    for (long i = 0; i < slots; i += LANES) {
        vf weight = CBGEN(exp_below)(CBGEN(load)(scores + i) - shift);
        CBGEN(put)(scores + i, weight);
        total += weight;
    }
    *sum = CBGEN(sum)(total);
}

/* Hides the places of a split that a row does not see. `tokens` of each page are in use, `slots` have a place. */
INLINE void CBGEN(hide)(const struct attention *a, float *scores, long first_token, long pages, int64_t low, int64_t high) {
    for (long p = 0; p < pages; p++) {
        int64_t start = first_token + p * a->page_size;
        float *own = scores + p * a->slots;
        if (low <= start && start + a->page_size <= high && a->slots == a->page_size) continue;
        for (long i = 0; i < a->slots; i++)
            if (i >= a->page_size || start + i < low || start + i >= high) own[i] = -INFINITY;
    }
}

/* The keys of one head of a page that is not read by what was fetched before. */
INLINE void CBGEN(fetch_keys)(const struct attention *a, const char *page, long head) {
    long bytes = CBGEN(key_bytes)(a);
    for (long byte = 0; byte < bytes; byte += 64) __builtin_prefetch(page + head * bytes + byte, 0, 2);
}

/* One split of one table for `heads` KV heads from `head` on, `rows` rows each: part, part_max and part_sum of the scratch.
 *
 * Pages lie anywhere, so that the processor does not guess which comes next. Each phase fetches what the next one reads:
 *
 *     scores of split 0        values of split 0        scores of split 1
 *     its values               keys of split 1          its values
 */
static void CBGEN(attend_split)(const struct attention *a, const int64_t *table, int64_t table_first, int64_t split, int first,
                                long head, long heads, long rows, struct CBGEN(scratch) *s) {
    int64_t split_tokens = a->split_pages * a->page_size, low = INT64_MAX, high = 0;
    for (long r = 0; r < rows; r++) {
        low = s->low[r] < low ? s->low[r] : low;
        high = s->high[r] > high ? s->high[r] : high;
    }
    int64_t begin = split * split_tokens, end = begin + split_tokens;
    if (low > begin) begin = low / a->page_size * a->page_size;
    if (high < end) end = high;
    long pages = end > begin ? (end - begin + a->page_size - 1) / a->page_size : 0;
    long ld = a->split_pages * a->slots;
    const int64_t *own = table + (begin - table_first) / a->page_size;
    for (long p = 0; p < pages; p++) {
        const char *page = a->pages + own[p] * a->page_bytes;
        for (long h = 0; h < heads; h++) {
            if (first && h + 1 < heads) CBGEN(fetch_keys)(a, page, head + h + 1);
            else if (first && p + 1 < pages) CBGEN(fetch_keys)(a, a->pages + own[p + 1] * a->page_bytes, head);
            CBGEN(page_scores)(a, page, head + h, rows, s, s->query + h * rows * CBGEN(query_words)(a),
                               s->scores + h * rows * ld + p * a->slots, ld);
        }
    }
    for (long r = 0; r < heads * rows; r++) {
        CBGEN(hide)(a, s->scores + r * ld, begin, pages, s->low[r % rows], s->high[r % rows]);
        CBGEN(softmax_row)(a, s->scores + r * ld, pages * a->slots, s->part_max + r, s->part_sum + r);
        if (a->kind == KV_INT8) s->factors[r] = CBGEN(weight_levels)(a, own, pages, head + r / rows, s->scores + r * ld);
    }
    int64_t next = high - (split + 1) * split_tokens;
    long num_next = next > 0 ? (next + a->page_size - 1) / a->page_size : 0;
    for (long h = 0; h < heads; h++)
        CBGEN(split_values)(a, own, head + h, low > begin ? low - begin : 0, end - begin, rows, own + pages, num_next, s,
                            s->scores + h * rows * ld, ld, s->factors + h * rows, s->part + h * rows * a->padded_dim);
}

/* Folds a split into the state of one row; both [padded_dim]. */
INLINE void CBGEN(fold)(long width, float *state, float *state_max, float *state_sum, const float *part, float part_max,
                        float part_sum) {
    if (part_sum == 0) return; /* nothing visible; the sum of a row with NaN is NaN, which is not 0 */
    if (*state_sum == 0) {
        memcpy(state, part, width * sizeof(float));
        *state_max = part_max, *state_sum = part_sum;
        return;
    }
    float best = part_max > *state_max ? part_max : *state_max, other = part_max > *state_max ? *state_max : part_max;
    float less = expf(other - best), old = part_max > *state_max ? less : 1, new = part_max > *state_max ? 1 : less;
    for (long i = 0; i < width; i += LANES) /* a multiple of TILE */
        CBGEN(put)(state + i, CBGEN(load)(state + i) * old + CBGEN(load)(part + i) * new);
    *state_sum = *state_sum * old + part_sum * new, *state_max = best;
}

/* Nothing is folded yet: if all scores of a row are -inf, it stays so. */
INLINE void CBGEN(clear)(const struct attention *a, long rows, struct CBGEN(scratch) *s) {
    memset(s->state, 0, rows * a->padded_dim * sizeof(float));
    for (long r = 0; r < rows; r++) s->state_sum[r] = 0, s->state_max[r] = -INFINITY;
}

/* Row r of an item for one KV head is query head `head * group + r % group` of the query token `tokens[r / group]`; the
 * rows of further KV heads come after it. */
INLINE void CBGEN(load_rows)(const struct attention *a, const int64_t *tokens, long num_tokens, long head, long heads,
                             struct CBGEN(scratch) *s) {
    const long width = CBGEN(query_words)(a);
    float *to = s->query;
    for (long h = head; h < head + heads; h++)
        for (long t = 0; t < num_tokens; t++)
            for (long g = 0; g < a->group; g++, to += width) {
                const float *from = a->query + tokens[t] * a->query_token + (h * a->group + g) * a->query_head;
                if (a->kind == KV_INT8) CBGEN(query_levels)(a, from, to);
                else
                    for (long i = 0; i < a->dim; i++) to[i] = from[i] * a->scaling;
            }
}

/* The place where the state of a row waits: [padded_dim + 2] floats, sum and largest score last. */
INLINE float *CBGEN(waiting)(const struct attention *a, float *states, int64_t place, long head, long g) {
    return states + ((place * a->kv_heads + head) * a->group + g) * (a->padded_dim + 2);
}

/* The shared prefix of a group of requests, for some of their query tokens. */
static void CBGEN(attend_prefix)(const struct attention *a, const int64_t *item, long head, struct CBGEN(scratch) *s) {
    int64_t request = item[0], splits = item[3];
    const int64_t *tokens = a->prefix_tokens + item[1];
    long num_tokens = item[2] - item[1], rows = num_tokens * a->group, width = a->padded_dim;
    CBGEN(load_rows)(a, tokens, num_tokens, head, 1, s);
    CBGEN(clear)(a, rows, s);
    for (long r = 0; r < rows; r++) s->low[r] = 0, s->high[r] = splits * a->split_pages * a->page_size;
    for (int64_t split = 0; split < splits; split++) {
        CBGEN(attend_split)(a, a->tables + request * a->table_width, 0, split, split == 0, head, 1, rows, s);
        for (long r = 0; r < rows; r++)
            CBGEN(fold)(width, s->state + r * width, s->state_max + r, s->state_sum + r, s->part + r * width, s->part_max[r],
                        s->part_sum[r]);
    }
    for (long r = 0; r < rows; r++) {
        float *to = CBGEN(waiting)(a, a->prefix_states, tokens[r / a->group], head, r % a->group);
        memcpy(to, s->state + r * width, width * sizeof(float));
        to[width] = s->state_sum[r], to[width + 1] = s->state_max[r];
    }
}

/* What the query tokens of an item see: themselves and all before them, within the window. */
INLINE void CBGEN(set_visible)(const struct attention *a, const int64_t *tokens, long num_tokens, struct CBGEN(scratch) *s) {
    for (long r = 0; r < num_tokens * a->group; r++) {
        int64_t position = a->positions[tokens[r / a->group]];
        s->high[r] = position + 1;
        s->low[r] = a->window > 0 && position >= a->window ? position - a->window + 1 : 0;
    }
}

/* One split of a long request with few query tokens, to wait in `split_states`. */
static void CBGEN(attend_single)(const struct attention *a, const int64_t *item, long head, struct CBGEN(scratch) *s) {
    int64_t request = item[0], split = item[1], place = item[2];
    const int64_t *tokens = a->tokens + a->starts[request];
    long num_tokens = a->starts[request + 1] - a->starts[request], width = a->padded_dim;
    CBGEN(load_rows)(a, tokens, num_tokens, head, 1, s);
    CBGEN(set_visible)(a, tokens, num_tokens, s);
    CBGEN(attend_split)(a, a->tables + request * a->table_width, a->table_firsts[request], split, 1, head, 1,
                        num_tokens * a->group, s);
    for (long r = 0; r < num_tokens * a->group; r++) {
        float *to = CBGEN(waiting)(a, a->split_states, place + r / a->group, head, r % a->group);
        memcpy(to, s->part + r * width, width * sizeof(float));
        to[width] = s->part_sum[r], to[width + 1] = s->part_max[r];
    }
}

/* The state of one row, with the sinks of its head, to the output. */
INLINE void CBGEN(put_row)(const struct attention *a, int64_t token, long query_head, const float *state, float largest, float sum) {
    float scale = 1;
    if (a->sinks) {
        float best = a->sinks[query_head] > largest ? a->sinks[query_head] : largest;
        scale = expf(largest - best);
        sum = sum * scale + expf(a->sinks[query_head] - best);
    }
    float *to = a->out + token * a->out_token + query_head * a->out_head;
    scale /= sum;
    for (long i = 0; i < a->dim; i++) to[i] = state[i] * scale;
}

/* Some query tokens of one request for some KV heads, from where others left off to the output. */
static void CBGEN(attend_rows)(const struct attention *a, const int64_t *item, struct CBGEN(scratch) *s) {
    int64_t request = item[0], split = a->prefix_splits[request], place = a->split_places[request];
    const int64_t *tokens = a->tokens + item[1];
    long num_tokens = item[2] - item[1], rows = num_tokens * a->group, width = a->padded_dim;
    long head = item[3], heads = item[4] - item[3];
    CBGEN(set_visible)(a, tokens, num_tokens, s);
    CBGEN(clear)(a, heads * rows, s);
    for (long r = 0; split && r < heads * rows; r++) {
        const float *from = CBGEN(waiting)(a, a->prefix_states, tokens[r % rows / a->group], head + r / rows, r % a->group);
        memcpy(s->state + r * width, from, width * sizeof(float));
        s->state_sum[r] = from[width], s->state_max[r] = from[width + 1];
    }
    int64_t split_tokens = a->split_pages * a->page_size;
    int64_t first = s->low[0] / split_tokens, last = (s->high[rows - 1] - 1) / split_tokens;
    if (place < 0) CBGEN(load_rows)(a, tokens, num_tokens, head, heads, s);
    first = split > first ? split : first;
    for (split = first; split <= last; split++) {
        if (place < 0)
            CBGEN(attend_split)(a, a->tables + request * a->table_width, a->table_firsts[request], split, split == first, head, heads, rows, s);
        for (long r = 0; r < heads * rows; r++) {
            const float *part = s->part + r * width;
            float part_max = s->part_max[r], part_sum = s->part_sum[r];
            if (place >= 0) {
                part = CBGEN(waiting)(a, a->split_states, place + r % rows / a->group, head + r / rows, r % a->group);
                part_sum = part[width], part_max = part[width + 1];
            }
            CBGEN(fold)(width, s->state + r * width, s->state_max + r, s->state_sum + r, part, part_max, part_sum);
        }
        if (place >= 0) place += num_tokens;
    }
    for (long r = 0; r < heads * rows; r++)
        CBGEN(put_row)(a, tokens[r % rows / a->group], (head + r / rows) * a->group + r % a->group, s->state + r * width,
                       s->state_max[r], s->state_sum[r]);
}

INLINE float *CBGEN(take)(char **at, long count) {
    float *own = (float *)*at;
    *at += (count * 4 + 63) / 64 * 64;
    return own;
}

INLINE struct CBGEN(scratch) CBGEN(scratch_at)(const struct attention *a, char *at) {
    long rows = a->max_rows;
    struct CBGEN(scratch) s;
    s.query = CBGEN(take)(&at, rows * CBGEN(query_words)(a));
    s.scores = CBGEN(take)(&at, rows * a->split_pages * a->slots);
    s.part = CBGEN(take)(&at, rows * a->padded_dim);
    s.state = CBGEN(take)(&at, rows * a->padded_dim);
    s.tile = CBGEN(take)(&at, a->split_pages * a->slots * a->padded_dim);
    s.factors = CBGEN(take)(&at, rows);
    s.part_max = CBGEN(take)(&at, rows), s.part_sum = CBGEN(take)(&at, rows);
    s.state_max = CBGEN(take)(&at, rows), s.state_sum = CBGEN(take)(&at, rows);
    s.low = (int64_t *)CBGEN(take)(&at, 2 * rows), s.high = (int64_t *)CBGEN(take)(&at, 2 * rows);
    return s;
}

/* scratch: scratch_bytes for each thread, 64-byte aligned. */
EXPORT void CBGEN(attend)(const struct attention *a) {
#pragma omp parallel
    {
        struct CBGEN(scratch) s = CBGEN(scratch_at)(a, a->scratch + THREAD * a->scratch_bytes);
        if (a->num_prefix_items + a->num_single_items > 0) {
#pragma omp for schedule(dynamic) nowait
            for (long i = 0; i < a->num_prefix_items * a->kv_heads; i++)
                CBGEN(attend_prefix)(a, a->prefix_items + i / a->kv_heads * 4, i % a->kv_heads, &s);
#pragma omp for schedule(dynamic)
            for (long i = 0; i < a->num_single_items * a->kv_heads; i++)
                CBGEN(attend_single)(a, a->single_items + i / a->kv_heads * 3, i % a->kv_heads, &s);
        }
#pragma omp for schedule(dynamic)
        for (long i = 0; i < a->num_items; i++) CBGEN(attend_rows)(a, a->items + i * 5, &s);
    }
}
