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
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if CBGEN_LANES == 16
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
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

/* x [m, k] -> levels [m, depth], int16 or uint8, and a scale per row. scales_in [k] or null. A row with NaN or infinity has
 * that for its scale. */
static void CBGEN(integer_quantize)(const float *x, int64_t ldx, int64_t m, int64_t k, const float *scales_in, int64_t limit,
                                    int64_t bytes, void *levels, float *scales) {
    int64_t depth = (k + 3) / 4 * 4;
#pragma omp parallel for schedule(static) if (m * k > 4096)
    for (int64_t row = 0; row < m; row++) {
        const float *from = x + row * ldx;
        float most = 0, strange = 0;
        for (int64_t i = 0; i < k; i++) {
            float size = fabsf(scales_in ? from[i] * scales_in[i] : from[i]);
            most = size > most ? size : most;
            strange += size * 0; /* NaN for NaN and infinity, and otherwise 0 */
        }
        float inverse = most > 0 && strange == 0 ? limit / most : 0;
        scales[row] = strange == 0 ? most / limit : NAN;
        int16_t *to = (int16_t *)levels + row * depth;
        uint8_t *byte = (uint8_t *)levels + row * depth;
        const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, found in the low bits */
        for (int64_t i = 0; i < k; i++) {
            float level = (strange == 0 ? from[i] : 0) * (scales_in ? scales_in[i] : 1) * inverse + magic;
            int32_t bits;
            memcpy(&bits, &level, 4);
            int32_t whole = bits - 0x4B400000;
            if (bytes) byte[i] = (uint8_t)(whole + 128);
            else to[i] = (int16_t)whole;
        }
        for (int64_t i = k; i < depth; i++)
            if (bytes) byte[i] = 128;
            else to[i] = 0;
    }
}

/* out [m, n] from levels [m, depth] and packed weights. */
static void CBGEN(integer_linear)(const void *levels, const float *row_scales, int64_t m, int64_t k, int64_t n, int64_t bytes,
                                  const int8_t *packed, const float *scales, const int32_t *level_sums, const float *bias,
                                  float *out, int64_t ldo) {
    int64_t panels = (n + PANEL - 1) / PANEL, blocks = (m + M_BLOCK - 1) / M_BLOCK, depth = (k + 3) / 4 * 4;
    int64_t row_bytes = depth * (bytes ? 1 : 2);
#pragma omp parallel for collapse(2) schedule(dynamic, 4)
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t p = 0; p < panels; p++) {
            int32_t sums[M_BLOCK * PANEL];
            int64_t first = block * M_BLOCK, rows = m - first < M_BLOCK ? m - first : M_BLOCK, column = p * PANEL;
            int64_t width = n - column < PANEL ? n - column : PANEL;
            const int8_t *panel = packed + p * depth * PANEL;
            for (int64_t begin = 0; begin < depth; begin += INTEGER_K_BLOCK) {
                int64_t part = depth - begin < INTEGER_K_BLOCK ? depth - begin : INTEGER_K_BLOCK;
                int more = begin + part < depth || p + 1 < panels;
                struct ahead ahead = {(const char *)panel + (more ? begin + part : begin) * PANEL, (rows + ROWS - 1) / ROWS, 2 * PANEL};
                if (bytes) ahead.bytes = 4 * PANEL;
                int64_t steps = bytes ? part / 4 : part / 2;
                for (int64_t r = 0; r < rows; r += ROWS, ahead.at += (steps + ahead.every - 1) / ahead.every * ahead.bytes)
                    CBGEN(integer_rows)(rows - r < ROWS ? rows - r : ROWS, bytes, part,
                                        (const char *)levels + (first + r) * row_bytes + begin * (bytes ? 1 : 2), row_bytes,
                                        panel + begin * PANEL, ahead, sums + r * PANEL, begin > 0);
            }
            for (int64_t r = 0; r < rows; r++)
                for (int64_t c = 0; c < width; c++) {
                    int32_t sum = sums[r * PANEL + c] - (bytes ? 128 * level_sums[column + c] : 0);
                    float y = sum * (row_scales[first + r] * scales[column + c]);
                    out[(first + r) * ldo + column + c] = bias ? y + bias[column + c] : y;
                }
        }
}
