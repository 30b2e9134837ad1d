/* Attention over pages, for one layer. See struct attention in kernels.h.

   One work item is a KV head, up to ROW_TILE rows (query tokens x the query heads that share the KV head) and some tokens
   of KV. KV is cut at fixed places, every `split_pages` pages from token 0 on, and each piece, a split, is attended by
   itself: scores, their softmax, the weighted sum of values. What comes out is folded in ascending order:

       split 0      split 1      split 2
       (m, l, O) -> (m, l, O) -> (m, l, O) -> O / l           m: largest score, l: sum of exp(score - m), O: sum of values

   So it does not matter to a single bit who works a split out: first come the prefixes that several requests share,
   attended by the rows of all of them at once, and single splits of long requests when there are few; then every request
   goes on from there. */

struct CBGEN(scratch) {
    float *query;   /* [rows, dim], scaled */
    float *scores;  /* [rows, split slots] */
    float *part;    /* [rows, padded_dim]: of one split */
    float *state;   /* [rows, padded_dim]: folded so far */
    float *tile;    /* one page of keys or values of one head in float32 */
    float *part_max, *part_sum, *state_max, *state_sum; /* [rows] */
    int64_t *low, *high; /* [rows]: the tokens that a row sees, high excluded */
};

/* out [rows, `vectors` vectors] (+)= a [rows, k] times b: see multiply. */
INLINE void CBGEN(product_tile)(const int rows, const int vectors, long k, const float *a, long lda, const float *b,
                                long step, long apart, float *out, long ldo, int add) {
    vf sums[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        sums[r][0] = add ? CBGEN(load)(out + r * ldo) : (vf){0};
        sums[r][1] = add && vectors > 1 ? CBGEN(load)(out + r * ldo + LANES) : (vf){0};
    }
    CBGEN(multiply)(rows, k, a, lda, b, step, apart, sums);
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        CBGEN(put)(out + r * ldo, sums[r][0]);
        if (vectors > 1) CBGEN(put)(out + r * ldo + LANES, sums[r][1]);
    }
}

static void CBGEN(product)(long rows, long k, const float *a, long lda, const float *b, long step, long apart, float *out,
                           long ldo, int vectors, int add) {
    for (long first = 0; first < rows; first += ROWS) {
        const float *own = a + first * lda;
        float *to = out + first * ldo;
#define CASE(n) \
    case n: \
        if (vectors > 1) CBGEN(product_tile)(n, 2, k, own, lda, b, step, apart, to, ldo, add); \
        else CBGEN(product_tile)(n, 1, k, own, lda, b, step, apart, to, ldo, add); \
        break;
        switch (rows - first < ROWS ? rows - first : ROWS) {
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if CBGEN_LANES == 16
            CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
        }
#undef CASE
    }
}

/* Elements of a page as float32: the page itself, or a copy in `to`. */
INLINE const float *CBGEN(as_float)(int kind, const void *from, long count, float *to) {
    if (kind == KV_FLOAT32) return from;
    if (kind == KV_BFLOAT16) {
        const uint16_t *half = from;
        for (long i = 0; i < count; i++) ((uint32_t *)to)[i] = (uint32_t)half[i] << 16;
    } else {
        const int8_t *byte = from;
        for (long i = 0; i < count; i++) to[i] = byte[i];
    }
    return to;
}

INLINE long CBGEN(element_bytes)(int kind) { return kind == KV_FLOAT32 ? 4 : kind == KV_BFLOAT16 ? 2 : 1; }

/* scores [rows, slots] of `slots` (a multiple of KEY_TILE) places of one page. */
INLINE void CBGEN(page_scores)(const struct attention *a, const char *page, long head, long slots, long rows,
                               struct CBGEN(scratch) *s, float *scores, long ld) {
    long tile = a->dim * KEY_TILE, first = head * a->slots * a->dim;
    const char *keys = page + first * CBGEN(element_bytes)(a->kind);
    const float *b = CBGEN(as_float)(a->kind, keys, slots * a->dim, s->tile);
    for (long slot = 0; slot < slots; slot += PANEL) {
        /* KEY_TILE keys lie together: as many as a panel of AVX2, two panels of the plain set, half a panel of AVX-512. */
        const float *own = b + slot / KEY_TILE * tile + slot % KEY_TILE;
        int pair = LANES < KEY_TILE || slot + KEY_TILE < slots;
        CBGEN(product)(rows, a->dim, s->query, a->dim, own, KEY_TILE, LANES < KEY_TILE ? LANES : pair ? tile : 0,
                       scores + slot, ld, pair ? VECTORS : 1, 0);
    }
    if (a->kind == KV_INT8) {
        const float *scales = (const float *)(page + a->key_scales) + head * a->slots;
        for (long r = 0; r < rows; r++)
            for (long i = 0; i < slots; i++) scores[r * ld + i] *= scales[i];
    }
}

