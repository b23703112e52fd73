// Scores of tokens from packed labels, by 8-bit products of tensor cores (Hopper and later).
//
// As tensor_core.py: digits 0 to 15 are the rows of a product, and a head's query in fixed point is two columns,
// 128 a + b. Sums are exact, so all that is rounded are the queries, to a 32,512th of their largest number. The mean
// over a group is one query. Here a word of a token's codes is the register of the product that it is needed in.
//
// With EACH_QUERY the queries of a group keep scores of their own, rows of `out` that follow each other.
//
// A row of a product has the codes of TOGETHER tokens side by side, and its columns are the queries of each of them,
// zero where the others are: twice the products, but a thread has half of a token's codes in one load, and fewer
// threads read a scale and take the largest of the queries. Codes of 64 bytes (latents) are a token's alone: a quarter
// of them is a load of 16 bytes, and many queries in half of the registers. A warp has one tile of 64 tokens in flight,
// in registers, while it scores another.
//
// With SUMS, each block also adds up the masses of its tokens, and of some recent ones: mass_select/cluster.cu would
// have to read all scores for them.

#if SUMS
#include "_mass.cuh"
#endif

#define WARPS (THREADS / 32)
#define TOGETHER (WIDTH > 32 ? 1 : 2)
#define LANES (4 / TOGETHER)                     // threads that share a token
#define WORDS (WIDTH / 4 / LANES)                // of a token's codes, in four bytes each, that a thread has
#define VECTORS (MEAN ? 1 : GROUP)               // queries
#define COLUMNS ((VECTORS + LANES - 1) / LANES)  // products of eight columns
#define CHANNELS (2 * WIDTH)
#define EACH (CHANNELS / 32)  // channels of a lane, while queries are made
#define LARGEST (127 * 128.0f)
#define SPAN (BLOCK < 64 ? BLOCK : 64)  // tokens of a tile that are in one block
#define SPANS (64 / SPAN)
#define ROWS (8 * TOGETHER)  // tokens that a warp loads at once
#define TOKENS (2 * LANES)   // of a tile, that a thread has a part of: ROWS apart

static_assert(CHANNELS % 32 == 0, "a lane has whole channels");
static_assert(SPAN >= ROWS, "tokens that a warp loads at once lie in one block");

struct Queries {
    signed char parts[LANES * COLUMNS][2][CHANNELS];  // upper and lower, of the label channels
    float unit[LANES * COLUMNS], total[LANES * COLUMNS], constant[LANES * COLUMNS];
};

struct alignas(4 * WORDS) Codes {
    u32 word[WORDS];
};

// Labels of 64 tokens: what a thread has of them.
struct Tile {
    Codes codes[TOKENS];
    u32 pair[TOKENS];  // scale and zero point
};

struct Labels {  // of one KV head, for one lane
    const char *codes, *pairs;
    u32 codes_block, pairs_block;  // bytes

    // Of 64 tokens from `token` on, whose blocks lanes `first ..` know.
    __device__ __forceinline__ void load(Tile& tile, int token, int first, u32 physical) const {
        const char *p_code, *p_pair;
#pragma unroll
        for (int i = 0; i < TOKENS; i++) {
            if (i * ROWS % SPAN == 0) {
                const u32 block = __shfl_sync(~0u, physical, first + i * ROWS / SPAN);
                p_code = codes + (u64)block * codes_block, p_pair = pairs + (u64)block * pairs_block;
                const int at = token & (BLOCK - 64);  // where a block has more than a tile
                if (BLOCK > 64) p_code += at * WIDTH, p_pair += at * 4;
            }
            const int o = i * ROWS % SPAN;
            tile.codes[i] = *(const Codes*)(p_code + o * WIDTH), tile.pair[i] = *(const u32*)(p_pair + o * 4);
        }
    }
};

// What labels are relative to, in the channels of a lane.
struct Norms {
    float centre[EACH], spread[EACH];
};

