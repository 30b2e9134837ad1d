/* Tokens drawn from logits, row by row: temperature, then top-k, then the smallest set that reaches top-p, then min-p.
 *
 * A row is never sorted. Tokens that may be kept are few, and found by a bound that costs one pass:
 *
 *     top-k   the k-th largest of the maxima of spans of SPAN tokens: so many tokens at least are as large
 *     top-p   a token with less than (1 - p) / vocabulary of all weight: all such tokens together have less than 1 - p
 *     min-p   the bound itself
 *
 * Among these candidates the last one that is kept is found as quickselect does, by count or by weight. "Larger" goes by
 * the logit, then by the smaller token. The draw goes through kept tokens in the order of their numbers. */

#ifndef CBGEN_SAMPLING
#define CBGEN_SAMPLING
#define SPAN 64
/* Candidates are taken by so much more than the bound, which is a logarithm of float32. */
#define ROUNDING 1e-3f

/* What rows ask for. top_ks 0, top_ps 1 and min_ps 0 are off. */
struct draws {
    const float *temperatures;
    const int64_t *top_ks;
    const double *top_ps;
    const float *min_ps;
    const double *uniform; /* in [0, 1) */
};

/* A token with its logit below the largest, divided by the temperature, and e to that. */
struct candidate {
    float level, weight;
    int64_t token;
};

INLINE int is_larger(const struct candidate *a, const struct candidate *b) {
    return a->level > b->level || (a->level == b->level && a->token < b->token);
}

INLINE void swap_candidates(struct candidate *a, struct candidate *b) {
    struct candidate kept = *a;
    *a = *b, *b = kept;
}

/* Puts those larger than the middle one of three before it; returns where it is then. */
static int64_t split_candidates(struct candidate *from, int64_t count) {
    int64_t middle = count / 2, last = count - 1;
    if (is_larger(from + middle, from)) swap_candidates(from + middle, from);
    if (is_larger(from + last, from)) swap_candidates(from + last, from);
    if (is_larger(from + last, from + middle)) swap_candidates(from + last, from + middle);
    swap_candidates(from + middle, from + last); /* the pivot waits at the end */
    int64_t place = 0;
    for (int64_t i = 0; i < last; i++)
        if (is_larger(from + i, from + last)) swap_candidates(from + i, from + place++);
    swap_candidates(from + place, from + last);
    return place;
}

/* The smallest candidate that is kept: the `most` largest are, and of them those before which there is less weight than
 * `share` of all of theirs (or of `total`, where that is not negative). Reorders the candidates. */
static struct candidate last_kept(struct candidate *all, int64_t count, int64_t most, double share, double total) {
    int64_t first = 0, end = count;
    while (most < count && end - first > 1) { /* all[most - 1] is what sorting would put there, and larger ones come before */
        int64_t place = first + split_candidates(all + first, end - first);
        if (place == most - 1) break;
        if (place < most - 1) first = place + 1;
        else end = place;
    }
    count = most < count ? most : count;
    if (share >= 1) {
        struct candidate least = all[0];
        for (int64_t i = 1; i < count; i++)
            if (is_larger(&least, all + i)) least = all[i];
        return least;
    }
    if (total < 0) {
        total = 0;
        for (int64_t i = 0; i < count; i++) total += all[i].weight;
    }
    double before = 0, wanted = share * total;
    first = 0, end = count;
    while (end - first > 1) { /* weight of all before `first`: `before`, which is less than wanted */
        int64_t place = first + split_candidates(all + first, end - first);
        double larger = before;
        for (int64_t i = first; i < place; i++) larger += all[i].weight;
        if (larger >= wanted) {
            end = place;
        } else if (larger + all[place].weight >= wanted || place + 1 == end) {
            return all[place];
        } else {
            before = larger + all[place].weight;
            first = place + 1;
        }
    }
    return all[first];
}

/* The k-th largest of `count` floats, which are reordered. */
static float kth_largest(float *values, int64_t count, int64_t k) {
    int64_t first = 0, end = count;
    while (end - first > 1) {
        float pivot = values[first + (end - first) / 2];
        int64_t left = first, right = end - 1;
        while (left <= right) {
            while (values[left] > pivot) left++;
            while (values[right] < pivot) right--;
            if (left <= right) {
                float kept = values[left];
                values[left++] = values[right], values[right--] = kept;
            }
        }
        if (k - 1 <= right) end = right + 1;
        else if (k - 1 >= left) first = left;
        else return values[k - 1];
    }
    return values[first];
}
#endif

/* The largest of a row, and of every span of it. */
static float CBGEN(span_maxima)(const float *x, int64_t count, float *maxima) {
    float best = -INFINITY;
    for (int64_t span = 0; span * SPAN < count; span++) {
        const float *from = x + span * SPAN;
        int64_t width = count - span * SPAN < SPAN ? count - span * SPAN : SPAN, i = 0;
        float most = -INFINITY;
        if (width >= LANES) {
            vf lanes = CBGEN(load)(from);
            for (i = LANES; i + LANES <= width; i += LANES) lanes = CBGEN(max)(lanes, CBGEN(load)(from + i));
            most = CBGEN(largest)(lanes);
        }
        for (; i < width; i++) most = from[i] > most ? from[i] : most;
        maxima[span] = most;
        best = most > best ? most : best;
    }
    return best;
}

/* LANES levels of a row from i on; past its end as little as can be. */
INLINE vf CBGEN(levels)(const float *x, int64_t i, int64_t count, float best, float temperature) {
    if (i + LANES <= count) return (CBGEN(load)(x + i) - best) / temperature;
    float edge[LANES];
    for (int64_t lane = 0; lane < LANES; lane++) edge[lane] = i + lane < count ? (x[i + lane] - best) / temperature : -INFINITY;
    return CBGEN(load)(edge);
}

