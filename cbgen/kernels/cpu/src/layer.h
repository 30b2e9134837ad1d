/* Linear layers of every kind, and a decoder layer made of them: struct weight and struct layer of kernels.h. */

/* The bytes of a row of x [k] as a weight reads it; none for float32, which reads x itself. */
EXPORT int64_t CBGEN(levels_bytes)(int64_t kind, int64_t k) {
    if (kind == WEIGHT_WORDS) return CBGEN(depth_of)(k) * 2 + 4;
    return kind == WEIGHT_BYTES ? CBGEN(groups_of)(k) * (GROUP + 8) : 0;
}

static void CBGEN(prepare_row)(const struct weight *w, const float *x, int64_t row, char *levels) {
    char *to = levels + row * CBGEN(levels_bytes)(w->kind, w->k);
    if (w->kind == WEIGHT_WORDS) CBGEN(quantize_row)(x, w->k, w->scales_in, w->limit, (int16_t *)to);
    if (w->kind == WEIGHT_BYTES) CBGEN(group_row)(x, w->k, w->scales_in, to);
}

/* out [m, n] from prepared rows of integers. */
static void CBGEN(integer_linear)(const struct weight *w, const char *levels, int64_t m, float *out, int64_t ldo) {
    int64_t panels = (w->n + PANEL - 1) / PANEL, threads = THREADS, row_bytes = CBGEN(levels_bytes)(w->kind, w->k);
    struct grid grid = grid_of(m, panels);
    uint64_t runs[threads * RUN];
    deal(runs, threads, grid.chunks);
#pragma omp parallel
    for (int64_t i; (i = take_item(runs, threads, THREAD)) >= 0;)
        for (int64_t at = 0; at < grid.blocks * grid.chunk; at++) {
            int64_t panel = i * grid.chunk + at % grid.chunk, row = part_begin(at / grid.chunk, grid.blocks, m);
            int64_t rows = part_begin(at / grid.chunk + 1, grid.blocks, m) - row;
            if (panel >= panels) continue;
            if (w->kind == WEIGHT_BYTES)
                CBGEN(grouped_panel)(w, panel, rows, levels + row * row_bytes, row_bytes, out + row * ldo, ldo);
            else CBGEN(integer_panel)(w, panel, rows, levels + row * row_bytes, row_bytes, out + row * ldo, ldo);
        }
}

/* out [m, n] = x [m, k] W^T + bias, all rows of x prepared. */
static void CBGEN(multiply_prepared)(const struct weight *w, const float *x, int64_t ldx, int64_t m, float *out, int64_t ldo,
                                     const char *levels) {
    if (w->kind == WEIGHT_FLOAT32) CBGEN(linear_f32)(x, ldx, m, w->k, w->n, w->packed, w->bias, out, ldo);
    else CBGEN(integer_linear)(w, levels, m, out, ldo);
}

/* The same from the beginning; levels as in struct workspace. */
EXPORT void CBGEN(multiply_weight)(const struct weight *w, const float *x, int64_t ldx, int64_t m, float *out, int64_t ldo,
                                   char *levels) {
    if (w->kind != WEIGHT_FLOAT32) {
#pragma omp parallel for schedule(static) if (m * w->k > 4096)
        for (int64_t row = 0; row < m; row++) CBGEN(prepare_row)(w, x + row * ldx, row, levels);
    }
    CBGEN(multiply_prepared)(w, x, ldx, m, out, ldo, levels);
}

/* One head in place: its norm, if it has one, and its rotation by cosine and sine [rotary]. */
INLINE void CBGEN(rotate_head)(float *head, int64_t dim, int64_t rotary, const float *norm, float epsilon,
                               const float *cosine, const float *sine) {
    if (norm) CBGEN(norm_row)(head, dim, norm, epsilon, head);
    int64_t half = rotary / 2, i = 0;
    for (; i + LANES <= half; i += LANES) {
        vf low = CBGEN(load)(head + i), high = CBGEN(load)(head + i + half);
        CBGEN(put)(head + i, low * CBGEN(load)(cosine + i) - high * CBGEN(load)(sine + i));
        CBGEN(put)(head + i + half, high * CBGEN(load)(cosine + i + half) + low * CBGEN(load)(sine + i + half));
    }
    for (; i < half; i++) {
        float low = head[i], high = head[i + half];
        head[i] = low * cosine[i] - high * sine[i];
        head[i + half] = high * cosine[i + half] + low * sine[i + half];
    }
}

