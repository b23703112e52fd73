// What a warp of the cluster kernel does with entries that its lanes have looked up: logits, weights and sums.

// A running softmax of a warp. A thread has two heads, and of their sums the channels 64 h + 8 (lane / 4) + 2 i and the
// next: `sum[h][i]` is {that channel: both heads, the next one: both heads}.
struct Softmax {
    float most[2], total[2];
    float sum[HALVES][4][4];
};

// Of a warp's entries, which its lanes have looked up, as a product needs them.
struct Entries {
    const u16* at[32];  // or null
    float bias[32];     // -inf of null
#if CODES
    const Stored* codes[32];  // instead of `at`, or null
    const u16* scales[32];    // of their blocks
#endif
};

// Take logits of N times 16 entries, to base 2: `weight[g]` are those of entries `row` and `row` + 8, two heads each.
// They become weights.
template <int N>
__device__ __forceinline__ void weigh(Softmax& its, float (&weight)[N][4]) {
    bool grows = false;
    float keep[2];
#pragma unroll
    for (int c = 0; c < 2; c++) {
        float most = its.most[c];
#pragma unroll
        for (int g = 0; g < N; g++) most = fmaxf(most, fmaxf(weight[g][c], weight[g][2 + c]));
        for (int d = 4; d < 32; d *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
        const float base = base_of(most);
        keep[c] = exp2f(its.most[c] - base), grows |= most > its.most[c];
        float total = its.total[c] * keep[c];
#pragma unroll
        for (int g = 0; g < N; g++) {
            weight[g][c] = exp2f(weight[g][c] - base), weight[g][2 + c] = exp2f(weight[g][2 + c] - base);
            total = total + weight[g][c] + weight[g][2 + c];
        }
        its.total[c] = total, its.most[c] = most;
    }
    if (__any_sync(~0u, grows)) {
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int c = 0; c < 4; c++) its.sum[h][i][c] *= keep[c % 2];
            }
        }
    }
}

// Take 16 entries. `zero` is one, which the compiler does not know.
__device__ __forceinline__ void take(Softmax& its, const uint4 (&query)[STEPS][32], const Entries& entries, int first,
                                     float factor, u32 zero) {
    const int lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
    // Keys of tokens row and row + 8; values of tokens 2 quad, 2 quad + 1, and the two that are 8 further on. Tokens
    // that are not attended may hold anything, and are not read.
    uint4 key[2][STEPS], value[4][HALVES];
    float bias[2];
#pragma unroll
    for (int t = 0; t < 2; t++) {
        const u16* at = entries.at[first + row + 8 * t];
        bias[t] = entries.bias[first + row + 8 * t];
#pragma unroll
        for (int j = 0; j < STEPS; j++) key[t][j] = load_16(at + 8 * quad + 32 * j, at);
    }
#pragma unroll
    for (int t = 0; t < 4; t++) {
        const u16* at = entries.at[first + 2 * quad + t % 2 + t / 2 * 8];
#pragma unroll
        for (int h = 0; h < HALVES; h++)
            value[t][h] = load_16(at + 8 * row + DIM + 64 * h, at);
    }
    // The first product waits for all of them: or the compiler would ask for values when keys have come.
    u32 any = 0;
#pragma unroll
    for (int j = 0; j < STEPS; j++) any |= key[0][j].x | key[1][j].x;
#pragma unroll
    for (int h = 0; h < HALVES; h++) any |= value[0][h].x | value[1][h].x | value[2][h].x | value[3][h].x;
    float weight[1][4] = {{__uint_as_float(any & zero), 0, 0, 0}};  // of tokens row and row + 8, two heads each
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
        const u32 front[4] = {key[0][j].x, key[1][j].x, key[0][j].y, key[1][j].y};
        const u32 back[4] = {key[0][j].z, key[1][j].z, key[0][j].w, key[1][j].w};
        const uint4 eight = query[j][lane];
        multiply(weight[0], front, eight.x, eight.y);
        multiply(weight[0], back, eight.z, eight.w);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) weight[0][i] = bias[i / 2] == -INF ? -INF : weight[0][i] * factor + bias[i / 2];
    weigh(its, weight);
    const u32 front = transpose(pack(weight[0][0], weight[0][1])), back = transpose(pack(weight[0][2], weight[0][3]));
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {  // two tokens' numbers of a channel in a register
            u32 of[4];
#pragma unroll
            for (int t = 0; t < 4; t++) {
                const uint4& all = value[t][h];
                of[t] = i == 0 ? all.x : i == 1 ? all.y : i == 2 ? all.z : all.w;
            }
            const u32 channels[4] = {__byte_perm(of[0], of[1], 0x5410), __byte_perm(of[0], of[1], 0x7632),
                                     __byte_perm(of[2], of[3], 0x5410), __byte_perm(of[2], of[3], 0x7632)};
            multiply(its.sum[h][i], channels, front, back);
        }
    }
}

#if CODES

// Of two codes, in bytes 0 and 2, the numbers of 16 bits: as they are, or float16 in 64ths, so that a weight that is
// multiplied by a small scale keeps its digits.
__device__ __forceinline__ u32 widen(u32 codes) {
    // 128 and seven digits, less 128, or 256 of a negative one.
    const u32 digits = mask_xor(codes, 0x7f007f, 0x43004300), less = mask_xor(codes, 0x800080, 0x43004300);
    if (BFLOAT16) return subtract_bfloat16(digits, less);
    return subtract_half(mask_xor(codes, 0xff00ff, 0x4c804c80), 0x4c804c80);  // 16 + (code + 128) / 64, less 18
}