/* part [rows, padded_dim] += weights [rows, tokens] times the values of some tokens of one page. */
INLINE void CBGEN(page_values)(const struct attention *a, const char *page, long head, long begin, long end, long rows,
                               struct CBGEN(scratch) *s, float *weights, long ld) {
    long width = a->padded_dim, first = (head * a->slots + begin) * width;
    const char *values = page + a->values + first * CBGEN(element_bytes)(a->kind);
    const float *b = CBGEN(as_float)(a->kind, values, (end - begin) * width, s->tile);
    if (a->kind == KV_INT8) {
        const float *scales = (const float *)(page + a->value_scales) + head * a->slots;
        for (long r = 0; r < rows; r++)
            for (long i = begin; i < end; i++) weights[r * ld + i] *= scales[i];
    }
    for (long column = 0; column < width; column += PANEL) {
        int pair = column + LANES < width;
        CBGEN(product)(rows, end - begin, weights + begin, ld, b + column, width, pair ? LANES : 0, s->part + column, width,
                       pair ? VECTORS : 1, 1);
    }
}

INLINE vf CBGEN(tanh)(vf x) { return 1.0f - 2.0f / (CBGEN(exp)(x + x) + 1.0f); }

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
        vf weight = CBGEN(exp)(CBGEN(load)(scores + i) - shift);
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

/* Pages lie anywhere, so that the processor does not guess which comes next: it is told before. */
INLINE void CBGEN(fetch_keys)(const struct attention *a, const char *page, long head) {
    long bytes = a->slots * a->dim * CBGEN(element_bytes)(a->kind);
    for (long byte = 0; byte < bytes; byte += 64) __builtin_prefetch(page + head * bytes + byte, 0, 2);
}
INLINE void CBGEN(fetch_values)(const struct attention *a, const char *page, long head) {
    long bytes = a->slots * a->padded_dim * CBGEN(element_bytes)(a->kind);
    for (long byte = 0; byte < bytes; byte += 64) __builtin_prefetch(page + a->values + head * bytes + byte, 0, 2);
}

/* One split of one table for `rows` rows: part, part_max and part_sum of the scratch. */
static void CBGEN(attend_split)(const struct attention *a, const int64_t *table, int64_t table_first, int64_t split,
                                long head, long rows, struct CBGEN(scratch) *s) {
    int64_t split_tokens = a->split_pages * a->page_size, low = INT64_MAX, high = 0;
    for (long r = 0; r < rows; r++) {
        low = s->low[r] < low ? s->low[r] : low;
        high = s->high[r] > high ? s->high[r] : high;
    }
    int64_t begin = split * split_tokens, end = begin + split_tokens;
    if (low > begin) begin = low / a->page_size * a->page_size;
    if (high < end) end = high;
    long pages = end > begin ? (end - begin + a->page_size - 1) / a->page_size : 0, slots = pages * a->slots;
    long ld = a->split_pages * a->slots;
    const int64_t *own = table + (begin - table_first) / a->page_size;
    for (long p = 0; p < pages; p++) {
        const char *page = a->pages + own[p] * a->page_bytes;
        if (p + 1 < pages) CBGEN(fetch_keys)(a, a->pages + own[p + 1] * a->page_bytes, head);
        CBGEN(fetch_values)(a, page, head);
        CBGEN(page_scores)(a, page, head, a->slots, rows, s, s->scores + p * a->slots, ld);
    }
    for (long r = 0; r < rows; r++) {
        CBGEN(hide)(a, s->scores + r * ld, begin, pages, s->low[r], s->high[r]);
        CBGEN(softmax_row)(a, s->scores + r * ld, slots, s->part_max + r, s->part_sum + r);
    }
    memset(s->part, 0, rows * a->padded_dim * sizeof(float));
    for (long p = 0; p < pages; p++) {
        int64_t start = begin + p * a->page_size;
        if (end + p * a->page_size < high) /* of the next split */
            CBGEN(fetch_keys)(a, a->pages + own[pages + p] * a->page_bytes, head);
        long from = low > start ? low - start : 0, to = end - start < a->page_size ? end - start : a->page_size;
        CBGEN(page_values)(a, a->pages + own[p] * a->page_bytes, head, from, to, rows, s, s->scores + p * a->slots, ld);
    }
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
    float best = part_max > *state_max ? part_max : *state_max;
    float old = expf(*state_max - best), new = expf(part_max - best);
    for (long i = 0; i < width; i++) state[i] = state[i] * old + part[i] * new;
    *state_sum = *state_sum * old + part_sum * new, *state_max = best;
}

/* Nothing is folded yet: if all scores of a row are -inf, it stays so. */
INLINE void CBGEN(clear)(const struct attention *a, long rows, struct CBGEN(scratch) *s) {
    memset(s->state, 0, rows * a->padded_dim * sizeof(float));
    for (long r = 0; r < rows; r++) s->state_sum[r] = 0, s->state_max[r] = -INFINITY;
}

