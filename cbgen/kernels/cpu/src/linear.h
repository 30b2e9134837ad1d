/* y = x W^T + bias in float32, with W packed once:

      W [n, k]   ->   panels of P = VECTORS * LANES outputs, each [k, P]: what one step of the inner loop reads is together

   A block of ROWS rows of x times one panel stays in registers. Panels are worked on in chunks of CHUNK, cut into pieces
   of K_BLOCK, so that both a piece and the rows of x that pass over it stay near a core:

                 chunk 0           chunk 1              for each chunk, which a thread takes:
        k     +--+--+--+--+     +--+--+--+--+              for each block of M_BLOCK rows:
        |     |0 |1 |2 |3 |     |  |  |  |  |                 pieces in the order of their numbers,
        |     +--+--+--+--+     +--+--+--+--+                 each by all rows of the block
        v     |4 |5 |6 |7 |     |  |  |  |  |
              +--+--+--+--+     +--+--+--+--+

   Sums run over k in ascending order whatever the number of rows, so a row's result does not depend on its neighbours, to
   the last bit. */

#undef PANEL
#define PANEL (VECTORS * LANES)

/* sums [rows, PANEL] += x [rows, k] times k steps of a panel. */
INLINE void CBGEN(multiply)(const int rows, long k, const float *x, long ldx, const float *panel, vf sums[ROWS][VECTORS]) {
    for (long i = 0; i < k; i++) {
        vf left = CBGEN(load)(panel + i * PANEL), right = CBGEN(load)(panel + i * PANEL + LANES);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            vf own = CBGEN(splat)(x[r * ldx + i]);
            sums[r][0] += own * left;
            sums[r][1] += own * right;
        }
    }
}

INLINE void CBGEN(linear_tile)(const int rows, long k, const float *x, long ldx, const float *panel, struct ahead ahead,
                               const float *from, long ldf, float *to, long ldt) {
    vf sums[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = CBGEN(load)(from + r * ldf + v * LANES);
    for (long i = 0; i < k; i += ahead.every) {
        fetch(&ahead);
        CBGEN(multiply)(rows, k - i < ahead.every ? k - i : ahead.every, x + i, ldx, panel + i * PANEL, sums);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) CBGEN(put)(to + r * ldt + v * LANES, sums[r][v]);
}

/* to [rows, P] = from [rows, P] + x [rows, k] times a piece of a panel; `from` is one row for all when ldf is 0. */
static void CBGEN(linear_rows)(long rows, long k, const float *x, long ldx, const float *panel, struct ahead ahead,
                               const float *from, long ldf, float *to, long ldt) {
#define CASE(n) case n: CBGEN(linear_tile)(n, k, x, ldx, panel, ahead, from, ldf, to, ldt); return;
    switch (rows) { UP_TO_ROWS(CASE) }
#undef CASE
}

EXPORT long CBGEN(linear_panel)(void) { return PANEL; }

/* weight [n, k] -> packed [ceil(n / P), k, P], the last panel filled up with zeros. */
EXPORT void CBGEN(linear_pack)(const float *weight, long n, long k, float *packed) {
    long panels = (n + PANEL - 1) / PANEL;
#pragma omp parallel for
    for (long p = 0; p < panels; p++)
        for (long i = 0; i < k; i++)
            for (long c = 0; c < PANEL; c++)
                packed[(p * k + i) * PANEL + c] = p * PANEL + c < n ? weight[(p * PANEL + c) * k + i] : 0.0f;
}

/* One piece of one panel for up to M_BLOCK rows, in blocks of equally many: a last one of one row would take as long as
 * one of four. */
static void CBGEN(linear_piece)(long m, long k, const float *x, long ldx, const float *piece, const char *next,
                                const float *from, long ldf, float *to, long ldt) {
    long tiles = (m + ROWS - 1) / ROWS;
    struct ahead ahead = {next, tiles, PANEL * 4};
    for (long tile = 0; tile < tiles; tile++) {
        long r = part_begin(tile, tiles, m), rows = part_begin(tile + 1, tiles, m) - r;
        ahead.at = next + (k + tiles - 1) / tiles * tile * PANEL * 4;
        CBGEN(linear_rows)(rows, k, x + r * ldx, ldx, piece, ahead, from + r * ldf, ldf, to + r * ldt, ldt);
    }
}

/* `count` panels from `panel` on for up to M_BLOCK rows. Sums between two pieces wait in `sums`: rows of `out` can lie a
 * multiple of 4096 bytes apart, where the first-level cache holds but eight of them. */
static void CBGEN(linear_chunk)(long m, long k, long n, const float *x, long ldx, const float *panels, long panel, long count,
                                const char *next, const float *bias, float *out, long ldo) {
    float sums[CHUNK * M_BLOCK * PANEL];
    for (long begin = 0; begin < k; begin += K_BLOCK) {
        int first = begin == 0, last = begin + K_BLOCK >= k;
        long depth = last ? k - begin : K_BLOCK;
        for (long p = 0; p < count; p++) {
            const float *piece = panels + ((panel + p) * k + begin) * PANEL;
            const float *after = p + 1 < count ? piece + k * PANEL : piece + (depth - (count - 1) * k) * PANEL;
            long column = (panel + p) * PANEL, width = n - column < PANEL ? n - column : PANEL;
            float start[PANEL] = {0}, *own = sums + p * M_BLOCK * PANEL;
            if (first && bias) memcpy(start, bias + column, width * sizeof(float));
            int direct = last && width == PANEL;
            CBGEN(linear_piece)(m, depth, x + begin, ldx, piece, last && p + 1 == count ? next : (const char *)after,
                                first ? start : own, first ? 0 : PANEL, direct ? out + column : own, direct ? ldo : PANEL);
            if (last && !direct)
                for (long r = 0; r < m; r++) memcpy(out + r * ldo + column, own + r * PANEL, width * sizeof(float));
        }
    }
}

/* x [m, k] with ldx floats from row to row; out [m, n] with ldo; bias [n] or null. */
static void CBGEN(linear_f32)(const float *x, long ldx, long m, long k, long n, const float *packed, const float *bias,
                              float *out, long ldo) {
    long panels = (n + PANEL - 1) / PANEL, threads = THREADS;
    struct grid grid = grid_of(m, panels);
    uint64_t runs[threads * RUN];
    deal(runs, threads, grid.chunks);
#pragma omp parallel
    for (long i; (i = take_item(runs, threads, THREAD)) >= 0;)
        for (long block = 0; block < grid.blocks; block++) {
            long panel = i * grid.chunk, count = panels - panel < grid.chunk ? panels - panel : grid.chunk;
            long row = part_begin(block, grid.blocks, m), rows = part_begin(block + 1, grid.blocks, m) - row;
            /* What comes next: the same chunk for the next block, which is near by then, or the next chunk. */
            long next = block + 1 < grid.blocks || panel + count == panels ? panel : panel + count;
            CBGEN(linear_chunk)(rows, k, n, x + row * ldx, ldx, packed, panel, count, (const char *)(packed + next * k * PANEL),
                                bias, out + row * ldo, ldo);
        }
}
