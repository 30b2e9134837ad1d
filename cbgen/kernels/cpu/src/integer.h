/* y = x W^T + bias with both in integers: x is quantized row by row, W column by column, and the sums are exact, so a row's
   result depends neither on its neighbours nor on the order of anything.

       a row of x   levels int16 [depth] | scale float32                  |level| <= limit
       W [n, k]     levels int8, and a scale per output                   |level| <= 127

   Levels of x are 16 bits wide because the widest exact product of AVX2 (pairs of int16 summed to an int32) takes them at
   the speed of 8 bits. `limit` is as large as sums over k cannot overflow with. For levels of 8 bits see grouped.h.

   packed weights: panels of PANEL outputs, [depth / 2, PANEL, 2]; depth is k filled up with zeros to a multiple of 4. */

INLINE int64_t CBGEN(depth_of)(int64_t k) { return (k + 3) / 4 * 4; }

/* Sums of products of the pairs of int16 in two vectors. */
INLINE vi CBGEN(pairs)(vi sums, vi x, vi w) {
#if CBGEN_LANES == 16 && defined(CBGEN_VNNI)
    return (vi)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)x, (__m512i)w);
#elif CBGEN_LANES == 16
    return sums + (vi)_mm512_madd_epi16((__m512i)x, (__m512i)w);
#elif CBGEN_LANES == 8
    return sums + (vi)_mm256_madd_epi16((__m256i)x, (__m256i)w);
#else
    vi low = (x << 16 >> 16) * (w << 16 >> 16), high = (x >> 16) * (w >> 16);
    return sums + low + high;
#endif
}

/* LANES pairs of int8 as pairs of int16. */
INLINE vi CBGEN(widen)(const int8_t *p) {
#if CBGEN_LANES == 16
    return (vi)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)p));
#elif CBGEN_LANES == 8
    return (vi)_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)p));
#else
    vi out;
    for (int lane = 0; lane < LANES; lane++) out[lane] = (int)((uint32_t)(uint16_t)p[2 * lane] | (uint32_t)(uint16_t)p[2 * lane + 1] << 16);
    return out;
#endif
}

/* One block of rows times a piece of a panel. */
INLINE void CBGEN(integer_tile)(const int rows, int64_t k, const char *x, int64_t row_bytes, const int8_t *panel,
                                struct ahead ahead, int32_t *to, int resume) {
    vi sums[ROWS][VECTORS];
    const int64_t steps = k / 2;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = resume ? CBGEN(load_int)(to + r * PANEL + v * LANES) : (vi){0};
    for (int64_t at = 0; at < steps; at += ahead.every) {
        fetch(&ahead);
        int64_t end = at + ahead.every < steps ? at + ahead.every : steps;
        for (int64_t i = at; i < end; i++) {
            vi w[VECTORS];
            for (int v = 0; v < VECTORS; v++) w[v] = CBGEN(widen)(panel + (i * VECTORS + v) * 2 * LANES);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                vi own = CBGEN(splat_word)(x + r * row_bytes + i * 4);
                for (int v = 0; v < VECTORS; v++) sums[r][v] = CBGEN(pairs)(sums[r][v], own, w[v]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) memcpy(to + r * PANEL + v * LANES, &sums[r][v], sizeof(vi));
}

static void CBGEN(integer_rows)(int64_t rows, int64_t k, const char *x, int64_t row_bytes, const int8_t *panel,
                                struct ahead ahead, int32_t *to, int resume) {
#define CASE(n) case n: CBGEN(integer_tile)(n, k, x, row_bytes, panel, ahead, to, resume); return;
    switch (rows) { UP_TO_ROWS(CASE) }
#undef CASE
}

/* The scale of one output of a weight, from its [k] numbers; gives what one is multiplied by. */
INLINE float CBGEN(weight_scale)(const float *from, int64_t k, float *scale) {
    float most = 0;
    for (int64_t i = 0; i < k; i++) most = fabsf(from[i]) > most ? fabsf(from[i]) : most;
    *scale = most / 127;
    return CBGEN(level_factor)(most, 127);
}

/* weight [n, k] -> panels of [depth / near, PANEL, near] levels with `zero` added, and a scale per output. */
INLINE void CBGEN(pack_levels)(const float *weight, int64_t n, int64_t k, int64_t depth, const int64_t near, const int zero,
                               uint8_t *packed, float *scales) {
    int64_t panels = (n + PANEL - 1) / PANEL;
#pragma omp parallel for
    for (int64_t p = 0; p < panels; p++) {
        uint8_t *panel = packed + p * depth * PANEL;
        memset(panel, zero, depth * PANEL);
        for (int64_t c = 0; c < PANEL && p * PANEL + c < n; c++) {
            const float *from = weight + (p * PANEL + c) * k;
            float inverse = CBGEN(weight_scale)(from, k, scales + p * PANEL + c);
            for (int64_t i = 0; i < k; i++)
                panel[(i / near * PANEL + c) * near + i % near] = (uint8_t)(lrintf(from[i] * inverse) + zero);
        }
    }
}

EXPORT void CBGEN(integer_pack)(const float *weight, int64_t n, int64_t k, uint8_t *packed, float *scales) {
    CBGEN(pack_levels)(weight, n, k, CBGEN(depth_of)(k), 2, 0, packed, scales);
}

/* LANES levels as int16. */
INLINE void CBGEN(put_levels)(int16_t *to, vi whole) {
#if CBGEN_LANES == 8
    __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)whole), _mm256_extracti128_si256((__m256i)whole, 1));
    _mm_storeu_si128((void *)to, halves);