// A warp makes two columns of each query, times the spreads; its product with the centres is the same for all tokens.
__device__ __forceinline__ void make_queries(Queries& queries, const u16* q, i64 q_head, i64 q_dim,
                                             const int (&channel)[EACH], const Norms& norms) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int v = warp; v < LANES * COLUMNS; v += WARPS) {
        float value[EACH], most = 0, total = 0, constant = 0;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            value[e] = 0;
            if (MEAN && v == 0) {
                for (int h = 0; h < GROUP; h++) value[e] += unpack(q[h * q_head + channel[e] * q_dim]);
                value[e] /= GROUP;
            } else if (v < VECTORS) {
                value[e] = unpack(q[v * q_head + channel[e] * q_dim]);
            }
            constant += value[e] * norms.centre[e], value[e] *= norms.spread[e];
            most = fmaxf(most, fabsf(value[e])), total += value[e];
        }
        for (int d = 16; d; d /= 2) {
            most = fmaxf(most, __shfl_xor_sync(~0u, most, d)), total += __shfl_xor_sync(~0u, total, d);
            constant += __shfl_xor_sync(~0u, constant, d);
        }
        const float unit = fmaxf(most, 1e-30f) / LARGEST;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const float whole = floorf(value[e] / unit + 0.5f);     // -16256 .. 16256
            const float upper = floorf(whole * 0.0078125f + 0.5f);  // -127 .. 127
            queries.parts[v][0][e * 32 + lane] = (signed char)(int)upper;
            queries.parts[v][1][e * 32 + lane] = (signed char)(int)(whole - 128 * upper);  // -64 .. 63
        }
        // A query that is infinite, or no number, scores nothing.
        if (lane == 0) {
            queries.unit[v] = unit, queries.total[v] = fabsf(total) < INF ? total : NOT_A_NUMBER;
            queries.constant[v] = constant;
        }
    }
}

#if SUMS
#define DIMS ((DIM + 31) / 32)  // channels of a lane, of whole keys

