/* Attention over pages, for one layer. See struct attention in kernels.h.

   One work item is a KV head, or several for few rows, up to ROW_TILE rows (query tokens x the query heads that share a KV
   head) and some tokens of KV. KV is cut at fixed places, every `split_pages` pages from token 0 on, and each piece, a
   split, is attended by itself: scores, their softmax, the weighted sum of values. What comes out is folded in ascending
   order:

       split 0      split 1      split 2
       (m, l, O) -> (m, l, O) -> (m, l, O) -> O / l           m: largest score, l: sum of exp(score - m), O: sum of values

   So it does not matter to a single bit who works a split out: first come the prefixes that several requests share,
   attended by the rows of all of them at once, and single splits of long requests when there are few; then every request
   goes on from there. */

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
