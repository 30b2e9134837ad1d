/* cbgen's kernels for CPUs: one portable source, compiled once for every instruction set of this processor family.
 *
 * No header of torch is needed, and nothing is decided when this is compiled: the caller asks `best_isa` and takes the
 * functions with that suffix. */

#include "kernels.h"

#define CBGEN_ISA plain
#define CBGEN_LANES 4
#include "isa.h"
#undef CBGEN_ISA
#undef CBGEN_LANES

#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define CBGEN_ISA avx2
#define CBGEN_LANES 8
#include "isa.h"
#undef CBGEN_ISA
#undef CBGEN_LANES
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
#define CBGEN_ISA avx512
#define CBGEN_LANES 16
#include "isa.h"
#undef CBGEN_ISA
#undef CBGEN_LANES
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma")
#define CBGEN_ISA avx512vnni
#define CBGEN_LANES 16
#define CBGEN_VNNI
#include "isa.h"
#undef CBGEN_ISA
#undef CBGEN_LANES
#undef CBGEN_VNNI
#pragma GCC pop_options
#endif

/* The best instruction set that this processor and its system run: 0 plain, 1 avx2, 2 avx512, 3 with VNNI. */
EXPORT int best_isa(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    int avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return avx2 && avx512 ? (__builtin_cpu_supports("avx512vnni") ? 3 : 2) : avx2 ? 1 : 0;
#else
    return 0;
#endif
}