// Recent tokens `first`, `first + step`, ... of a row and KV head: their true masses, and the ratios of true masses to
// those of their label channels. `recent`: entries of the row and KV head.
__device__ __forceinline__ void near_sums(Sum (*sums)[GROUP], const u16* q, i64 q_head, const u16* recent,
                                          i64 recent_token, const int (&channel)[EACH], int sinks, int ring, int length,
                                          int sealed, float factor, int first, int step) {
    const int lane = threadIdx.x % 32, there = length > 0 ? min(sinks + length - sealed, sinks + ring) : 0;
    Sum near[GROUP], over[GROUP];
#pragma unroll
    for (int g = 0; g < GROUP; g++) near[g] = over[g] = {-INF, 0};
    if (first < there) {
        float query[GROUP][DIMS];
        bool own[DIMS];
#pragma unroll
        for (int e = 0; e < DIMS; e++) {
            u32 bits = 0;  // label channels among these 32
#pragma unroll
            for (int i = 0; i < EACH; i++) bits |= channel[i] / 32 == e ? 1u << channel[i] % 32 : 0;
            own[e] = __reduce_or_sync(~0u, bits) >> lane & 1;
            const int d = 32 * e + lane;
#pragma unroll
            for (int g = 0; g < GROUP; g++) query[g][e] = d < DIM ? unpack(q[g * q_head + d]) : 0;
        }
        for (int i = first; i < there; i += step) {
            int entry = i;
            if (i >= sinks) entry += sealed % max(ring, 1);
            if (entry >= sinks + ring) entry -= ring;
            if (i < sinks && i >= sealed) continue;
            const u16* key = recent + entry * recent_token;
            float of[DIMS];
#pragma unroll
            for (int e = 0; e < DIMS; e++) of[e] = 32 * e + lane < DIM ? unpack(key[32 * e + lane]) : 0;
#pragma unroll
            for (int g = 0; g < GROUP; g++) {
                float all = 0, label = 0;
#pragma unroll
                for (int e = 0; e < DIMS; e++) {
                    all += query[g][e] * of[e];
                    if (own[e]) label += query[g][e] * of[e];
                }
                for (int d = 16; d; d /= 2)
                    all += __shfl_xor_sync(~0u, all, d), label += __shfl_xor_sync(~0u, label, d);
                near[g].add(all * factor);
                if (i >= sinks) over[g].add(all * factor - label * factor);
            }
        }
    }
    if (lane) return;
#pragma unroll
    for (int g = 0; g < GROUP; g++) sums[1][g] = near[g], sums[2][g] = over[g];
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    token_score_labels_kernel(const u16* q, i64 q_batch, i64 q_head, i64 q_dim, const char* codes, i64 codes_block,
                              i64 codes_head, const u32* pairs, i64 pairs_block, i64 pairs_head, const int* channels,
                              i64 channels_batch, i64 channels_head, const float* norms, i64 norms_batch,
                              i64 norms_head, const int* table, i64 table_row, float* out,
                              i64 out_batch, i64 out_head, const int* rows, i64 heads, i64 n, i64 stretch, i64 sinks,
                              i64 fill
#if SUMS
                              ,
                              Sum* parts, const u16* recent, i64 recent_batch, i64 recent_head, i64 recent_token,
                              const int* kept, i64 ring, i64 scale_bits
#endif
    ) {
    __shared__ Queries queries;
    const i64 i_batch = blockIdx.y / (u32)heads, i_head = blockIdx.y % (u32)heads;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
    int token = uniform(blockIdx.x * WARPS + warp) * (int)stretch;
    const int stop = min(token + (int)stretch, (int)n);
    table += i_batch * table_row, channels += i_batch * channels_batch + i_head * channels_head;
    norms += i_batch * norms_batch + i_head * norms_head;
    // The next kernel reads what this one writes, and nothing of it before its wait: it may settle beside the last of
    // these blocks.
    wait_for_kernels();
    // Each lane looks up a block. Lookups and channels do not wait for the row's length: all three are read at once.
    const auto look_up = [&](int from) {
        const int of = from + SPAN * lane;
        return of < stop ? table[(u32)of / BLOCK] : -1;
    };
    int physical = look_up(token), channel[EACH];
    Norms relative;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        channel[e] = channels[e * 32 + lane];
        relative.centre[e] = norms[e * 32 + lane];
        relative.spread[e] = norms[CHANNELS + e * 32 + lane];
    }
    const int sealed = min((int)n, rows[2 * i_batch + 1]) & -BLOCK, end = uniform(min(stop, sealed));
    out += i_batch * out_batch + i_head * (EACH_QUERY ? GROUP : 1) * out_head;
    if (fill)
        for (int i = max(token, sealed) + lane; i < stop; i += 32)
            for (int g = 0; g < (EACH_QUERY ? GROUP : 1); g++) out[g * out_head + i] = -INF;
#if SUMS
    __shared__ Sum sums[WARPS][3][GROUP];  // stored tokens, recent ones, what labels leave out
    const float factor = __uint_as_float((u32)scale_bits) * LOG2E, highest = HIGHEST / factor;
    Sum stored[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) stored[c] = {-INF, 0};
    const auto tell = [&]() {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            stored[c].of_lanes(LANES);
            if (lane < LANES && LANES * c + lane < GROUP) sums[warp][0][LANES * c + lane] = stored[c];
        }
        __syncthreads();
        for (int i = threadIdx.x; i < 3 * GROUP; i += THREADS) {
            Sum all = {-INF, 0};
            for (int w = 0; w < WARPS; w++) all.add(sums[w][i % 3][i / 3]);
            parts[((i64)blockIdx.y * gridDim.x + blockIdx.x) * 3 * GROUP + i] = all;
        }
    };
    const auto near = [&]() {
        const int tokens = rows[2 * i_batch], length = kept ? min(tokens, kept[i_batch]) : tokens;
        near_sums(sums[warp], q + i_batch * q_batch + i_head * GROUP * q_head, q_head,
                  recent + i_batch * recent_batch + i_head * recent_head, recent_token, channel, (int)sinks, (int)ring,
                  length, rows[2 * i_batch + 1], factor, blockIdx.x * WARPS + warp, gridDim.x * WARPS);
    };
#endif
    if ((int)(blockIdx.x * WARPS) * (int)stretch >= sealed) {  // all of this block
#if SUMS
        near(), tell();
#endif
        return;
    }

    // Kept: otherwise these are computed again for each tile, 20 instructions of some 180.
    const Labels labels = {keep(codes + i_head * codes_head + lane * (4 * WORDS)),
                           keep((const char*)(pairs + i_head * pairs_head + lane / LANES)), (u32)codes_block,
                           4 * (u32)pairs_block};
    out = keep(out + lane / LANES + (EACH_QUERY ? quad % LANES * out_head : 0));
    const int behind_sinks = (int)sinks - lane / LANES;  // as if each lane had its first token
    u32 there;
    const auto find = [&](int from) {  // tokens of blocks that are not are loaded, but score nothing
        const bool known = from + SPAN * lane < end && physical >= 0;
        there = __ballot_sync(~0u, known);
        physical = known ? physical : 0;
    };
    find(token);
    int next = 0;  // lane that has the first block of the next tile
    Tile tiles[2];
    u32 usable[2];  // of each, a bit for each block
    const auto load = [&](int which, int from) {
        if (from >= end) return;
        if (next == 32) physical = look_up(from), find(from), next = 0;
        usable[which] = there >> next;
        labels.load(tiles[which], from, next, physical);
        next += SPANS;
    };
    // The first labels are in flight while queries are computed.
    load(0, token);
