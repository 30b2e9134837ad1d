/* What stands between the matrix products of a decoder layer, in one pass over memory each. */

/* out = x / sqrt(mean(x^2) + epsilon) * weight, row by row; x and out [rows, dim]. */
EXPORT void CBGEN(rms_norm)(const float *x, int64_t ldx, int64_t rows, int64_t dim, const float *weight, float epsilon,
                            float *out, int64_t ldo) {
#pragma omp parallel for schedule(static) if (rows * dim > 4096)
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * ldx;
        float *to = out + row * ldo;
        vf squares = {0};
        float rest = 0;
        int64_t whole = dim / LANES * LANES;
        for (int64_t i = 0; i < whole; i += LANES) {
            vf v = CBGEN(load)(from + i);
            squares += v * v;
        }
        for (int64_t i = whole; i < dim; i++) rest += from[i] * from[i];
        float scale = 1 / sqrtf((CBGEN(sum)(squares) + rest) / dim + epsilon);
        for (int64_t i = 0; i < dim; i++) to[i] = from[i] * scale * weight[i];
    }
}

/* out [rows, width] = act(gate) * up, both in x [rows, 2 * width], with ldx floats from row to row. */
EXPORT void CBGEN(gated)(const float *x, int64_t ldx, int64_t rows, int64_t width, int64_t activation, float *out) {
#pragma omp parallel for schedule(static) if (rows * width > 4096)
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = x + row * ldx, *up = gate + width;
        float *to = out + row * width;
        for (int64_t i = 0; i < width; i += LANES) {
            float edge[3][LANES] = {{0}};
            int part = width - i < LANES;
            if (part) memcpy(edge[0], gate + i, (width - i) * 4), memcpy(edge[1], up + i, (width - i) * 4);
            vf g = CBGEN(load)(part ? edge[0] : gate + i), u = CBGEN(load)(part ? edge[1] : up + i);
            vf y = activation == SILU ? g / (1.0f + CBGEN(exp)(-g))
                                      : 0.5f * g * (1.0f + CBGEN(tanh)(0.7978845608f * (g + 0.044715f * g * g * g)));
            y *= u;
            CBGEN(put)(part ? edge[2] : to + i, y);
            if (part) memcpy(to + i, edge[2], (width - i) * 4);
        }
    }
}
