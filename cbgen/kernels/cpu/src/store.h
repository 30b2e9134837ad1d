/* Keys and values of some tokens into their places in the pages of one layer. See struct attention for the layout. */

/* from [dim] -> to [padded_dim] in the kind of the cache; for int8, *scale is what an element is to be multiplied by. */
static void CBGEN(convert_row)(int64_t kind, const float *from, long dim, long padded_dim, char *to, float *scale) {
    float row[padded_dim];
    memcpy(row, from, dim * 4);
    memset(row + dim, 0, (padded_dim - dim) * 4);
    if (kind == KV_FLOAT32) {
        memcpy(to, row, padded_dim * 4);
    } else if (kind == KV_BFLOAT16) {
        for (long i = 0; i < padded_dim; i++) {
            uint32_t bits;
            memcpy(&bits, row + i, 4);
            /* To the nearest, ties to even; a NaN would turn into an infinity, so it keeps its upper half. */
            uint32_t rounded = row[i] == row[i] ? bits + 0x7FFF + (bits >> 16 & 1) : bits | 0x400000;
            ((uint16_t *)to)[i] = (uint16_t)(rounded >> 16);
        }
    } else {
        float largest = CBGEN(largest_size)(row, 0, padded_dim);
        int usual = largest == largest;
        *scale = largest / 127; /* NaN stays, so that the row still shows it */
        vf inverse = CBGEN(splat)(CBGEN(level_factor)(largest, 127));
        for (long i = 0; i < padded_dim; i += LANES) {
            vi whole = CBGEN(round)(usual ? CBGEN(load)(row + i) * inverse : (vf){0} + 1.0f);
            vu8 narrow = __builtin_convertvector(whole, vu8);
            memcpy(to + i, &narrow, sizeof narrow);
        }
    }
}

/* to[i * TILE] = from[i], words of so many bytes. */
INLINE void CBGEN(spread)(int64_t bytes, const char *from, long count, char *to) {
    if (bytes == 4)
        for (long i = 0; i < count; i++) ((float *)to)[i * TILE] = ((const float *)from)[i];
    else
        for (long i = 0; i < count; i++) ((uint16_t *)to)[i * TILE] = ((const uint16_t *)from)[i];
}

/* The value of one token, row [padded_dim], from `to` on, where its page has the values of the head; in int8 a token is one
 * half of a word. */
INLINE void CBGEN(put_value)(const struct attention *a, int64_t slot, const char *row, char *to) {
    long bytes = a->kind == KV_FLOAT32 ? 4 : a->kind == KV_BFLOAT16 ? 2 : 1;
    for (long i = 0; i < a->padded_dim; i += TILE, to += a->slots * TILE * bytes)
        if (a->kind != KV_INT8) memcpy(to + slot * TILE * bytes, row + i * bytes, TILE * bytes);
        else
            for (long lane = 0; lane < TILE; lane++) to[(slot / 2 * TILE + lane) * 2 + slot % 2] = row[i + lane];
}

/* Where the key of one token begins, that of head h. */
INLINE char *CBGEN(key_place)(const struct attention *a, char *page, int64_t slot, long h) {
    long bytes = CBGEN(word_bytes)(CBGEN(key_kind)(a));
    return page + h * CBGEN(key_bytes)(a) + (slot / TILE * TILE * CBGEN(key_words)(a) + slot % TILE) * bytes;
}

/* A key touches a line of the cache for each of its numbers, most of them far away: they are asked for one token early. */
INLINE void CBGEN(fetch_places)(const struct attention *a, char *page, int64_t slot) {
    long step = TILE * CBGEN(word_bytes)(CBGEN(key_kind)(a)), words = CBGEN(key_words)(a);
    for (long h = 0; h < a->kv_heads; h++) {
        char *key = CBGEN(key_place)(a, page, slot, h);
        for (long byte = 0; byte < words * step; byte += 64) __builtin_prefetch(key + byte, 1);
    }
}

/* key, value [tokens, kv_heads, dim], their strides in floats; token t goes to place write_offsets[t] of write_pages[t]. */
EXPORT void CBGEN(store)(const struct attention *a, char *pages, const float *key, int64_t key_token, int64_t key_head,
                         const float *value, int64_t value_token, int64_t value_head, int64_t num_tokens,
                         const int64_t *write_pages, const int64_t *write_offsets) {
    long words = CBGEN(key_words)(a), bytes = CBGEN(word_bytes)(CBGEN(key_kind)(a));
#pragma omp parallel for schedule(static) if (num_tokens > 8)
    for (long t = 0; t < num_tokens; t++) {
        char *page = pages + write_pages[t] * a->page_bytes, row[a->padded_dim * 4];
        int64_t slot = write_offsets[t];
        if (t + 1 < num_tokens) CBGEN(fetch_places)(a, pages + write_pages[t + 1] * a->page_bytes, write_offsets[t + 1]);
        for (long h = 0; h < a->kv_heads; h++) {
            float *key_scale = (float *)(page + a->key_scales) + h * a->slots + slot;
            float *value_scale = (float *)(page + a->value_scales) + h * a->slots + slot;
            CBGEN(convert_row)(a->kind, key + t * key_token + h * key_head, a->dim, a->padded_dim, row, key_scale);
            for (long i = 0; a->kind == KV_INT8 && i < words * 4; i++) row[i] ^= -128; /* 128 added */
            CBGEN(spread)(bytes, row, words, CBGEN(key_place)(a, page, slot, h));
            CBGEN(convert_row)(a->kind, value + t * value_token + h * value_head, a->dim, a->padded_dim, row, value_scale);
            CBGEN(put_value)(a, slot, row, page + a->values + h * CBGEN(value_bytes)(a));
        }
    }
}