#if SUMS
    near();
#endif
    make_queries(queries, q + i_batch * q_batch + i_head * GROUP * q_head, q_head, q_dim, channel, relative);
    __syncthreads();
    u32 column[COLUMNS][WORDS][2];  // of the products' right side: what this thread holds
    float unit[COLUMNS], total[COLUMNS], constant[COLUMNS];
    const bool its_token = row / 2 / LANES == quad / LANES;  // the column's token is that of these codes
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        unit[c] = queries.unit[LANES * c + quad % LANES], total[c] = queries.total[LANES * c + quad % LANES];
        constant[c] = queries.constant[LANES * c + quad % LANES];
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            const signed char* part = queries.parts[LANES * c + row / 2 % LANES][row % 2];
            part += 4 * (quad % LANES * WORDS + w);
            column[c][w][0] = its_token ? *(const u32*)part : 0;
            column[c][w][1] = its_token ? *(const u32*)(part + WIDTH) : 0;
        }
    }

    const auto score = [&](const Tile& tile, u32 usable, int token) {
        float best[TOKENS];  // of the queries that this thread has
        const auto store = [&](float s, int o, float* to) {
            const int of_block = (o + (SPANS > 1 ? lane / LANES : 0)) / SPAN;
            const bool known = usable >> of_block & 1 && token + o >= behind_sinks && s == s;
            const bool its = BLOCK >= 64 || token + o < end - lane / LANES;
            if (its) to[token + o] = known ? s : -INF;
            return its && known ? s : -INF;
        };
#if SUMS
        float logit[COLUMNS][TOKENS];
#endif
#pragma unroll
        for (int m = 0; m < LANES; m++) {
            int product[COLUMNS][4] = {};
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                const u32 upper = tile.codes[2 * m].word[w];
                const u32 lower = tile.codes[2 * m + 1].word[w];
                const u32 digits[4] = {upper & 0x0f0f0f0f, lower & 0x0f0f0f0f, (upper >> 4) & 0x0f0f0f0f,
                                       (lower >> 4) & 0x0f0f0f0f};
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) multiply(product[c], digits, column[c][w]);
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 pair = tile.pair[2 * m + h];
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) {
                    // label = digit * scale + zero, so q . label = scale * (q . digits) + zero * sum(q), and a constant
                    const float sum = (float)(product[c][2 * h] * 128 + product[c][2 * h + 1]) * unit[c];
                    const float s = from_half(pair) * sum + (from_half(pair >> 16) * total[c] + constant[c]);
                    const bool lacks = VECTORS % LANES && LANES * c + quad % LANES >= VECTORS;
                    if (EACH_QUERY) {
                        const float its = lacks ? -INF : store(s, (2 * m + h) * ROWS, out + LANES * c * out_head);
#if SUMS
                        logit[c][2 * m + h] = bounded(its, highest) * factor;
#endif
                        continue;
                    }
                    const float its = lacks ? -INF : s;
                    best[2 * m + h] = c ? fmaxf(best[2 * m + h], its) : its;
                }
            }
        }
#if SUMS
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            float top = stored[c].most;
#pragma unroll
            for (int i = 0; i < TOKENS; i++) top = fmaxf(top, logit[c][i]);
            const float base = top == -INF ? 0 : top;
            stored[c].total *= power(stored[c].most - base), stored[c].most = top;
#pragma unroll
            for (int i = 0; i < TOKENS; i++) stored[c].total += power(logit[c][i] - base);
        }
#endif
        if (EACH_QUERY) return;
        // The largest of the threads that share tokens: each ends with two of them.
        int first = 0;
#pragma unroll
        for (int d = 1; d < LANES; d *= 2) {
            const bool high = quad & d;
            const int half = LANES / d;
            first += high ? half : 0;
#pragma unroll
            for (int i = 0; i < half; i++) {
                const float sent = high ? best[i] : best[half + i];
                best[i] = fmaxf(high ? best[half + i] : best[i], __shfl_xor_sync(~0u, sent, d));
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) store(best[i], (first + i) * ROWS, out);
    };
    while (token < end) {
#pragma unroll
        for (int which = 0; which < 2; which++, token += 64) {
            if (which && token >= end) break;
            load(1 - which, token + 64);
            score(tiles[which], usable[which], token);
        }
    }
#if SUMS
    tell();
#endif
    release_kernels();
}
