/* Vectors of one instruction set. Included once for each of them, with CBGEN_ISA (plain, avx2 or avx512) and CBGEN_LANES
 * (4, 8 or 16 floats in a register) defined; every function is named by CBGEN(name) and so exists once per set. */

#undef CBGEN
#undef CBGEN_JOIN
#undef CBGEN_JOIN2
#define CBGEN_JOIN2(name, isa) name##_##isa
#define CBGEN_JOIN(name, isa) CBGEN_JOIN2(name, isa)
#define CBGEN(name) CBGEN_JOIN(name, CBGEN_ISA)

/* The largest block of outputs held in registers: ROWS x VECTORS sums, beside VECTORS operands and a broadcast one. */
#undef ROWS
#undef VECTORS
#undef LANES
#define LANES CBGEN_LANES
#define VECTORS 2
#define ROWS (LANES == 16 ? 12 : 6)
/* A case for each number of rows, up to half of ROWS or all of it: a loop over them is unrolled for a constant alone. */
#undef UP_TO_HALF
#undef UP_TO_ROWS
#if CBGEN_LANES == 16
#define UP_TO_HALF(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#define UP_TO_ROWS(CASE) UP_TO_HALF(CASE) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#else
#define UP_TO_HALF(CASE) CASE(1) CASE(2) CASE(3)
#define UP_TO_ROWS(CASE) UP_TO_HALF(CASE) CASE(4) CASE(5) CASE(6)
#endif

#define vf CBGEN(vf)
#define vi CBGEN(vi)
typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
#define vu16 CBGEN(vu16)
typedef uint16_t vu16 __attribute__((vector_size(2 * LANES)));
#define vu8 CBGEN(vu8)
typedef uint8_t vu8 __attribute__((vector_size(LANES)));
#undef vfu
#define vfu CBGEN(vfu)
typedef float vfu __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE vf CBGEN(load)(const float *p) { return *(const vfu *)p; }
INLINE void CBGEN(put)(float *p, vf v) { *(vfu *)p = v; }
INLINE vf CBGEN(splat)(float x) { return x - (vf){0}; } /* and not plus: -0 + 0 is +0, so that sum would have to be worked out */

/* LANES integers at p. */
INLINE vi CBGEN(load_int)(const void *p) {
    vi v;
    memcpy(&v, p, sizeof v);
    return v;
}
/* The four bytes at p in every lane. */
INLINE vi CBGEN(splat_word)(const void *p) {
    int32_t word;
    memcpy(&word, p, 4);
    return (vi){0} + word;
}

/* Of all lanes; the intrinsics halve a vector four times, where a loop would go through it lane by lane. */
INLINE float CBGEN(sum)(vf v) {
#if CBGEN_LANES == 16
    return _mm512_reduce_add_ps((__m512)v);
#else
    float total = 0;
    for (int lane = 0; lane < LANES; lane++) total += v[lane];
    return total;
#endif
}

INLINE int32_t CBGEN(sum_int)(vi v) {
#if CBGEN_LANES == 16
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t total = 0;
    for (int lane = 0; lane < LANES; lane++) total += v[lane];
    return total;
#endif
}

INLINE float CBGEN(largest)(vf v) {
#if CBGEN_LANES == 16
    return _mm512_reduce_max_ps((__m512)v);
#else
    float best = v[0];
    for (int lane = 1; lane < LANES; lane++) best = v[lane] > best ? v[lane] : best;
    return best;
#endif
}

