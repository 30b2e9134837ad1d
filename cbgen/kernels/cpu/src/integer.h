/* y = x W^T + bias with both in integers: x is quantized row by row, W column by column, and the sums are exact, so a row's
   result depends neither on its neighbours nor on the order of anything.

       x [m, k] * scales_in [k]  ->  levels, int16, and a scale per row       |level| <= limit
       W [n, k]                  ->  int8 and a scale per output             |level| <= 127

   Levels of x are 16 bits wide because the widest exact product of AVX2 (pairs of int16 summed to an int32) takes them at
   the speed of 8 bits. `limit` is 127 for 8-bit activations and otherwise as large as sums over k cannot overflow with.
   Processors with VNNI have a product of four bytes: there 8-bit activations lie as unsigned bytes, 128 added, and what
   that adds to a sum, 128 times the sum of the weights, is taken off at the end.

   packed weights: panels of PANEL outputs, [k / QUAD, PANEL, QUAD], k filled up with zeros to a multiple of 4. QUAD is 2 for
   int16 pairs and 4 for bytes. */

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

/* Sums of products of the four unsigned bytes of x and signed bytes of w. */
INLINE vi CBGEN(quads)(vi sums, vi x, vi w) {
#if CBGEN_LANES == 16 && defined(CBGEN_VNNI)
    return (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)x, (__m512i)w);
#else
    for (int byte = 0; byte < 4; byte++) {
        vi unsigned_part = x >> (8 * byte) & 255;
        sums += unsigned_part * (w << (24 - 8 * byte) >> 24);
    }
    return sums;
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

INLINE vi CBGEN(load_int)(const void *p) {
    vi v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* One block of rows times one panel; x [rows, ldx] in int16 or, with `bytes`, in uint8. */
INLINE void CBGEN(integer_tile)(const int rows, const int bytes, int64_t k, const char *x, int64_t row_bytes,
                                const int8_t *panel, struct ahead ahead, int32_t *to, int resume) {
    vi sums[ROWS][VECTORS];
    const int64_t steps = bytes ? k / 4 : k / 2, width = (bytes ? 4 : 2) * LANES;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = resume ? CBGEN(load_int)(to + r * PANEL + v * LANES) : (vi){0};
    for (int64_t at = 0; at < steps; at += ahead.every) {
        fetch(&ahead);
        int64_t end = at + ahead.every < steps ? at + ahead.every : steps;
        for (int64_t i = at; i < end; i++) {
            vi w[VECTORS];
            for (int v = 0; v < VECTORS; v++) {
                const int8_t *from = panel + (i * VECTORS + v) * width;
                w[v] = bytes ? CBGEN(load_int)(from) : CBGEN(widen)(from);
            }
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                int32_t word;
                memcpy(&word, x + r * row_bytes + i * 4, 4);
                vi own = (vi){0} + word;
                for (int v = 0; v < VECTORS; v++)
                    sums[r][v] = bytes ? CBGEN(quads)(sums[r][v], own, w[v]) : CBGEN(pairs)(sums[r][v], own, w[v]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) memcpy(to + r * PANEL + v * LANES, &sums[r][v], sizeof(vi));
}

static void CBGEN(integer_rows)(int64_t rows, int bytes, int64_t k, const char *x, int64_t row_bytes, const int8_t *panel,
                                struct ahead ahead, int32_t *to, int resume) {
#define CASE(n) \
    case n: \
        if (bytes) CBGEN(integer_tile)(n, 1, k, x, row_bytes, panel, ahead, to, resume); \
        else CBGEN(integer_tile)(n, 0, k, x, row_bytes, panel, ahead, to, resume); \
        return;
    switch (rows) { UP_TO_ROWS(CASE) }
#undef CASE
}

/* Whether 8-bit activations are fastest as bytes here. */
EXPORT int64_t CBGEN(integer_bytes)(void) {
#ifdef CBGEN_VNNI
    return 1;
#else
    return 0;
#endif
}

/* weight [n, k] -> packed, a scale per output and the sum of its levels. */
EXPORT void CBGEN(integer_pack)(const float *weight, int64_t n, int64_t k, int64_t bytes, int8_t *packed, float *scales,
                                int32_t *level_sums) {
    int64_t panels = (n + PANEL - 1) / PANEL, quad = bytes ? 4 : 2, depth = (k + 3) / 4 * 4;
#pragma omp parallel for
    for (int64_t p = 0; p < panels; p++) {
        memset(packed + p * depth * PANEL, 0, depth * PANEL);
        for (int64_t c = 0; c < PANEL && p * PANEL + c < n; c++) {
            int64_t output = p * PANEL + c;
            const float *from = weight + output * k;
            float most = 0;
            for (int64_t i = 0; i < k; i++) most = fabsf(from[i]) > most ? fabsf(from[i]) : most;
            float inverse = most > 0 ? 127 / most : 0;
            int32_t total = 0;
            for (int64_t i = 0; i < k; i++) {
                int8_t level = (int8_t)lrintf(from[i] * inverse);
                packed[p * depth * PANEL + (i / quad * PANEL + c) * quad + i % quad] = level;
                total += level;
            }
            scales[output] = most / 127, level_sums[output] = total;
        }
    }
}

/* LANES levels as int16, or as bytes with 128 added. */
INLINE void CBGEN(put_levels)(char *to, const int bytes, vi whole) {
    if (bytes) {
        vu8 narrow = __builtin_convertvector(whole + 128, vu8);
        memcpy(to, &narrow, sizeof narrow);
        return;
    }
#if CBGEN_LANES == 8
    __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)whole), _mm256_extracti128_si256((__m256i)whole, 1));
    _mm_storeu_si128((void *)to, halves);
#else
    vu16 narrow = __builtin_convertvector(whole, vu16);
    memcpy(to, &narrow, sizeof narrow);
#endif
}

