/* The two products of attention with what one KV head has in pages: queries with keys, and weights with values.

       scores [rows, slots] = queries [rows, dim] * keys         page by page
       part [rows, dim] = weights [rows, split slots] * values   over all pages of a split

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
        for (int r = 0; r < rows; r++) left[r] = (vf)CBGEN(splat_word)(a + r * lda);
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
            vf left = (vf)CBGEN(splat_word)(a + r * lda);
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
    vf own = (vf)CBGEN(splat_word)(last);
    vi start = CBGEN(splat_word)(last + 1);
    for (long i = 0; i < a->slots; i += LANES) {
        vi sum = CBGEN(load_int)(scores + i) + start;
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
    const long most_levels = INT32_MAX / 127 / (a->split_pages * a->page_size); /* others weigh 0 */
    const float limit = most_levels < INT16_MAX ? most_levels : INT16_MAX;
    vi most = {0};
    for (long p = 0; p < num_pages; p++) {
        const float *scales = (const float *)(a->pages + pages[p] * a->page_bytes + a->value_scales) + head * a->slots;
        for (long i = 0; i < a->slots; i += LANES) {
            vf weight = CBGEN(load)(weights + p * a->slots + i);
            vf scaled = CBGEN(choose)(weight == 0.0f, weight, weight * CBGEN(load)(scales + i));
            CBGEN(put)(weights + p * a->slots + i, scaled);
            most = CBGEN(max_int)(CBGEN(size_bits)(scaled), most);
        }
    }
    float largest = CBGEN(largest_of_bits)(most);
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
