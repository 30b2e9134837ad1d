/* What stands between the matrix products of a decoder layer, row by row. */

/* out = x / sqrt(mean(x^2) + epsilon) * weight, all [dim]; out may be x. */
static void CBGEN(norm_row)(const float *x, int64_t dim, const float *weight, float epsilon, float *out) {
    vf squares = {0};
    float rest = 0;
    int64_t whole = dim / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        vf v = CBGEN(load)(x + i);
        squares += v * v;
    }
    for (int64_t i = whole; i < dim; i++) rest += x[i] * x[i];
    float scale = 1 / sqrtf((CBGEN(sum)(squares) + rest) / dim + epsilon);
    for (int64_t i = 0; i < whole; i += LANES) CBGEN(put)(out + i, CBGEN(load)(x + i) * scale * CBGEN(load)(weight + i));
    for (int64_t i = whole; i < dim; i++) out[i] = x[i] * scale * weight[i];
}

/* to = a + b, all [count] */
static void CBGEN(add_row)(const float *a, const float *b, int64_t count, float *to) {
    int64_t whole = count / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) CBGEN(put)(to + i, CBGEN(load)(a + i) + CBGEN(load)(b + i));
    for (int64_t i = whole; i < count; i++) to[i] = a[i] + b[i];
}

/* x / (1 + e^-x): both signs from e^-|x|, which cannot overflow. */
INLINE vf CBGEN(silu)(vf x) {
    vf power = CBGEN(exp_below)(CBGEN(choose)(x > 0.0f, -x, x));
    return x * CBGEN(choose)(x > 0.0f, CBGEN(splat)(1.0f), power) / (1.0f + power);
}

INLINE vf CBGEN(activate)(int64_t activation, vf x) {
    if (activation == SILU) return CBGEN(silu)(x);
    return 0.5f * x * (1.0f + CBGEN(tanh)(0.7978845608f * (x + 0.044715f * x * x * x)));
}

/* out = act(gate) * up, all [width] */
static void CBGEN(gated_row)(const float *gate, const float *up, int64_t width, int64_t activation, float *out) {
    int64_t whole = width / LANES * LANES, part = (width - whole) * 4;
    for (int64_t i = 0; i < whole; i += LANES)
        CBGEN(put)(out + i, CBGEN(activate)(activation, CBGEN(load)(gate + i)) * CBGEN(load)(up + i));
    if (part) {
        float edge[3][LANES] = {{0}};
        memcpy(edge[0], gate + whole, part), memcpy(edge[1], up + whole, part);
        CBGEN(put)(edge[2], CBGEN(activate)(activation, CBGEN(load)(edge[0])) * CBGEN(load)(edge[1]));
        memcpy(out + whole, edge[2], part);
    }
}

/* x and out [rows, dim], with ldx and ldo floats from row to row. */
EXPORT void CBGEN(rms_norm)(const float *x, int64_t ldx, int64_t rows, int64_t dim, const float *weight, float epsilon,
                            float *out, int64_t ldo) {
#pragma omp parallel for schedule(static) if (rows * dim > 4096)
    for (int64_t row = 0; row < rows; row++) CBGEN(norm_row)(x + row * ldx, dim, weight, epsilon, out + row * ldo);
}

/* out [rows, width] = act(gate) * up, both in x [rows, 2 * width], with ldx floats from row to row. */
EXPORT void CBGEN(gated)(const float *x, int64_t ldx, int64_t rows, int64_t width, int64_t activation, float *out) {
#pragma omp parallel for schedule(static) if (rows * width > 4096)
    for (int64_t row = 0; row < rows; row++)
        CBGEN(gated_row)(x + row * ldx, x + row * ldx + width, width, activation, out + row * width);
}