/* One row of x [k] -> levels [depth], int16 or uint8, and its scale. One with NaN or infinity has NaN for its scale. */
static void CBGEN(quantize_row)(const float *from, int64_t k, const float *scales_in, int64_t limit, int bytes, void *levels,
                                float *scale) {
    int64_t depth = (k + 3) / 4 * 4;
    float largest = CBGEN(largest_size)(from, scales_in, k);
    int usual = largest == largest;
    vf inverse = CBGEN(splat)(usual && largest > 0 ? limit / largest : 0);
    *scale = largest / limit;
    char *to = levels, edge[2 * LANES];
    int64_t size = bytes ? 1 : 2;
    for (int64_t i = 0; i < depth; i += LANES) {
        vf x = usual && i < k ? CBGEN(scaled_input)(from, scales_in, i, k) : (vf){0};
        vi whole = CBGEN(round)(x * inverse);
        if (depth - i < LANES) {
            CBGEN(put_levels)(edge, bytes, whole);
            memcpy(to + i * size, edge, (depth - i) * size);
        } else {
            CBGEN(put_levels)(to + i * size, bytes, whole);
        }
    }
}

/* One piece of one panel for up to M_BLOCK rows: see linear_piece. */
static void CBGEN(integer_piece)(int64_t m, int bytes, int64_t k, const char *x, int64_t row_bytes, const int8_t *piece,
                                 const char *next, int32_t *to, int resume) {
    int64_t tiles = (m + ROWS - 1) / ROWS, steps = bytes ? k / 4 : k / 2;
    struct ahead ahead = {next, tiles, (bytes ? 4 : 2) * PANEL};
    for (int64_t tile = 0; tile < tiles; tile++) {
        int64_t r = part_begin(tile, tiles, m), rows = part_begin(tile + 1, tiles, m) - r;
        ahead.at = next + (steps + tiles - 1) / tiles * tile * ahead.bytes;
        CBGEN(integer_rows)(rows, bytes, k, x + r * row_bytes, row_bytes, piece, ahead, to + r * PANEL, resume);
    }
}

/* What one panel of up to M_BLOCK rows gives in float32: out [m, width]; scales, offsets and bias [width]. */
static void CBGEN(integer_scaled)(int64_t m, int64_t width, const int32_t *sums, const float *row_scales, const float *scales,
                                  const int32_t *offsets, const float *bias, float *out, int64_t ldo) {
    float scale[PANEL] = {0}, add[PANEL] = {0}, edge[PANEL];
    int32_t offset[PANEL] = {0};
    memcpy(scale, scales, width * 4);
    if (bias) memcpy(add, bias, width * 4);
    if (offsets) memcpy(offset, offsets, width * 4);
    for (int64_t r = 0; r < m; r++) {
        float *to = width == PANEL ? out + r * ldo : edge;
        for (int64_t c = 0; c < PANEL; c += LANES) {
            vi sum = CBGEN(load_int)(sums + r * PANEL + c) - 128 * CBGEN(load_int)(offset + c);
            vf factor = row_scales[r] * CBGEN(load)(scale + c);
            CBGEN(put)(to + c, __builtin_convertvector(sum, vf) * factor + CBGEN(load)(add + c));
        }
        if (width < PANEL) memcpy(out + r * ldo, edge, width * 4);
    }
}

/* out [m, n] from levels [m, depth] and packed weights. */
static void CBGEN(integer_linear)(const struct weight *w, const void *levels, const float *row_scales, int64_t m, float *out,
                                  int64_t ldo) {
    int64_t panels = (w->n + PANEL - 1) / PANEL, depth = (w->k + 3) / 4 * 4, threads = THREADS, size = w->bytes ? 1 : 2;
    struct grid grid = grid_of(m, panels);
    uint64_t runs[threads * RUN];
    deal(runs, threads, grid.chunks);
#pragma omp parallel
    for (int64_t i; (i = take_item(runs, threads, THREAD)) >= 0;)
        for (int64_t at = 0; at < grid.blocks * grid.chunk; at++) {
            int64_t block = at / grid.chunk, p = i * grid.chunk + at % grid.chunk, column = p * PANEL;
            if (p >= panels) continue;
            int64_t width = w->n - column < PANEL ? w->n - column : PANEL, row = part_begin(block, grid.blocks, m);
            int64_t rows = part_begin(block + 1, grid.blocks, m) - row;
            int32_t sums[M_BLOCK * PANEL];
            const int8_t *panel = (const int8_t *)w->packed + p * depth * PANEL;
            for (int64_t begin = 0; begin < depth; begin += INTEGER_K_BLOCK) {
                int64_t part = depth - begin < INTEGER_K_BLOCK ? depth - begin : INTEGER_K_BLOCK;
                const int8_t *next = panel + (begin + part < depth || p + 1 < panels ? begin + part : begin) * PANEL;
                CBGEN(integer_piece)(rows, w->bytes, part, (const char *)levels + (row * depth + begin) * size, depth * size,
                                     panel + begin * PANEL, (const char *)next, sums, begin > 0);
            }
            CBGEN(integer_scaled)(rows, width, sums, row_scales + row, w->scales + column, w->bytes ? w->level_sums + column : 0,
                                  w->bias ? w->bias + column : 0, out + row * ldo + column, ldo);
        }
}
