/* Linear layers of either kind, and a decoder layer made of them: struct weight and struct layer of kernels.h. */

/* out [m, n] = x [m, k] W^T + bias; levels and row_scales as in struct workspace, unused by float32. */
EXPORT void CBGEN(multiply_weight)(const struct weight *w, const float *x, int64_t ldx, int64_t m, float *out, int64_t ldo,
                                   void *levels, float *row_scales) {
    if (w->kind == WEIGHT_FLOAT32) {
        CBGEN(linear_f32)(x, ldx, m, w->k, w->n, w->packed, w->bias, out, ldo);
        return;
    }
    CBGEN(integer_quantize)(x, ldx, m, w->k, w->scales_in, w->limit, w->bytes, levels, row_scales);
    CBGEN(integer_linear)(w, levels, row_scales, m, out, ldo);
}

/* One head in place: its norm, if it has one, and its rotation by cosine and sine [rotary]. */
INLINE void CBGEN(rotate_head)(float *head, int64_t dim, int64_t rotary, const float *norm, float epsilon,
                               const float *cosine, const float *sine) {
    if (norm) {
        float squares = 0;
        for (int64_t i = 0; i < dim; i++) squares += head[i] * head[i];
        float scale = 1 / sqrtf(squares / dim + epsilon);
        for (int64_t i = 0; i < dim; i++) head[i] = head[i] * scale * norm[i];
    }
    int64_t half = rotary / 2;
    for (int64_t i = 0; i < half; i++) {
        float low = head[i], high = head[i + half];
        head[i] = low * cosine[i] - high * sine[i];
        head[i + half] = high * cosine[i + half] + low * sine[i + half];
    }
}

/* qkv [rows, (heads + 2 * kv_heads) * dim] from x [rows, k]; cosine and sine [rows, rotary]. */
EXPORT void CBGEN(layer_begin)(const struct layer *l, const struct workspace *space, const float *x, int64_t rows,
                               const float *cosine, const float *sine, float *qkv) {
    int64_t width = l->qkv->k, all = l->qkv->n, rotated = l->heads + l->kv_heads;
    CBGEN(rms_norm)(x, width, rows, width, l->input_norm, l->input_epsilon, space->normed, width);
    CBGEN(multiply_weight)(l->qkv, space->normed, width, rows, qkv, all, space->levels, space->row_scales);
#pragma omp parallel for schedule(static) if (rows > 4)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t h = 0; h < rotated; h++)
            CBGEN(rotate_head)(qkv + row * all + h * l->dim, l->dim, l->rotary, h < l->heads ? l->query_norm : l->key_norm,
                               l->head_epsilon, cosine + row * l->rotary, sine + row * l->rotary);
}

/* to [count] = a + b */
static void CBGEN(add)(const float *a, const float *b, int64_t count, float *to) {
#pragma omp parallel for schedule(static) if (count > 8192)
    for (int64_t i = 0; i < count; i++) to[i] = a[i] + b[i];
}

/* out [rows, k] from x, the layer's input, and attended [rows, heads * dim], what its attention gave. */
EXPORT void CBGEN(layer_end)(const struct layer *l, const struct workspace *space, const float *x, const float *attended,
                             int64_t rows, float *out) {
    int64_t width = l->out->n, inner = l->down->k;
    CBGEN(multiply_weight)(l->out, attended, l->out->k, rows, space->normed, width, space->levels, space->row_scales);
    CBGEN(add)(x, space->normed, rows * width, out);
    CBGEN(rms_norm)(out, width, rows, width, l->mlp_norm, l->mlp_epsilon, space->normed, width);
    CBGEN(multiply_weight)(l->gate_up, space->normed, width, rows, space->wide, 2 * inner + WIDE_GAP, space->levels, space->row_scales);
    CBGEN(gated)(space->wide, 2 * inner + WIDE_GAP, rows, inner, l->activation, space->inner);
    CBGEN(multiply_weight)(l->down, space->inner, inner, rows, space->normed, width, space->levels, space->row_scales);
    CBGEN(add)(out, space->normed, rows * width, out);
}
