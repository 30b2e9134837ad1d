/* y = x W^T + bias in bytes. As in integer.h, but each GROUP numbers of a row of x have a scale of their own, so that a large
   one among them costs only its neighbours precision:

       a row of x   levels int8 [groups, GROUP] | scales float32 [groups] | starts int32 [groups]
       W [n, k]     levels [-127, 127] as unsigned bytes, 128 added, and a scale per output

       y = scale of W * sum over groups of (scale of the group * sum of levels of W * levels of x) + bias

   Sums within a group are exact, and groups are added in ascending order, so a row's result does not depend on its
   neighbours. The product of four bytes takes one side unsigned: what the 128 adds, -128 times the
   levels of x, is where the sum of a group starts. k is filled up with levels 0 to whole groups. */

INLINE int64_t CBGEN(groups_of)(int64_t k) { return (k + GROUP - 1) / GROUP; }

#define vs CBGEN(vs)
typedef int16_t vs __attribute__((vector_size(4 * LANES)));
#define vus CBGEN(vus)
typedef uint16_t vus __attribute__((vector_size(4 * LANES)));

/* Sums of products of the four unsigned bytes of w and signed bytes of x. */
INLINE vi CBGEN(quads)(vi sums, vi w, vi x) {
#if defined(CBGEN_VNNI)
    return (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, (__m512i)x);
#else
    vi even = CBGEN(pairs)(sums, (vi)((vs)x << 8 >> 8), w & 0x00FF00FF);
    return CBGEN(pairs)(even, (vi)((vs)x >> 8), (vi)((vus)w >> 8));
#endif
}

/* A block of rows times one panel: to [rows, PANEL] = what comes of it, with scales and bias [PANEL]. */
INLINE void CBGEN(grouped_tile)(const int rows, int64_t groups, const char *x, int64_t row_bytes, const uint8_t *panel,
                                struct ahead ahead, const float *scales, const float *bias, float *to, int64_t ldt) {
    const char *row_scales = x + groups * GROUP, *starts = row_scales + groups * 4;
    vf totals[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) totals[r][v] = (vf){0};
    for (int64_t g = 0; g < groups; g++) {
        vi sums[ROWS][VECTORS];
        fetch(&ahead);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < VECTORS; v++) sums[r][v] = CBGEN(splat_word)(starts + r * row_bytes + g * 4);
        for (int i = 0; i < GROUP; i += 4, panel += 4 * PANEL) {
            vi w[VECTORS];
            for (int v = 0; v < VECTORS; v++) w[v] = CBGEN(load_int)(panel + v * 4 * LANES);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                vi own = CBGEN(splat_word)(x + r * row_bytes + g * GROUP + i);
                for (int v = 0; v < VECTORS; v++) sums[r][v] = CBGEN(quads)(sums[r][v], w[v], own);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            vf scale = (vf)CBGEN(splat_word)(row_scales + r * row_bytes + g * 4);
            for (int v = 0; v < VECTORS; v++) totals[r][v] += __builtin_convertvector(sums[r][v], vf) * scale;
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++)
            CBGEN(put)(to + r * ldt + v * LANES, totals[r][v] * CBGEN(load)(scales + v * LANES) + CBGEN(load)(bias + v * LANES));
}

static void CBGEN(grouped_rows)(int64_t rows, int64_t groups, const char *x, int64_t row_bytes, const uint8_t *panel,
                                struct ahead ahead, const float *scales, const float *bias, float *to, int64_t ldt) {
#define CASE(n) case n: CBGEN(grouped_tile)(n, groups, x, row_bytes, panel, ahead, scales, bias, to, ldt); return;
    switch (rows) { UP_TO_HALF(CASE) }
#undef CASE
}

/* Whether the product of four bytes is one instruction here, the fastest there is. */
EXPORT int64_t CBGEN(multiplies_bytes)(void) {
#ifdef CBGEN_VNNI
    return 1;
#else
    return 0;
#endif
}

EXPORT void CBGEN(grouped_pack)(const float *weight, int64_t n, int64_t k, uint8_t *packed, float *scales) {
    CBGEN(pack_levels)(weight, n, k, CBGEN(groups_of)(k) * GROUP, 4, 128, packed, scales);
}

/* One row of x [k] -> its levels, scales and starts. A group with NaN or infinity has NaN for its scale. */
static void CBGEN(group_row)(const float *from, int64_t k, const float *scales_in, char *to) {
    int64_t groups = CBGEN(groups_of)(k);
    float *scales = (float *)(to + groups * GROUP);
    int32_t *starts = (int32_t *)(scales + groups);
    for (int64_t g = 0; g < groups; g++) {
        vf x[GROUP / LANES];
        vi most = {0}, total = {0};
        for (int v = 0; v < GROUP / LANES; v++) {
            x[v] = CBGEN(scaled_input)(from, scales_in, g * GROUP + v * LANES, k);
            most = CBGEN(max_int)(CBGEN(size_bits)(x[v]), most);
        }
        float largest = CBGEN(largest_of_bits)(most);
        vf inverse = CBGEN(splat)(CBGEN(level_factor)(largest, 127));
        for (int v = 0; v < GROUP / LANES; v++) {
            vi whole = largest == largest ? CBGEN(round)(x[v] * inverse) : (vi){0};
            vu8 narrow = __builtin_convertvector(whole, vu8);
            memcpy(to + g * GROUP + v * LANES, &narrow, sizeof narrow);
            total += whole;
        }
        scales[g] = largest / 127, starts[g] = -128 * CBGEN(sum_int)(total);
    }
}

/* One panel for up to M_BLOCK rows: out [m, width]. */
static void CBGEN(grouped_panel)(const struct weight *w, int64_t panel, int64_t m, const char *x, int64_t row_bytes, float *out,
                                 int64_t ldo) {
    int64_t groups = CBGEN(groups_of)(w->k), bytes = groups * GROUP * PANEL, column = panel * PANEL;
    int64_t width = w->n - column < PANEL ? w->n - column : PANEL, last = column + PANEL >= w->n;
    int64_t most = ROWS / 2, tiles = (m + most - 1) / most;
    float scale[PANEL] = {0}, add[PANEL] = {0}, edge[ROWS / 2 * PANEL];
    memcpy(scale, w->scales + column, width * 4);
    if (w->bias) memcpy(add, w->bias + column, width * 4);
    const uint8_t *own = (const uint8_t *)w->packed + panel * bytes;
    struct ahead ahead = {0, 1, (bytes / groups / 64 + tiles - 1) / tiles * 64};
    for (int64_t tile = 0; tile < tiles; tile++) {
        int64_t r = part_begin(tile, tiles, m), rows = part_begin(tile + 1, tiles, m) - r;
        float *to = width < PANEL ? edge : out + r * ldo + column;
        ahead.at = (const char *)own + (last ? 0 : bytes) + part_begin(tile, tiles, bytes);
        CBGEN(grouped_rows)(rows, groups, x + r * row_bytes, row_bytes, own, ahead, scale, add, to, width < PANEL ? PANEL : ldo);
        for (int64_t i = 0; width < PANEL && i < rows; i++) memcpy(out + (r + i) * ldo + column, edge + i * PANEL, width * 4);
    }
}
