/* Keys and values of some tokens into their places in the pages of one layer. See struct attention for the layout. */

/* Element i of a vector lies at place i / TILE * far + i % TILE * near. */
INLINE long CBGEN(place)(long i, long near, long far) { return i / TILE * far + i % TILE * near; }

/* from [dim] to `to`, in the kind of the cache; for int8, *scale is what an element is to be multiplied by. */
INLINE void CBGEN(store_vector)(int64_t kind, const float *from, long dim, char *to, long near, long far, float *scale) {
    if (kind == KV_FLOAT32)
        for (long i = 0; i < dim; i++) ((float *)to)[CBGEN(place)(i, near, far)] = from[i];
    else if (kind == KV_BFLOAT16)
        for (long i = 0; i < dim; i++) {
            uint32_t bits;
            memcpy(&bits, from + i, 4);
            /* To the nearest, ties to even; a NaN would turn into an infinity, so it keeps its upper half. */
            uint32_t rounded = from[i] == from[i] ? bits + 0x7FFF + (bits >> 16 & 1) : bits | 0x400000;
            ((uint16_t *)to)[CBGEN(place)(i, near, far)] = (uint16_t)(rounded >> 16);
        }
    else {
        float most = 0;
        for (long i = 0; i < dim; i++) {
            float size = fabsf(from[i]);
            most = size > most || size != size ? size : most;
        }
        *scale = most / 127; /* NaN and infinity stay in the scale, so that the row still shows them */
        float inverse = most > 0 && most < INFINITY ? 127 / most : 0;
        for (long i = 0; i < dim; i++) {
            float level = from[i] * inverse;
            ((int8_t *)to)[CBGEN(place)(i, near, far)] = level == level ? (int8_t)lrintf(level) : 1;
        }
    }
}

/* key, value [tokens, kv_heads, dim], their strides in floats; token t goes to place write_offsets[t] of write_pages[t]. */
EXPORT void CBGEN(store)(const struct attention *a, char *pages, const float *key, int64_t key_token, int64_t key_head,
                         const float *value, int64_t value_token, int64_t value_head, int64_t num_tokens,
                         const int64_t *write_pages, const int64_t *write_offsets) {
    long bytes = CBGEN(element_bytes)(a->kind);
#pragma omp parallel for schedule(static) if (num_tokens > 8)
    for (long t = 0; t < num_tokens; t++) {
        char *page = pages + write_pages[t] * a->page_bytes;
        int64_t slot = write_offsets[t];
        for (long h = 0; h < a->kv_heads; h++) {
            long first_key = (h * a->slots + slot / TILE * TILE) * a->dim + slot % TILE;
            long first_value = h * a->slots * a->padded_dim + slot * TILE, scale = h * a->slots + slot, far = a->slots * TILE;
            char *values = page + a->values + first_value * bytes;
            float *key_scale = (float *)(page + a->key_scales) + scale, *value_scale = (float *)(page + a->value_scales) + scale;
            CBGEN(store_vector)(a->kind, key + t * key_token + h * key_head, a->dim, page + first_key * bytes, TILE,
                                TILE * TILE, key_scale);
            CBGEN(store_vector)(a->kind, value + t * value_token + h * value_head, a->dim, values, 1, far, value_scale);
            for (long i = a->dim; i < a->padded_dim; i++) memset(values + CBGEN(place)(i, 1, far) * bytes, 0, bytes);
        }
    }
}