// Of four codes of a key, with two centres or steps in a word, the numbers in 16 bits: the first and the third, the
// second and the fourth.
__device__ __forceinline__ uint2 decode(u32 codes, u32 centre, u32 next_centre, u32 step, u32 next_step) {
    const auto number = [](u32 code, u32 centre, u32 step) {
        return from_half(centre) + (float)(signed char)(code & 0xff) * from_half(step);
    };
    return uint2{pack(number(codes, centre, step), number(codes >> 16, next_centre, next_step)),
                 pack(number(codes >> 8, centre >> 16, step >> 16),
                      number(codes >> 24, next_centre >> 16, next_step >> 16))};
}

// Take those of 32 entries that are codes, which `there` marks. `scale`: of the value of the lane's own entry.
__device__ __forceinline__ void take_codes(Softmax& its, const uint4 (&query)[2 * WIDE][32], const Entries& entries,
                                           u32 there, u32 scale, float factor, u32 zero) {
    const int lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
    // As in take(): keys of tokens row + 8 t, 16 channels in 16 bytes; values of tokens 2 quad, 2 quad + 1, and those 8,
    // 16 and 24 further on, 8 channels in 8 bytes, as a sum has the channels of take().
    uint4 key[4][WIDE];
    uint2 value[8][HALVES];
#pragma unroll
    for (int t = 0; t < 4; t++) {
        const Stored* at = entries.codes[row + 8 * t];
#pragma unroll
        for (int j = 0; j < WIDE; j++) key[t][j] = load_16(at + 16 * quad + 64 * j, at);
    }
#pragma unroll
    for (int t = 0; t < 8; t++) {
        const Stored* at = entries.codes[2 * quad + t % 2 + t / 2 * 8];
#pragma unroll
        for (int h = 0; h < HALVES; h++) value[t][h] = load_8(at + 8 * row + DIM + 64 * h, at);
    }
    u32 any = 0;
#pragma unroll
    for (int t = 0; t < 4; t++) {
#pragma unroll
        for (int j = 0; j < WIDE; j++) any |= key[t][j].x;
    }
#pragma unroll
    for (int t = 0; t < 8; t++) {
#pragma unroll
        for (int h = 0; h < HALVES; h++) any |= value[t][h].x;
    }
    float weight[2][4] = {{__uint_as_float(any & zero), 0, 0, 0}, {}};
    u32 before = 0;  // scales wait for the product before: or they take more registers than there are
#pragma unroll
    for (int g = 0; g < 2; g++) {
        if (g && there >> 16 == 0) continue;  // as where a list ends: often, as lists are short
#pragma unroll
        for (int j = 0; j < 2 * WIDE; j++) {
            uint2 one[2], next[2];  // four channels of tokens row and row + 8, and the next four
#pragma unroll
            for (int t = 0; t < 2; t++) {
                const u16* of = entries.scales[row + 16 * g + 8 * t];
                const u16* at = of + 16 * quad + 64 * (j / 2) + 8 * (j % 2) + before;
                const uint4 codes = key[2 * g + t][j / 2], centre = load_16(at, of), step = load_16(at + DIM, of);
                one[t] = decode(j % 2 ? codes.z : codes.x, centre.x, centre.y, step.x, step.y);
                next[t] = decode(j % 2 ? codes.w : codes.y, centre.z, centre.w, step.z, step.w);
            }
            const u32 front[4] = {one[0].x, one[1].x, one[0].y, one[1].y};
            const u32 back[4] = {next[0].x, next[1].x, next[0].y, next[1].y};
            const uint4 eight = query[j][lane];
            multiply(weight[g], front, eight.x, eight.y);
            multiply(weight[g], back, eight.z, eight.w);
            before = __float_as_uint(weight[g][0]) & zero;
        }
    }
    const float unit = BFLOAT16 ? 1 : 64;  // see widen()
    float by[4];  // scale of a value, zero of what is not attended
#pragma unroll
    for (int t = 0; t < 4; t++) {
        by[t] = from_half(__shfl_sync(~0u, scale, row + 8 * t)) * unit;
        // Larger ones are of infinite float16. Finite, or a weight times a code of zero would be no number.
        if (!BFLOAT16) by[t] = by[t] > 65504 ? 65504 : by[t];
#pragma unroll
        for (int c = 0; c < 2; c++) {
            float& its = weight[t / 2][t % 2 * 2 + c];
            its = there >> (row + 8 * t) & 1 ? its * factor : -INF;
        }
    }
    weigh(its, weight);
    u32 two[4];  // heads' weights of tokens row + 8 t, then of tokens 2 quad and the next
#pragma unroll
    for (int t = 0; t < 4; t++) {
        const float(&of)[4] = weight[t / 2];
        two[t] = transpose(pack(of[t % 2 * 2] * by[t], of[t % 2 * 2 + 1] * by[t]));
    }
#pragma unroll
    for (int g = 0; g < 2; g++) {
        if (g && there >> 16 == 0) continue;
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 of[4];
#pragma unroll
                for (int t = 0; t < 4; t++) of[t] = i < 2 ? value[4 * g + t][h].x : value[4 * g + t][h].y;
                const u32 one = i % 2 ? 0x602 : 0x400, next = i % 2 ? 0x703 : 0x501;  // bytes of both tokens
                const u32 channels[4] = {widen(__byte_perm(of[0], of[1], one)), widen(__byte_perm(of[0], of[1], next)),
                                         widen(__byte_perm(of[2], of[3], one)), widen(__byte_perm(of[2], of[3], next))};
                multiply(its.sum[h][i], channels, two[2 * g], two[2 * g + 1]);
            }
        }
    }
}

#endif