/* The weights of a row, and of each span of it. Returns the weight of all. */
static double CBGEN(weigh)(const float *x, int64_t count, float best, float temperature, float *weights, float *spans) {
    double total = 0;
    for (int64_t span = 0; span * SPAN < count; span++) {
        int64_t from = span * SPAN, to = from + SPAN < count ? from + SPAN : count;
        vf sums = {0};
        for (int64_t i = from; i < to; i += LANES) {
            vf weight = CBGEN(exp_below)(CBGEN(levels)(x, i, count, best, temperature));
            CBGEN(put)(weights + i, weight);
            sums += weight;
        }
        spans[span] = CBGEN(sum)(sums);
        total += spans[span];
    }
    return total;
}

/* The token of a row without top-k, top-p and min-p. */
static int64_t CBGEN(draw_any)(int64_t count, const float *weights, const float *spans, double total, double uniform) {
    double target = uniform * total, before = 0;
    int64_t span = 0, spans_there = (count + SPAN - 1) / SPAN, chosen = -1;
    while (span + 1 < spans_there && (before + spans[span] <= target || spans[span] == 0)) before += spans[span++];
    while (span > 0 && spans[span] == 0) span--; /* rounding may leave the last ones, which have no weight */
    for (int64_t i = span * SPAN; i < (span + 1) * SPAN && i < count; i++) {
        if (weights[i] > 0) chosen = i;
        before += weights[i];
        if (chosen == i && before > target) break;
    }
    return chosen;
}

/* The candidates of a row in the order of their tokens. Returns how many there are. */
static int64_t CBGEN(candidates)(const float *x, int64_t count, float best, float temperature, float least_level,
                                 struct candidate *found) {
    int64_t size = 0;
    for (int64_t i = 0; i < count; i += LANES) {
        vf level = CBGEN(levels)(x, i, count, best, temperature);
        if (!(CBGEN(largest)(level) >= least_level)) continue;
        vf weight = CBGEN(exp_below)(level);
        for (int64_t lane = 0; lane < LANES && i + lane < count; lane++)
            if (level[lane] >= least_level) found[size++] = (struct candidate){level[lane], weight[lane], i + lane};
    }
    return size;
}

/* scratch: candidates [2 * count], and floats [count + SPAN + 2 * spans] behind them. */
static int64_t CBGEN(draw_row)(const float *x, int64_t count, const struct draws *draws, int64_t row, char *scratch) {
    struct candidate *found = (struct candidate *)scratch, *ordered = found + count;
    float *weights = (float *)(found + 2 * count), *spans = weights + count + SPAN;
    float *maxima = spans + count / SPAN + 1;
    float temperature = draws->temperatures[row], min_p = draws->min_ps[row];
    int64_t k = draws->top_ks[row] > 0 && draws->top_ks[row] < count ? draws->top_ks[row] : count;
    double p = draws->top_ps[row], total = -1;
    int64_t num_spans = (count + SPAN - 1) / SPAN;
    float best = CBGEN(span_maxima)(x, count, maxima), least = -INFINITY;
    if (k < count) {
        if (k <= num_spans) least = (kth_largest(maxima, num_spans, k) - best) / temperature;
    } else if (p < 1 || min_p == 0) {
        total = CBGEN(weigh)(x, count, best, temperature, weights, spans);
        if (p >= 1) return CBGEN(draw_any)(count, weights, spans, total, draws->uniform[row]);
        least = logf((float)((1 - p) * total / count)) - ROUNDING;
    } else {
        least = logf(min_p) - ROUNDING;
    }
    int64_t size = CBGEN(candidates)(x, count, best, temperature, least, found);
    memcpy(ordered, found, size * sizeof *found);
    struct candidate last = last_kept(found, size, k, p, total);
    double kept = 0;
    for (int64_t i = 0; i < size; i++) {
        if (is_larger(&last, ordered + i) || ordered[i].weight < min_p) ordered[i].weight = 0;
        kept += ordered[i].weight;
    }
    double target = draws->uniform[row] * kept, before = 0;
    int64_t chosen = -1;
    for (int64_t i = 0; i < size; i++) {
        if (ordered[i].weight > 0) chosen = ordered[i].token;
        before += ordered[i].weight;
        if (ordered[i].weight > 0 && before > target) break;
    }
    return chosen;
}

/* Bytes of scratch for each thread. */
EXPORT int64_t CBGEN(draw_scratch)(int64_t count) {
    int64_t bytes = 2 * count * sizeof(struct candidate) + (count + SPAN + 2 * (count / SPAN + 1)) * sizeof(float);
    return (bytes + 63) / 64 * 64;
}

/* out [rows]: a token of each row of logits [rows, count], with `stride` floats from row to row. All of them are finite or
 * -infinity, and one of each row is finite. */
EXPORT void CBGEN(draw_tokens)(const float *logits, int64_t stride, int64_t rows, int64_t count, const float *temperatures,
                               const int64_t *top_ks, const double *top_ps, const float *min_ps, const double *uniform,
                               char *scratch, int64_t scratch_bytes, int64_t *out) {
    struct draws draws = {temperatures, top_ks, top_ps, min_ps, uniform};
#pragma omp parallel for schedule(dynamic, 1) if (rows > 1)
    for (int64_t row = 0; row < rows; row++)
        out[row] = CBGEN(draw_row)(logits + row * stride, count, &draws, row, scratch + THREAD * scratch_bytes);
}