#else
    vu16 narrow = __builtin_convertvector(whole, vu16);
    memcpy(to, &narrow, sizeof narrow);
#endif
}

/* One row of x [k] -> its levels and scale. One with NaN or infinity has NaN for its scale. */
static void CBGEN(quantize_row)(const float *from, int64_t k, const float *scales_in, int64_t limit, int16_t *to) {
    int64_t depth = CBGEN(depth_of)(k);
    float largest = CBGEN(largest_size)(from, scales_in, k), scale = largest / limit;
    int usual = largest == largest;
    vf inverse = CBGEN(splat)(CBGEN(level_factor)(largest, limit));
    int16_t edge[LANES];
    for (int64_t i = 0; i < depth; i += LANES) {
        vi whole = CBGEN(round)((usual ? CBGEN(scaled_input)(from, scales_in, i, k) : (vf){0}) * inverse);
        CBGEN(put_levels)(depth - i < LANES ? edge : to + i, whole);
        if (depth - i < LANES) memcpy(to + i, edge, (depth - i) * 2);
    }
    memcpy(to + depth, &scale, 4);
}

/* One piece of one panel for up to M_BLOCK rows: see linear_piece. */
static void CBGEN(integer_piece)(int64_t m, int64_t k, const char *x, int64_t row_bytes, const int8_t *piece,
                                 const char *next, int32_t *to, int resume) {
    int64_t tiles = (m + ROWS - 1) / ROWS, steps = k / 2;
    struct ahead ahead = {next, tiles, 2 * PANEL};
    for (int64_t tile = 0; tile < tiles; tile++) {
        int64_t r = part_begin(tile, tiles, m), rows = part_begin(tile + 1, tiles, m) - r;
        ahead.at = next + (steps + tiles - 1) / tiles * tile * ahead.bytes;
        CBGEN(integer_rows)(rows, k, x + r * row_bytes, row_bytes, piece, ahead, to + r * PANEL, resume);
    }
}

/* What one panel of up to M_BLOCK rows gives in float32: out [m, width] from sums [m, PANEL] and the scales of the rows. */
static void CBGEN(integer_scaled)(const struct weight *w, int64_t panel, int64_t m, const int32_t *sums, const char *x,
                                  int64_t row_bytes, float *out, int64_t ldo) {
    int64_t column = panel * PANEL, width = w->n - column < PANEL ? w->n - column : PANEL;
    float scale[PANEL] = {0}, add[PANEL] = {0}, edge[PANEL], row_scale;
    memcpy(scale, w->scales + column, width * 4);
    if (w->bias) memcpy(add, w->bias + column, width * 4);
    for (int64_t r = 0; r < m; r++) {
        float *to = width == PANEL ? out + r * ldo + column : edge;
        memcpy(&row_scale, x + r * row_bytes + CBGEN(depth_of)(w->k) * 2, 4);
        for (int64_t c = 0; c < PANEL; c += LANES) {
            vf sum = __builtin_convertvector(CBGEN(load_int)(sums + r * PANEL + c), vf);
            CBGEN(put)(to + c, sum * (row_scale * CBGEN(load)(scale + c)) + CBGEN(load)(add + c));
        }
        if (width < PANEL) memcpy(out + r * ldo + column, edge, width * 4);
    }
}

/* One panel for up to M_BLOCK rows of x: out [m, n]. */
static void CBGEN(integer_panel)(const struct weight *w, int64_t panel, int64_t m, const char *x, int64_t row_bytes, float *out,
                                 int64_t ldo) {
    int64_t depth = CBGEN(depth_of)(w->k), last = (panel + 1) * PANEL >= w->n;
    int32_t sums[M_BLOCK * PANEL];
    const int8_t *own = (const int8_t *)w->packed + panel * depth * PANEL;
    for (int64_t begin = 0; begin < depth; begin += INTEGER_K_BLOCK) {
        int64_t part = depth - begin < INTEGER_K_BLOCK ? depth - begin : INTEGER_K_BLOCK;
        const int8_t *next = own + (begin + part < depth || !last ? begin + part : begin) * PANEL;
        CBGEN(integer_piece)(m, part, x + begin * 2, row_bytes, own + begin * PANEL, (const char *)next, sums, begin > 0);
    }
    CBGEN(integer_scaled)(w, panel, m, sums, x, row_bytes, out, ldo);
}