/* qkv [rows, (heads + 2 * kv_heads) * dim] from x [rows, k]; cosine and sine [rows, rotary]. */
EXPORT void CBGEN(layer_begin)(const struct layer *l, const struct workspace *space, const float *x, int64_t rows,
                               const float *cosine, const float *sine, float *qkv) {
    int64_t width = l->qkv->k, all = l->qkv->n, rotated = l->heads + l->kv_heads;
#pragma omp parallel for schedule(static) if (rows > 4)
    for (int64_t row = 0; row < rows; row++) {
        float *normed = space->normed + row * width;
        CBGEN(norm_row)(x + row * width, width, l->input_norm, l->input_epsilon, normed);
        CBGEN(prepare_row)(l->qkv, normed, row, space->levels);
    }
    CBGEN(multiply_prepared)(l->qkv, space->normed, width, rows, qkv, all, space->levels);
#pragma omp parallel for schedule(static) if (rows > 4)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t h = 0; h < rotated; h++)
            CBGEN(rotate_head)(qkv + row * all + h * l->dim, l->dim, l->rotary, h < l->heads ? l->query_norm : l->key_norm,
                               l->head_epsilon, cosine + row * l->rotary, sine + row * l->rotary);
}

/* out [rows, k] from x, the layer's input, and attended [rows, heads * dim], what its attention gave. */
EXPORT void CBGEN(layer_end)(const struct layer *l, const struct workspace *space, const float *x, const float *attended,
                             int64_t rows, float *out) {
    int64_t width = l->out->n, inner = l->down->k, wide = 2 * inner + WIDE_GAP;
    CBGEN(multiply_weight)(l->out, attended, l->out->k, rows, space->normed, width, space->levels);
#pragma omp parallel for schedule(static) if (rows > 4)
    for (int64_t row = 0; row < rows; row++) {
        float *normed = space->normed + row * width, *own = out + row * width;
        CBGEN(add_row)(x + row * width, normed, width, own);
        CBGEN(norm_row)(own, width, l->mlp_norm, l->mlp_epsilon, normed);
        CBGEN(prepare_row)(l->gate_up, normed, row, space->levels);
    }
    CBGEN(multiply_prepared)(l->gate_up, space->normed, width, rows, space->wide, wide, space->levels);
#pragma omp parallel for schedule(static) if (rows > 4)
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = space->wide + row * wide;
        CBGEN(gated_row)(gate, gate + inner, inner, l->activation, space->inner + row * inner);
        CBGEN(prepare_row)(l->down, space->inner + row * inner, row, space->levels);
    }
    CBGEN(multiply_prepared)(l->down, space->inner, inner, rows, space->normed, width, space->levels);
#pragma omp parallel for schedule(static) if (rows > 4)
    for (int64_t row = 0; row < rows; row++)
        CBGEN(add_row)(out + row * width, space->normed + row * width, width, out + row * width);
}

/* layer_end for the rows `wanted` [count], in ascending order, alone; other rows of out hold nothing. */
static void CBGEN(layer_end_of)(const struct layer *l, const struct workspace *space, const float *x, const int64_t *wanted,
                                int64_t count, float *out) {
    int64_t width = l->out->n, attended = l->heads * l->dim;
    for (int64_t i = 0; i < count; i++) {
        memcpy(out + i * width, x + wanted[i] * width, width * 4);
        memmove(space->attended + i * attended, space->attended + wanted[i] * attended, attended * 4);
    }
    CBGEN(layer_end)(l, space, out, space->attended, count, out);
    for (int64_t i = count; i-- > 0;) memmove(out + wanted[i] * width, out + i * width, width * 4);
}

/* A whole layer: out [rows, k] from x. a: its attention, whose pages, query and out are set here; writes as in `store`.
 * wanted [num_wanted]: the only rows of out that anybody reads, in ascending order; -1: all. */
EXPORT void CBGEN(layer_run)(const struct layer *l, const struct workspace *space, const float *x, int64_t rows,
                             const float *cosine, const float *sine, const struct attention *a, char *pages,
                             const int64_t *write_pages, const int64_t *write_offsets, const int64_t *wanted,
                             int64_t num_wanted, float *out) {
    int64_t all = l->qkv->n, attended = l->heads * l->dim;
    const float *key = space->qkv + attended, *value = key + l->kv_heads * l->dim;
    struct attention own = *a;
    own.pages = pages, own.query = space->qkv, own.query_token = all, own.query_head = l->dim;
    own.out = space->attended, own.out_token = attended, own.out_head = l->dim;
    CBGEN(layer_begin)(l, space, x, rows, cosine, sine, space->qkv);
    CBGEN(store)(a, pages, key, all, l->dim, value, all, l->dim, rows, write_pages, write_offsets);
    CBGEN(attend)(&own);
    if (num_wanted >= 0) CBGEN(layer_end_of)(l, space, x, wanted, num_wanted, out);
    else CBGEN(layer_end)(l, space, x, space->attended, rows, out);
}