INLINE vf CBGEN(choose)(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
/* The larger; b if either is NaN. */
INLINE vf CBGEN(max)(vf a, vf b) {
#if CBGEN_LANES == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif CBGEN_LANES == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return CBGEN(choose)(a > b, a, b);
#endif
}

/* To the nearest whole number, of |x| below 2^22. */
INLINE vi CBGEN(round)(vf x) {
    const vf magic = CBGEN(splat)(12582912.0f); /* 1.5 * 2^23: adding it rounds, and the low bits are the number */
    return (vi)(x + magic) - (vi)magic;
}

/* e^x for x <= 0, to about three units in the last place; 0 below -87, where it would leave the normal numbers. NaN stays NaN.
 * x = n ln 2 + r with |r| <= ln 2 / 2; e^r by the polynomial of degree 5 that has p(0) = 1 and the least relative error
 * there, 9e-8; times 2^n made of its bits. */
INLINE vf CBGEN(exp_below)(vf x) {
    const vf floor = CBGEN(splat)(-87.0f), shift = CBGEN(splat)(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vf bounded = CBGEN(max)(floor, x);
    vf shifted = bounded * 1.44269504089f + shift;
    vf n = shifted - shift;
#if CBGEN_LANES == 4 /* without products that are not rounded before they are added, ln 2 in two parts */
    vf r = bounded - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
#else
    vf r = bounded - n * 0.693147182f;
#endif
    vf p = CBGEN(splat)(0.008290305733680725f);
    p = p * r + 0.0418979786336422f;
    p = p * r + 0.1666763722896576f;
    p = p * r + 0.4999915063381195f;
    p = p * r + 0.9999997019767761f;
    p = p * r + 1.0f;
    vf power = (vf)(((vi)shifted << 23) + (127 << 23)); /* the bits of the shift itself are moved out */
    return (vf)((vi)(p * power) & ~(x < floor));
}

/* From e^-2|x|, which cannot overflow. */
INLINE vf CBGEN(tanh)(vf x) {
    vi positive = x > 0.0f;
    vf power = CBGEN(exp_below)(-2.0f * CBGEN(choose)(positive, x, -x));
    vf size = (1.0f - power) / (1.0f + power);
    return CBGEN(choose)(positive, size, -size);
}

static __attribute__((noinline)) vf CBGEN(last_input)(const float *from, const float *scales_in, int64_t count) {
    float edge[2][LANES] = {{0}};
    for (int64_t i = 0; i < count; i++) edge[0][i] = from[i], edge[1][i] = scales_in ? scales_in[i] : 1;
    return CBGEN(load)(edge[0]) * CBGEN(load)(edge[1]);
}
/* LANES numbers from i on of a row of k, those past its end 0, times scales_in. */
INLINE vf CBGEN(scaled_input)(const float *from, const float *scales_in, int64_t i, int64_t k) {
    if (k - i < LANES) return CBGEN(last_input)(from + i, scales_in ? scales_in + i : 0, k - i);
    vf x = CBGEN(load)(from + i);
    return scales_in ? x * CBGEN(load)(scales_in + i) : x;
}

/* The bits of |x|: as integers they are in the order of the numbers, with infinity and NaN above all. */
INLINE vi CBGEN(size_bits)(vf x) { return (vi)x & INT32_MAX; }
INLINE vi CBGEN(max_int)(vi a, vi b) {
#if CBGEN_LANES == 16
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif CBGEN_LANES == 8
    return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    return (a & (a > b)) | (b & ~(a > b));
#endif
}
/* The largest of the numbers whose bits these are; NaN where one is NaN or infinite. */
INLINE float CBGEN(largest_of_bits)(vi bits) {
#if CBGEN_LANES == 16
    int32_t most = _mm512_reduce_max_epi32((__m512i)bits);
#else
    int32_t most = bits[0];
    for (int lane = 1; lane < LANES; lane++) most = bits[lane] > most ? bits[lane] : most;
#endif
    float largest;
    memcpy(&largest, &most, 4);
    return most < 0x7F800000 ? largest : NAN;
}

/* The largest absolute of the same [k]; NaN where one is NaN or infinite. */
INLINE float CBGEN(largest_size)(const float *from, const float *scales_in, int64_t k) {
    vi most = {0};
    for (int64_t i = 0; i < k; i += LANES)
        most = CBGEN(max_int)(CBGEN(size_bits)(CBGEN(scaled_input)(from, scales_in, i, k)), most);
    return CBGEN(largest_of_bits)(most);
}

/* What numbers up to `largest` are multiplied by to become levels up to `limit`; 0 for NaN and where it would overflow. */
INLINE float CBGEN(level_factor)(float largest, float limit) { return largest > 1e-33f ? limit / largest : 0; }