/* Row r of an item is query head `head * group + r % group` of the query token `tokens[r / group]`. */
INLINE void CBGEN(load_rows)(const struct attention *a, const int64_t *tokens, long num_tokens, long head,
                             struct CBGEN(scratch) *s) {
    for (long t = 0; t < num_tokens; t++)
        for (long g = 0; g < a->group; g++) {
            const float *from = a->query + tokens[t] * a->query_token + (head * a->group + g) * a->query_head;
            float *to = s->query + (t * a->group + g) * a->dim;
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
    CBGEN(load_rows)(a, tokens, num_tokens, head, s);
    CBGEN(clear)(a, rows, s);
    for (long r = 0; r < rows; r++) s->low[r] = 0, s->high[r] = splits * a->split_pages * a->page_size;
    for (int64_t split = 0; split < splits; split++) {
        CBGEN(attend_split)(a, a->tables + request * a->table_width, 0, split, head, rows, s);
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
    CBGEN(load_rows)(a, tokens, num_tokens, head, s);
    CBGEN(set_visible)(a, tokens, num_tokens, s);
    CBGEN(attend_split)(a, a->tables + request * a->table_width, a->table_firsts[request], split, head,
                        num_tokens * a->group, s);
    for (long r = 0; r < num_tokens * a->group; r++) {
        float *to = CBGEN(waiting)(a, a->split_states, place + r / a->group, head, r % a->group);
        memcpy(to, s->part + r * width, width * sizeof(float));
        to[width] = s->part_sum[r], to[width + 1] = s->part_max[r];
    }
}

/* Some query tokens of one request, from where others left off to the output. */
static void CBGEN(attend_rows)(const struct attention *a, const int64_t *item, long head, struct CBGEN(scratch) *s) {
    int64_t request = item[0], split = a->prefix_splits[request], place = a->split_places[request];
    const int64_t *tokens = a->tokens + item[1];
    long num_tokens = item[2] - item[1], rows = num_tokens * a->group, width = a->padded_dim;
    CBGEN(set_visible)(a, tokens, num_tokens, s);
    CBGEN(clear)(a, rows, s);
    for (long r = 0; split && r < rows; r++) {
        const float *from = CBGEN(waiting)(a, a->prefix_states, tokens[r / a->group], head, r % a->group);
        memcpy(s->state + r * width, from, width * sizeof(float));
        s->state_sum[r] = from[width], s->state_max[r] = from[width + 1];
    }
    int64_t split_tokens = a->split_pages * a->page_size;
    int64_t first = s->low[0] / split_tokens, last = (s->high[rows - 1] - 1) / split_tokens;
    if (place < 0) CBGEN(load_rows)(a, tokens, num_tokens, head, s);
    for (split = split > first ? split : first; split <= last; split++) {
        if (place < 0) CBGEN(attend_split)(a, a->tables + request * a->table_width, a->table_firsts[request], split, head, rows, s);
        for (long r = 0; r < rows; r++) {
            const float *part = s->part + r * width;
            float part_max = s->part_max[r], part_sum = s->part_sum[r];
            if (place >= 0) {
                part = CBGEN(waiting)(a, a->split_states, place + r / a->group, head, r % a->group);
                part_sum = part[width], part_max = part[width + 1];
            }
            CBGEN(fold)(width, s->state + r * width, s->state_max + r, s->state_sum + r, part, part_max, part_sum);
        }
        if (place >= 0) place += num_tokens;
    }
    for (long r = 0; r < rows; r++) {
        long query_head = head * a->group + r % a->group;
        float sum = s->state_sum[r], scale = 1;
        if (a->sinks) {
            float best = a->sinks[query_head] > s->state_max[r] ? a->sinks[query_head] : s->state_max[r];
            scale = expf(s->state_max[r] - best);
            sum = sum * scale + expf(a->sinks[query_head] - best);
        }
        float *to = a->out + tokens[r / a->group] * a->out_token + query_head * a->out_head;
        for (long i = 0; i < a->dim; i++) to[i] = s->state[r * width + i] * scale / sum;
    }
}

INLINE float *CBGEN(take)(char **at, long count) {
    float *own = (float *)*at;
    *at += (count * 4 + 63) / 64 * 64;
    return own;
}

INLINE struct CBGEN(scratch) CBGEN(scratch_at)(const struct attention *a, char *at) {
    long rows = a->max_rows;
    struct CBGEN(scratch) s;
    s.query = CBGEN(take)(&at, rows * a->dim);
    s.scores = CBGEN(take)(&at, rows * a->split_pages * a->slots);
    s.part = CBGEN(take)(&at, rows * a->padded_dim);
    s.state = CBGEN(take)(&at, rows * a->padded_dim);
    s.tile = CBGEN(take)(&at, a->slots * a->padded_dim);
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
        for (long i = 0; i < a->num_items * a->kv_heads; i++)
            CBGEN(attend_rows)(a, a->items + i / a->kv_heads * 3, i % a->kv_heads, &s);
    }
}
